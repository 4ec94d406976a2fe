"""Fetches: pages of a prompt that a peer still computes come into the pool before its request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foretoken.core.interface.extras.request_extras import Transfer
from foretoken.core.interface.extras.transfers import PageOffer
from foretoken.core.interface.request import Request
from foretoken.core.scheduling.page_loads import LATE_SECONDS, MEETING_SECONDS
from foretoken.core.tiers.keys import chain_keys, root_key
from support.fake_model import make_request
from support.loopback import take_notes
from tests.core.scheduling.test_offers import LOADED, PAGE_SIZE, Apart
from tests.core.scheduling.test_page_loads import LEN, MAX_TOKENS, prompt_of

PART = 48  # tokens of a part, whole pages; worth a load here


def part_of(apart: Apart, num_tokens: int = PART) -> PageOffer:
    """Offer the first pages of a prompt, as P does while it computes the rest."""
    held = apart.locks.hold(apart.p_tokens, num_tokens)
    assert held is not None
    keys = [*chain_keys(root_key(b"fake", None), apart.p_tokens, PAGE_SIZE)]
    ids = held.page_ids.tolist()
    return PageOffer(held.name, apart.server.memory, keys[len(ids) - 1], ids, held.slot, held.nonce)


def fetch(apart: Apart, prompt: list[int] | None = None, *, least_tokens: int = 4) -> Request:
    """Have D fetch a part."""
    apart.d.loads.tiers.least_tokens = least_tokens
    request = make_request("f", apart.prompt if prompt is None else prompt, max_tokens=1)
    request.transfer = Transfer(offer=part_of(apart))
    apart.d.scheduler.fetch(request, apart.d.now)
    return request


def num_cached(apart: Apart) -> int:
    return apart.d.scheduler.cache.match_len(apart.p_tokens)


def check_and_serve(apart: Apart, *, computed: int) -> None:
    """The fetch has left nothing behind, and the request that it was for is served as ever."""
    loads = apart.d.loads
    assert (loads.num_offers, len(apart.peers), loads.leases, loads.num_loading) == (0, 0, [], 0)
    assert apart.d.runner.num_computed == 0, "nothing is computed for a fetch"
    if not apart.server.is_dead:
        take_notes(apart.server, apart.locks)
        assert apart.locks.ended["done"] == 1
    request = apart.ask()
    apart.d.run()
    assert apart.d.runner.num_computed == computed + MAX_TOKENS - 1
    if apart.server.is_dead:
        apart.locks.close()
    else:
        take_notes(apart.server, apart.locks)
        assert len(apart.locks) == 0
    apart.locks.ended.update(done=1, expired=0)  # both were counted
    apart.check(request, was_read=request.usage.loaded_tokens > 0)


def test_the_request_finds_what_was_fetched_and_reads_the_rest() -> None:
    apart = Apart()
    fetch(apart)
    apart.d.run_calls()
    assert num_cached(apart) == PART
    check_and_serve(apart, computed=LEN - LOADED)
    assert apart.d.scheduler.cache.num_hits == LOADED, "each token counts once"
    assert apart.reader.calls.count("read") == 5, "12 and 8 pages, in buffers of 5"


def test_parts_follow_each_other() -> None:
    apart = Apart()
    for num_tokens in (PART, LOADED - PAGE_SIZE):
        request = make_request(f"f{num_tokens}", apart.prompt, max_tokens=1)
        request.transfer = Transfer(offer=part_of(apart, num_tokens))
        apart.d.loads.tiers.least_tokens = 4
        apart.d.scheduler.fetch(request, apart.d.now)
        apart.d.run_calls()
        take_notes(apart.server, apart.locks)
        assert num_cached(apart) == num_tokens


def test_nothing_is_fetched_that_is_there_or_hardly_worth_it() -> None:
    apart = Apart()
    fetch(apart, least_tokens=10_000)
    apart.d.run_calls()
    assert num_cached(apart) == 0
    apart.d.loads.tiers.least_tokens = 4
    check_and_serve(apart, computed=LEN - LOADED)
    again = Apart()
    again.d.add(make_request("before", again.prompt, max_tokens=1))
    again.d.run()
    fetch(again)
    again.d.run_calls()
    assert "read" not in again.reader.calls
    assert (again.d.loads.num_offers, again.d.loads.leases) == (0, [])


def test_a_part_of_another_prompt_is_not_read() -> None:
    apart = Apart()
    fetch(apart, prompt_of(seed=7))
    apart.d.run_calls()
    assert apart.d.scheduler.cache.transfers.refused == {"foreign": 1}
    check_and_serve(apart, computed=LEN - LOADED)


@pytest.mark.parametrize("at", ["read_word", "read", "the second read", "send"])
def test_a_peer_that_dies_between_its_chunks_costs_no_token(at: str) -> None:
    apart, num_reads = Apart(), 0

    def die(name: str) -> None:
        nonlocal num_reads
        num_reads += name == "read"
        if name == at or (at == "the second read" and num_reads == 2):
            apart.server.is_dead = True

    apart.reader.before = die
    fetch(apart)
    apart.d.run_calls()
    found = {"the second read": 5 * PAGE_SIZE, "send": PART}.get(at, 0)
    assert num_cached(apart) == found
    check_and_serve(apart, computed=LEN - found)


def late_to_be_met(apart: Apart) -> None:
    apart.d.now += MEETING_SECONDS
    apart.d.step()
    apart.d.run_calls()


def late_in_the_thread(apart: Apart) -> None:
    for _ in range(2):  # it is met and looked up
        apart.d.end_call(apart.d.begin_call())
    call = apart.d.begin_call()
    apart.d.now += LATE_SECONDS
    apart.d.step()
    assert apart.d.loads.leases, "the thread is in its pages"
    apart.d.end_call(call)
    apart.d.run_calls()


@pytest.mark.parametrize("late", [late_to_be_met, late_in_the_thread])
def test_a_fetch_that_is_late_is_given_up(late: Callable[[Apart], None]) -> None:
    apart = Apart()
    fetch(apart)
    late(apart)
    check_and_serve(apart, computed=LEN - LOADED)


def test_a_fetch_after_a_rest_has_its_full_time() -> None:
    apart = Apart()
    apart.d.now += 100.0  # no step has told the time since
    fetch(apart)
    for _ in range(2):  # it is met and looked up
        apart.d.end_call(apart.d.begin_call())
    apart.d.step()
    apart.d.run_calls()
    assert num_cached(apart) == PART
    check_and_serve(apart, computed=LEN - LOADED)


def test_no_running_request_yields_pages_for_a_fetch() -> None:
    apart = Apart(num_pages=LEN // PAGE_SIZE + 4)
    other = make_request("other", prompt_of(seed=3), max_tokens=8)
    apart.d.add(other)
    while not other.num_output:
        apart.d.step()
    fetch(apart)
    apart.d.run_calls()
    assert (num_cached(apart), apart.d.loads.num_offers, apart.d.loads.leases) == (0, 0, [])
    apart.d.run()
    assert apart.d.scheduler.num_preemptions == 0


def test_a_request_waits_for_what_is_fetched_and_for_nothing_behind_it() -> None:
    apart = Apart()
    fetch(apart)
    for _ in range(2):  # it is met and looked up
        apart.d.end_call(apart.d.begin_call())
    call = apart.d.begin_call()
    sharer = make_request("s", apart.prompt, max_tokens=MAX_TOKENS)  # has no offer of its own
    apart.d.loads.tiers.least_tokens = 10_000  # nor does it look for pages
    apart.d.add(sharer)
    apart.d.step()
    assert apart.d.runner.num_computed == 0
    apart.d.end_call(call)
    apart.d.loads.tiers.least_tokens = 4
    apart.d.run_calls()
    assert num_cached(apart) == PART
    apart.d.run()
    assert sharer.usage.cached_tokens == PART
    assert apart.d.runner.num_computed == LEN - PART + MAX_TOKENS - 1
    apart.d.scheduler.audit()


@pytest.mark.parametrize("num_calls", range(5))
def test_the_request_may_come_while_its_part_is_read(num_calls: int) -> None:
    """The request lost pages that both transfers have when the part's one ended."""
    apart = Apart()
    fetch(apart)
    for _ in range(num_calls):
        apart.d.end_call(apart.d.begin_call())
    call = apart.d.begin_call()
    request = apart.ask()
    apart.d.end_call(call)
    while (call := apart.d.next_call()) is not None:
        apart.d.step()
        apart.d.end_call(call)
    apart.d.run()
    take_notes(apart.server, apart.locks)
    assert apart.locks.ended == {"done": 2, "expired": 0}
    assert apart.d.tiers.describe()[-1].loaded_pages == LOADED // PAGE_SIZE, "each is read once"
    assert apart.d.runner.num_computed == LEN - LOADED + MAX_TOKENS - 1
    apart.locks.ended["done"] = 1
    apart.check(request, was_read=request.usage.loaded_tokens > 0)


def test_the_pages_of_a_fetch_are_free_when_the_engine_closes() -> None:
    apart = Apart()
    fetch(apart)
    for _ in range(2):
        apart.d.end_call(apart.d.begin_call())
    apart.d.begin_call()
    apart.d.loads.close()
    assert apart.d.loads.leases == []
    cache = apart.d.scheduler.cache
    assert cache.num_free_pages + cache.tree.num_pages == cache.num_total_pages
    apart.d.scheduler.audit()


def test_a_fetch_takes_no_page_while_a_step_may_still_write_to_one_that_is_free() -> None:
    apart = Apart()
    fetch(apart)
    free = apart.d.scheduler.cache.num_free_pages
    for _ in range(2):  # it is met and looked up
        call = apart.d.begin_call()
        call.use(call.work())
    assert apart.d.next_call() is None
    assert apart.d.scheduler.cache.num_free_pages == free
    apart.d.step()  # the next plan
    apart.d.run_calls()
    assert num_cached(apart) == PART

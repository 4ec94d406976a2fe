"""Offers of a peer's pages: however a request ends, its peer is notified, and no token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from foretoken.core.interface.extras.request_extras import Transfer
from foretoken.core.interface.extras.transfers import PageOffer
from foretoken.core.interface.request import CacheOptions, Request, RequestStatus
from foretoken.core.scheduling.page_loads import LATE_SECONDS, MEETING_SECONDS
from foretoken.core.tiers.keys import chain_keys, root_key
from foretoken.core.tiers.stores.peer_store import PeerStore
from support.fake_model import FakeRunner, answer, make_request
from support.fake_tiers import TieredDriver
from support.loopback import LoopbackReader, LoopbackServer, take_notes
from tests.core.scheduling.test_page_loads import LEN, MAX_TOKENS, prompt_of

NUM_PAGES, PAGE_SIZE = 64, 4
LOADED = 80  # tokens of whole pages


class Apart:
    """P, which has computed a prompt, and D, which is asked to go on with it."""

    def __init__(self, prompt: Sequence[int] | None = None, *, num_pages: int = NUM_PAGES) -> None:
        self.prompt = prompt_of() if prompt is None else prompt
        runner = FakeRunner(PAGE_SIZE)
        self.p = TieredDriver(runner=runner)
        first = make_request("p", self.prompt, max_tokens=1)
        first.transfer = Transfer(hands_over=True)
        self.p.add(first)
        self.p.run()
        self.held = first.transfer.handed
        self.locks = self.p.scheduler.cache.transfers
        memory = torch.zeros(NUM_PAGES, PAGE_SIZE, dtype=torch.int64)
        for (page_id, at), state in runner.kv.items():
            memory[page_id, at] = state
        self.server = LoopbackServer([memory], self.locks.words)
        self.reader = LoopbackReader(8 * PAGE_SIZE * 5)
        self.peers = PeerStore(self.reader, 8 * PAGE_SIZE, clock=lambda: self.d.now)
        self.d = TieredDriver(peers=self.peers, num_pages=num_pages)

    @property
    def offer(self) -> PageOffer:
        assert self.held is not None
        keys = [*chain_keys(root_key(b"fake", None), self.p_tokens, PAGE_SIZE)]
        ids = self.held.page_ids.tolist()
        key = keys[len(ids) - 1]
        return PageOffer(
            self.held.name, self.server.memory, key, ids, self.held.slot, self.held.nonce
        )

    @property
    def p_tokens(self):  # type: ignore[no-untyped-def]
        return make_request("x", self.prompt).tokens

    def ask(
        self, prompt: Sequence[int] | None = None, offer: PageOffer | None = None, **options: object
    ) -> Request:
        """A request to D with what P offers."""
        cache = options.pop("cache", CacheOptions())
        options.setdefault("max_tokens", MAX_TOKENS)
        prompt = self.prompt if prompt is None else prompt
        request = make_request("d", prompt, **options)  # type: ignore[arg-type]
        request.cache, request.transfer = cache, Transfer(offer=offer or self.offer)  # type: ignore[assignment]
        self.d.add(request)
        return request

    def check(self, request: Request, *, was_read: bool, is_aborted: bool = False) -> None:
        """The peer was notified once, D's answer is right, and no page is left out."""
        self.d.run_calls()
        if not self.server.is_dead:
            take_notes(self.server, self.locks)
            assert self.locks.ended == {"done": 1, "expired": 0}
        assert request.transfer.offer is None
        loads = self.d.loads
        assert (loads.num_offers, len(self.peers), loads.leases) == (0, 0, [])
        for driver in (self.d, self.p):
            driver.scheduler.audit()
        assert (request.usage.loaded_tokens > 0) is was_read
        if not is_aborted:
            length = request.prompt_len
            served = self.d.served["d"]
            assert served == answer(request.tokens[:length], len(served))
            assert len(served) == MAX_TOKENS


def test_a_request_goes_on_with_the_pages_of_its_peer() -> None:
    apart = Apart()
    request = apart.ask()
    apart.d.run()
    assert request.usage.loaded_tokens == request.usage.cached_tokens == LOADED
    assert apart.d.runner.num_computed == LEN - LOADED + MAX_TOKENS - 1
    apart.check(request, was_read=True)


def test_nothing_is_read_that_the_pool_has() -> None:
    apart = Apart()
    apart.d.add(make_request("before", apart.prompt, max_tokens=1))
    apart.d.run()
    request = apart.ask()
    apart.d.run()
    assert "read" not in apart.reader.calls
    apart.check(request, was_read=False)


def test_the_rest_is_read_where_the_pool_has_the_beginning() -> None:
    prompt = prompt_of(LEN + 40)
    apart = Apart(prompt)
    apart.d.add(make_request("before", prompt[:40], max_tokens=1))
    apart.d.run()
    request = apart.ask()
    apart.d.run()
    assert request.usage.loaded_tokens == LEN - 2
    apart.check(request, was_read=True)


@pytest.mark.parametrize(
    "options", [{"cache": CacheOptions(read=False)}, {"prompt_logprobs": 0}], ids=str
)
def test_a_request_that_may_not_read_lets_its_peer_go(options: dict[str, object]) -> None:
    apart = Apart()
    request = apart.ask(**options)
    apart.d.run()
    apart.check(request, was_read=False)


def test_a_short_prompt_is_computed() -> None:
    apart = Apart(prompt_of(30))
    request = apart.ask()
    apart.d.run()
    apart.check(request, was_read=False)


def test_pages_of_another_prompt_are_counted_and_not_read() -> None:
    apart = Apart()
    request = apart.ask(prompt_of(seed=7))
    apart.d.run()
    assert apart.d.scheduler.cache.transfers.refused == {"foreign": 1}
    apart.check(request, was_read=False)


def test_an_offer_that_was_used_is_refused_when_it_comes_again() -> None:
    apart = Apart()
    offer = apart.offer
    request = apart.ask()
    apart.d.run()
    apart.check(request, was_read=True)
    apart.d.flush()
    apart.d.ended.clear()
    again = apart.ask(offer=offer)
    apart.d.run()
    assert again.usage.loaded_tokens == 0
    assert apart.peers.refused == {"expired": 1}
    apart.check(again, was_read=False)


def stop_before_meeting(apart: Apart, request: Request) -> None:
    apart.d.abort("d")


def stop_before_the_look_up(apart: Apart, request: Request) -> None:
    apart.d.end_call(apart.d.begin_call())
    assert request.transfer.offer is not None
    apart.d.abort("d")


def stop_before_admission(apart: Apart, request: Request) -> None:
    apart.d.run_calls()
    apart.d.abort("d")


def stop_before_the_load(apart: Apart, request: Request) -> None:
    apart.d.run_calls()
    apart.d.step()
    assert request.transfer.load is not None
    apart.d.abort("d")


def stop_in_the_load(apart: Apart, request: Request) -> None:
    apart.d.run_calls()
    apart.d.step()
    call = apart.d.begin_call()
    apart.d.abort("d")
    assert apart.d.loads.leases
    apart.d.end_call(call)


def stop_behind_the_load(apart: Apart, request: Request) -> None:
    apart.d.run_calls()
    apart.d.step()
    apart.d.run_calls()
    apart.d.step()
    apart.d.abort("d")


@pytest.mark.parametrize(
    "stop",
    [
        stop_before_meeting,
        stop_before_the_look_up,
        stop_before_admission,
        stop_before_the_load,
        stop_in_the_load,
        stop_behind_the_load,
    ],
)
def test_a_request_that_is_aborted_lets_its_peer_go(
    stop: Callable[[Apart, Request], None],
) -> None:
    apart = Apart()
    request = apart.ask()
    stop(apart, request)
    assert request.status is RequestStatus.FINISHED
    was_read = stop is stop_behind_the_load
    apart.check(request, was_read=was_read, is_aborted=True)


def test_a_deadline_that_passes_while_it_waits_lets_its_peer_go() -> None:
    apart = Apart()
    request = apart.ask(deadline=0.0)
    apart.d.step()
    apart.check(request, was_read=False, is_aborted=True)


def test_a_peer_that_is_met_too_late_is_not_waited_for() -> None:
    apart = Apart()
    request = apart.ask()
    apart.d.step()
    assert request.num_computed == 0, "it waits to be looked up"
    apart.d.now += MEETING_SECONDS
    apart.d.step()
    assert request.num_computed > 0
    while apart.d.scheduler.num_requests:
        apart.d.step()
    apart.check(request, was_read=False)


def test_a_load_that_is_late_is_computed_and_its_pages_stay_with_the_thread() -> None:
    apart = Apart()
    request = apart.ask()
    apart.d.run_calls()
    apart.d.step()
    call = apart.d.begin_call()
    apart.d.now += LATE_SECONDS
    apart.d.step()
    assert apart.d.loads.leases
    apart.d.end_call(call)
    apart.d.run()
    assert apart.d.loads.num_late == 1
    apart.check(request, was_read=False)


@pytest.mark.parametrize("at", ["read_word", "read", "the second read", "send"])
def test_a_peer_that_dies_costs_no_token(at: str) -> None:
    apart, num_reads = Apart(), 0

    def die(name: str) -> None:
        nonlocal num_reads
        num_reads += name == "read"
        if name == at or (at == "the second read" and num_reads == 2):
            apart.server.is_dead = True

    apart.reader.before = die
    request = apart.ask()
    apart.d.run()
    apart.check(request, was_read=at in ("the second read", "send"))


def test_a_peer_that_lets_pages_go_while_they_are_read_costs_no_token() -> None:
    apart = Apart()

    def let_go(name: str) -> None:
        if name == "read":
            assert apart.held is not None
            apart.locks.end(apart.held.name)

    apart.reader.before = let_go
    request = apart.ask()
    apart.d.run()
    assert apart.peers.refused == {"expired": 1}
    apart.check(request, was_read=False)


def test_a_preempted_request_lets_its_peer_go_and_is_computed() -> None:
    apart = Apart()
    request = apart.ask()
    apart.d.run_calls()
    apart.d.step()
    apart.d.scheduler._preempt(request)
    apart.d.run()
    apart.check(request, was_read=False)


def test_a_prompt_is_handed_over_only_where_it_was_computed_to_its_end() -> None:
    driver = TieredDriver()
    whole, gone, plain = (make_request(name, prompt_of(), max_tokens=1) for name in "abc")
    whole.transfer = gone.transfer = Transfer(hands_over=True)
    driver.add(gone)
    driver.step()
    driver.abort("b")
    driver.add(whole, plain)
    driver.run()
    assert (gone.transfer.handed, plain.transfer.handed) == (None, None)
    assert whole.transfer.handed is not None
    assert len(whole.transfer.handed.page_ids) * PAGE_SIZE == LOADED
    driver.scheduler.audit()


def test_an_offer_that_another_peer_signed_is_met_at_that_peer() -> None:
    """Two peers at a time: pages come from the one that holds them."""
    first, second = Apart(), Apart(prompt_of(seed=5))
    offer = replace(second.offer)
    request = first.ask(second.prompt, offer)
    first.d.run()
    assert request.usage.loaded_tokens == LOADED
    take_notes(second.server, second.locks)
    assert second.locks.ended["done"] == 1
    assert len(first.locks) == 1

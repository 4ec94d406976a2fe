"""Recurrent states: which page ends requests go on from, which are kept, and who owns each slot."""

from __future__ import annotations

import random
from array import array

import pytest

from foretoken.radix_cache import KVLease, PrefixCache, StateRank, StateSlots

PAGE = 4
GRID, USED = StateRank.GRID, StateRank.USED


def seq(num_tokens: int, first: int = 0) -> array[int]:
    return array("q", range(first, first + num_tokens))


def make_cache(num_slots: int = 6, *, num_pages: int = 40, num_logs: int = 4) -> PrefixCache:
    return PrefixCache(num_pages, PAGE, states=StateSlots(num_slots, num_logs))


def slots(cache: PrefixCache) -> StateSlots:
    assert cache.states is not None
    return cache.states


def compute(cache: PrefixCache, lease: KVLease, tokens: array[int], stop: int, start: int) -> None:
    """A step computes ``tokens[start:stop]`` and is committed."""
    assert cache.extend(lease, stop)
    cache.keep_states(lease, start, stop)
    cache.settle_state(lease, stop)
    cache.publish(lease, tokens, stop)
    cache.check([lease])


def serve(
    cache: PrefixCache,
    tokens: array[int],
    *wanted: int,
    rank: StateRank = USED,
    namespace: str | None = None,
) -> int:
    """A request comes, computes all of its tokens in one step, and goes; returns what it found."""
    lease = cache.acquire(tokens, namespace=namespace)
    assert lease.state is not None
    for position in wanted:
        lease.state.want(position, rank)
    compute(cache, lease, tokens, len(tokens), lease.num_cached_tokens)
    cache.release(lease, tokens, len(tokens))
    cache.check([])
    return lease.num_cached_tokens


def test_a_request_goes_on_from_the_deepest_page_that_has_a_state() -> None:
    cache = make_cache()
    serve(cache, seq(24), 8)
    assert sorted(slots(cache).attached) == sorted(
        cache.tree.match(seq(24)).page_ids[at] for at in (1, 4)
    ), "the wanted end, and the one before the last row, where the request's own state stood"
    assert cache.match_len(seq(30)) == 20
    assert cache.match_len(seq(20)) == 8, "the last token is computed, and so is its page"
    assert cache.match_len(seq(8)) == 0


def test_a_lease_tells_what_was_found_and_what_of_it_can_be_used() -> None:
    cache = make_cache()
    serve(cache, seq(24), 8)
    lease = cache.acquire(seq(18))
    assert (lease.num_cached_tokens, lease.num_found_tokens) == (8, 16)
    assert lease.num_shared_pages == 2, "what is computed again is not borrowed"
    assert lease.eviction is not None
    assert lease.eviction.cause == "state_not_kept"
    cache.check([lease])
    cache.release(lease, seq(18), 8)


def test_tokens_are_counted_as_computed_again_with_the_first_step_and_once() -> None:
    cache = make_cache()
    serve(cache, seq(24), 8)
    lease = cache.acquire(seq(18))
    assert slots(cache).num_recomputed_tokens == 0, "nothing is computed yet"
    compute(cache, lease, seq(18), 17, 8)
    compute(cache, lease, seq(18), 18, 17)
    assert slots(cache).num_recomputed_tokens == 8
    cache.release(lease, seq(18), 18)


@pytest.mark.parametrize("position", [12, 16])
def test_what_a_tier_loads_is_not_counted_as_computed_again(position: int) -> None:
    cache = make_cache()
    serve(cache, seq(24), 8)
    lease = cache.acquire(seq(18))
    slot = cache.begin_state_load()
    assert slot is not None
    assert cache.extend(lease, position)
    cache.publish(lease, seq(18), position)
    cache.end_state_load(slot, lease, position)
    compute(cache, lease, seq(18), 18, position)
    assert slots(cache).num_recomputed_tokens == 16 - position
    cache.release(lease, seq(18), 18)


def test_a_page_that_is_computed_again_is_no_reported_loss() -> None:
    cache = make_cache()
    serve(cache, seq(24))
    lease = cache.acquire(seq(30))
    assert (lease.num_cached_tokens, lease.num_found_tokens) == (20, 24)
    assert lease.eviction is None
    cache.release(lease, seq(30), 20)


def test_what_is_computed_again_is_published_and_the_copies_are_freed() -> None:
    cache = make_cache()
    serve(cache, seq(24), 8)
    lease = cache.acquire(seq(18))
    compute(cache, lease, seq(18), 18, 8)
    assert lease.page_ids[:4] == cache.tree.match(seq(16)).page_ids
    cache.release(lease, seq(18), 18)
    assert cache.match_len(seq(18)) == 16, "its own state stands at the last page's end before 17"
    cache.check([])


def test_a_request_copies_the_state_that_it_goes_on_from_and_has_a_slot_and_a_log_of_its_own() -> (
    None
):
    cache = make_cache()
    serve(cache, seq(24))
    (kept,) = slots(cache).attached.values()
    one, other = cache.acquire(seq(30)), cache.acquire(seq(30))
    assert one.state is not None
    assert other.state is not None
    assert one.state.source is other.state.source is kept
    assert len({kept.slot, one.state.slot, other.state.slot}) == 3
    assert one.state.log != other.state.log
    cache.check([one, other])
    for lease in (one, other):
        cache.release(lease, seq(30), 20)


def test_a_state_is_not_evicted_before_it_was_copied() -> None:
    cache = make_cache(3)
    serve(cache, seq(24))
    lease = cache.acquire(seq(30))
    assert lease.state is not None
    taken = [slots(cache).take(None) for _ in range(2)]
    assert taken[0] is not None
    assert taken[1] is None, "one slot is its own, one is about to be copied to it"
    cache.settle_state(lease, 21)
    assert slots(cache).take(None) is not None


def test_a_request_waits_while_no_slot_can_be_had() -> None:
    cache = make_cache(3)
    serve(cache, seq(24))
    first = cache.acquire(seq(30))
    assert cache.would_fit(seq(9, 90), 10)
    second = cache.acquire(seq(9, 90))
    assert not cache.would_fit(seq(9, 50), 10)
    with pytest.raises(RuntimeError, match="no state slot is free"):
        cache.acquire(seq(9, 50))
    cache.settle_state(first, 21)
    assert cache.would_fit(seq(9, 50), 10), "the state that was copied may give way now"
    cache.check([first, second])


def test_a_request_waits_while_no_log_is_free() -> None:
    cache = make_cache(9, num_logs=1)
    lease = cache.acquire(seq(9))
    assert not cache.would_fit(seq(9, 50), 10)
    cache.release(lease, seq(9), 0)
    assert cache.would_fit(seq(9, 50), 10)


def test_a_state_that_never_was_computed_is_attached_nowhere() -> None:
    cache = make_cache()
    serve(cache, seq(24))
    cache.release(cache.acquire(seq(30)), seq(30), 20)
    cache.release(cache.acquire(seq(9, 90)), seq(9, 90), 0)
    assert len(slots(cache).attached) == 1
    assert slots(cache).num_free == 5


@pytest.mark.parametrize("how", ["does not keep", "failed"])
def test_the_state_of_a_request_that_failed_is_attached_nowhere(how: str) -> None:
    cache = make_cache()
    lease = cache.acquire(seq(24))
    compute(cache, lease, seq(24), 20, 0)
    if how == "failed":
        cache.void_state(lease)
    cache.release(lease, seq(24), 20, keep=how == "failed")
    assert not slots(cache).attached
    assert slots(cache).num_free == 6


def test_what_a_step_was_to_keep_and_did_not_compute_is_freed() -> None:
    cache = make_cache()
    lease = cache.acquire(seq(24))
    assert lease.state is not None
    lease.state.want(8)
    assert cache.extend(lease, 24)
    assert len(cache.keep_states(lease, 0, 24)) == 1
    cache.check([lease])
    cache.release(lease, seq(24), 0)
    assert not slots(cache).attached
    cache.check([])


def test_a_step_that_is_not_committed_attaches_nothing() -> None:
    cache = make_cache()
    lease = cache.acquire(seq(24))
    assert lease.state is not None
    lease.state.want(16)
    assert cache.extend(lease, 24)
    assert len(cache.keep_states(lease, 0, 24)) == 1
    cache.publish(lease, seq(24), 12)
    assert not slots(cache).attached
    cache.check([lease])
    cache.publish(lease, seq(24), 24)
    assert len(slots(cache).attached) == 1
    cache.release(lease, seq(24), 24)
    assert cache.match_len(seq(24)) == 16
    cache.check([])


def test_page_ends_are_kept_by_the_step_that_passes_them_and_by_no_other() -> None:
    cache = make_cache()
    lease = cache.acquire(seq(24))
    assert lease.state is not None
    for position in (12, 4, 8, 12):
        lease.state.want(position)
    assert cache.extend(lease, 24)
    assert [position for position, _ in cache.keep_states(lease, 0, 8)] == [4, 8]
    cache.settle_state(lease, 8)
    cache.publish(lease, seq(24), 8)
    assert len(slots(cache).attached) == 2
    assert cache.keep_states(lease, 8, 11) == ()
    assert [position for position, _ in cache.keep_states(lease, 11, 13)] == [12]


def test_the_more_important_rank_counts_for_a_page_end_that_is_wanted_twice() -> None:
    cache = make_cache()
    lease = cache.acquire(seq(24))
    assert lease.state is not None
    for rank in (GRID, USED, GRID):
        lease.state.want(8, rank)
    assert lease.state.wanted == [(8, USED)]


def test_states_on_a_grid_give_way_first_and_to_each_other_alone() -> None:
    cache = make_cache(4)
    serve(cache, seq(9, 100))
    serve(cache, seq(24), 4, 8, rank=GRID)
    assert cache.match_len(seq(13)) == 8
    serve(cache, seq(24, 50), 4, 8, rank=GRID)
    assert cache.match_len(seq(9, 100)) == 8, "what a request used outlives the grid"
    assert cache.match_len(seq(13)) == 0
    assert slots(cache).num_evicted == 2
    cache.check([])


def test_the_state_used_least_recently_gives_way() -> None:
    cache = make_cache(4)
    for first in (0, 100, 200):
        serve(cache, seq(9, first))
    assert cache.match_len(seq(10)) == 8
    serve(cache, seq(10))  # found, and so used; its own state goes to the same page
    for first in (300, 400):
        serve(cache, seq(9, first))
    assert [cache.match_len(seq(10, first)) for first in (0, 100, 200)] == [8, 0, 8]


def test_the_state_at_the_end_of_a_pin_goes_last_and_makes_room_for_a_request_alone() -> None:
    cache = make_cache(3)
    serve(cache, seq(9))
    cache.pin(seq(9), 8, ttl=10.0)
    for first in (100, 200, 300):
        serve(cache, seq(9, first))
    assert cache.match_len(seq(10)) == 8
    leases = [cache.acquire(seq(9, first)) for first in (400, 500)]
    assert slots(cache).take(USED, cache.pinned_states()) is None
    leases.append(cache.acquire(seq(9, 600)))
    assert cache.match_len(seq(10)) == 0
    cache.check(leases)


@pytest.mark.parametrize("num_tokens", [24, 26, 28])
def test_a_pin_protects_its_last_state_where_its_last_page_has_none(num_tokens: int) -> None:
    """A request ends at a page's end, say: its state stands a page before."""
    cache = make_cache(4)
    serve(cache, seq(num_tokens), 8)
    cache.pin(seq(num_tokens), num_tokens, ttl=10.0)
    last = (num_tokens - 1) // PAGE * PAGE
    for first in (100, 200, 300, 400):
        serve(cache, seq(9, first), 4)
    assert cache.match_len(seq(num_tokens + 4)) == last
    assert cache.match_len(seq(12)) == 0, "an earlier one is no better than any other"
    cache.check([])


def test_a_pin_protects_a_state_above_the_place_where_prefixes_branch() -> None:
    cache = make_cache(4)
    serve(cache, seq(24))
    serve(cache, seq(20) + seq(3, 100))
    cache.pin(seq(24), 24, ttl=10.0)
    for first in (200, 300, 400, 500):
        serve(cache, seq(9, first), 4)
    assert cache.match_len(seq(28)) == 20
    cache.check([])


def test_pins_of_one_beginning_protect_its_last_state_and_their_own() -> None:
    cache = make_cache(5)
    trunk = seq(12)
    serve(cache, trunk + seq(12, 100), 8)
    serve(cache, trunk + seq(12, 200))
    for first in (100, 200):
        cache.pin(trunk + seq(12, first), 24, ttl=10.0)
    cache.pin(trunk, 12, ttl=10.0)
    for first in (300, 400, 500):
        serve(cache, seq(9, first), 4)
    assert [cache.match_len(trunk + seq(13, first)) for first in (100, 200, 300)] == [20, 20, 8]
    cache.check([])


def test_a_pin_whose_state_is_gone_protects_none() -> None:
    cache = make_cache(2)
    serve(cache, seq(24))
    cache.pin(seq(24), 24, ttl=10.0)
    lease = cache.acquire(seq(9, 100))
    other = cache.acquire(seq(9, 200))
    assert not slots(cache).attached, "a request takes the last one"
    assert not cache.pinned_states()
    for each in (lease, other):
        cache.release(each, seq(9), 0)
    cache.check([])


def test_a_page_that_has_a_state_keeps_it_and_the_other_is_freed() -> None:
    cache = make_cache()
    serve(cache, seq(24), 8)
    lease = cache.acquire(seq(18), limit=0)
    assert lease.state is not None
    lease.state.want(8)
    compute(cache, lease, seq(18), 18, 0)
    cache.release(lease, seq(18), 18)
    assert len(slots(cache).attached) == 3
    assert slots(cache).num_free == 3
    cache.check([])


def test_pages_that_leave_the_cache_free_their_slots() -> None:
    cache = make_cache(num_pages=8)
    serve(cache, seq(24), 8)
    lease = cache.acquire(seq(20, 90))
    assert cache.extend(lease, 20)  # the last pages of the leaf are trimmed
    assert len(slots(cache).attached) == 1
    cache.check([lease])
    assert cache.extend(lease, 28)
    assert not slots(cache).attached
    cache.release(lease, seq(20, 90), 0)
    serve(cache, seq(24))
    cache.flush()
    assert slots(cache).num_free == 6
    cache.check([])


def test_states_of_one_namespace_are_not_found_in_another() -> None:
    cache = make_cache()
    serve(cache, seq(24), namespace="a")
    assert cache.match_len(seq(24), namespace="b") == 0
    assert serve(cache, seq(30), namespace="a") == 20


@pytest.mark.parametrize("sizes", [(1, 1), (2, 0)])
def test_too_few_slots_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 2 slots"):
        StateSlots(*sizes)


def test_a_crowd_of_requests_goes_on_from_no_state_but_its_own_prefix() -> None:
    """Each slot holds the prefix whose state it is; every copy is compared with what is wanted."""
    for seed in range(60):
        rng = random.Random(seed)
        cache = make_cache(rng.choice([3, 4, 7]), num_pages=rng.choice([12, 30]), num_logs=3)
        held: dict[int, tuple[int, ...]] = {}  # by slot: the tokens that its state covers
        running: list[tuple[KVLease, array[int], int]] = []
        for _ in range(150):
            tokens = array("q", rng.choices(range(2), k=rng.randint(1, 30)))
            if len(running) < 3 and cache.would_fit(tokens, len(tokens)):
                lease = cache.acquire(tokens)
                assert lease.state is not None
                for position in range(PAGE, len(tokens), PAGE):
                    if rng.random() < 0.3:
                        lease.state.want(position, rng.choice([GRID, USED]))
                running.append((lease, tokens, lease.num_cached_tokens))
            for index, (lease, tokens, start) in enumerate(running):
                stop = min(len(tokens), start + rng.randint(1, 9))
                if start == stop or rng.random() < 0.1 or not cache.extend(lease, stop):
                    continue
                state = lease.state
                assert state is not None
                if state.source is not None:
                    held[state.slot] = held[state.source.slot]
                elif start == 0:
                    held[state.slot] = ()
                at = start // PAGE * PAGE
                assert held[state.slot] in (tuple(tokens[:at]), tuple(tokens[: max(0, at - PAGE)]))
                for position, slot in cache.keep_states(lease, start, stop):
                    held[slot] = tuple(tokens[:position])
                held[state.slot] = tuple(tokens[: (stop - 1) // PAGE * PAGE])
                if rng.random() < 0.1:
                    cache.void_state(lease)
                    held[state.slot] = (-1,)
                    cache.release(lease, tokens, start)
                    running[index] = (lease, tokens, -1)
                    continue
                cache.settle_state(lease, stop)
                cache.publish(lease, tokens, stop)
                running[index] = (lease, tokens, stop)
            running = [each for each in running if each[2] >= 0]
            if running and rng.random() < 0.4:
                lease, tokens, start = running.pop(rng.randrange(len(running)))
                cache.release(lease, tokens, start, keep=rng.random() < 0.8)
            if rng.random() < 0.02:
                cache.flush()
            cache.check([lease for lease, *_ in running])
            for kept in slots(cache).attached.values():
                path = next(
                    [token for node in each.path() for token in node.key]
                    for each in cache.tree.nodes()
                    if kept.page_id in each.page_ids
                )
                covered = held[kept.slot]
                assert covered == tuple(path[: len(covered)])
                assert len(covered) % PAGE == 0 < len(covered)

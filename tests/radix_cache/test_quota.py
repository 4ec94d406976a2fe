"""Pages of a namespace beyond its quota make room first.

The state machine in test_cache_machine.py runs with quotas as well; here is what they are for.
"""

from __future__ import annotations

from array import array
from itertools import count

import pytest

from foretoken.radix_cache import PrefixCache, RadixTree, audit
from foretoken.radix_cache.eviction import EvictionIndex
from foretoken.radix_cache.node import Node

NEW = count(1)


def leave(cache: PrefixCache, namespace: str | None, num_pages: int) -> array[int]:
    """A request of new tokens comes, is computed and ends."""
    tokens = array("q", [next(NEW)] * num_pages * cache.page_size)
    lease = cache.acquire(tokens, namespace=namespace)
    assert cache.extend(lease, len(tokens))
    cache.release(lease, tokens, len(tokens))
    return tokens


def kept(cache: PrefixCache, namespace: str | None, tokens: array[int]) -> int:
    """Pages of it that are cached still."""
    return cache.tree.match(tokens, namespace=namespace).num_tokens // cache.page_size


def owned(cache: PrefixCache) -> dict[str | None, int]:
    cache.check([])
    return cache.tree.owned.num_pages


def come_back(cache: PrefixCache, namespace: str | None, tokens: array[int]) -> None:
    """A request of the same tokens comes; what is cached of them is read."""
    lease = cache.acquire(tokens, namespace=namespace)
    assert cache.extend(lease, len(tokens))
    cache.release(lease, tokens, len(tokens))


def test_a_flood_of_one_namespace_leaves_the_others_what_they_have() -> None:
    cache = PrefixCache(20, 2, cache_quota=0.5)
    quiet = [leave(cache, "quiet", 2) for _ in range(3)]
    for index in range(100):
        if index % 15 == 0:  # after twice the pool, and only for one of them
            come_back(cache, "quiet", quiet[0])
        leave(cache, "flood", 3)
    assert [kept(cache, "quiet", tokens) for tokens in quiet] == [2] * 3
    assert owned(cache) == {"quiet": 6, "flood": 14}


def test_nobody_gets_beyond_its_quota_and_what_it_needs_at_a_time() -> None:
    cache = PrefixCache(20, 2, cache_quota=0.5)
    for _ in range(5):
        leave(cache, "quiet", 2)
    for _ in range(100):
        leave(cache, "flood", 3)
        leave(cache, "quiet", 0)
        assert owned(cache)["flood"] <= 10 + 3
    assert owned(cache)["quiet"] == 20 - 10 - 3


@pytest.mark.parametrize(("quota", "num_by_quota"), [(0.5, 3), (1.0, 0)])
def test_pages_that_go_because_of_a_quota_are_counted_apart(quota, num_by_quota) -> None:
    cache = PrefixCache(20, 2, cache_quota=quota)
    leave(cache, "quiet", 2)
    for _ in range(7):  # the last one finds no free page
        leave(cache, "flood", 3)
    assert (cache.tree.num_evicted, cache.tree.num_evicted_by_quota) == (3, num_by_quota)


def test_without_a_quota_a_flood_drives_out_everybody() -> None:
    cache = PrefixCache(20, 2, cache_quota=1.0)
    quiet = leave(cache, "quiet", 2)
    for _ in range(100):
        leave(cache, "flood", 3)
    assert kept(cache, "quiet", quiet) == 0


def cycle(cache: PrefixCache, prompts: list[array[int]], rounds: int) -> None:
    for _ in range(rounds):
        for tokens in prompts:
            come_back(cache, "here", tokens)


@pytest.mark.parametrize("num_gone", [1, 4, 20])
@pytest.mark.parametrize("quota", [0.1, 0.5])
def test_tenants_that_are_gone_make_room_for_those_that_are_here(
    num_gone: int, quota: float
) -> None:
    cache = PrefixCache(20, 2, cache_quota=quota)
    for index in range(20):
        leave(cache, f"gone-{index % num_gone}", 1)
    here = [array("q", [-index] * 6) for index in range(1, 5)]
    cycle(cache, here, 10)
    assert [kept(cache, "here", tokens) for tokens in here] == [3] * 4
    assert owned(cache)["here"] == 12


def test_what_one_that_is_here_never_reads_again_does_not_shield_those_that_are_gone() -> None:
    cache = PrefixCache(20, 2, cache_quota=0.5)
    leave(cache, "gone", 1)
    unread, read = leave(cache, "modest", 1), leave(cache, "modest", 1)
    leave(cache, "gone", 5)
    here = [array("q", [-index] * 6) for index in range(1, 6)]
    for _ in range(20):
        come_back(cache, "modest", read)
        cycle(cache, here, 1)
    assert [kept(cache, "here", tokens) for tokens in here] == [3] * 5
    assert kept(cache, "modest", unread) == 1


def test_one_that_comes_back_is_protected_anew() -> None:
    cache = PrefixCache(20, 2, cache_quota=0.5)
    old = leave(cache, "quiet", 4)
    for _ in range(30):
        leave(cache, "flood", 3)
    assert kept(cache, "quiet", old) == 0
    new = leave(cache, "quiet", 4)
    for _ in range(15):
        leave(cache, "flood", 3)
    assert kept(cache, "quiet", new) == 4


@pytest.mark.parametrize("is_pinned", [True, False])
def test_one_whose_pages_are_all_held_is_here(is_pinned: bool) -> None:
    cache = PrefixCache(20, 2, cache_quota=0.5, pin_quota=1.0)
    held = leave(cache, "held", 4)
    gone = leave(cache, "gone", 4)
    lease = None if is_pinned else cache.acquire(array("q", [*held, 0]), namespace="held")
    if is_pinned:
        cache.pin(held, len(held), ttl=1.0, namespace="held")
    for _ in range(40):
        leave(cache, "flood", 3)
    assert (kept(cache, "held", held), kept(cache, "gone", gone)) == (4, 0)
    cache.check([] if lease is None else [lease])


def put(tree: RadixTree, namespace: str, *page_ids: int) -> None:
    """Prompts of one page each, whose token is the page's id."""
    for page_id in page_ids:
        tree.insert(array("q", [page_id]), array("q", [page_id]), namespace=namespace)


@pytest.mark.parametrize("is_over", [True, False])
def test_one_is_here_from_the_beginning_of_its_request_to_its_end(is_over: bool) -> None:
    tree = RadixTree(1, quota=2, idle_after=4)
    put(tree, "here", 1, 2, 3, 4, 5, 6, 7, 8, 9)
    put(tree, "long", 10, 11)
    if is_over:  # its request began before all evictions
        lock = tree.lock(tree.match(array("q", [10]), namespace="long"))
    assert tree.evict(5) == array("q", [1, 2, 3, 4, 5])
    if is_over:
        tree.unlock(lock)
    else:  # its request begins after them
        tree.lock(tree.match(array("q", [10]), namespace="long"))
    put(tree, "here", 12)
    assert tree.evict(1) == array("q", [6]), "what is beyond its quota, for nobody is idle"


def test_those_that_left_the_cache_are_forgotten() -> None:
    cache = PrefixCache(6, 1, cache_quota=0.5)
    for index in range(200):
        leave(cache, f"once-{index}", 1)
    assert len(cache.tree.owned._used) == len(owned(cache)) == 6


def test_a_use_that_was_not_noted_is_noticed() -> None:
    tree = RadixTree(1, quota=2)
    tree.insert(array("q", [1]), array("q", [0]), namespace="a")
    tree.owned.forget("a")
    with pytest.raises(AssertionError, match="time of last use"):
        tree.check()


def test_within_their_quotas_the_least_recently_used_goes_whoever_left_it() -> None:
    cache = PrefixCache(10, 1, cache_quota=0.5)
    old = leave(cache, "a", 4)
    new = leave(cache, "b", 4)
    leave(cache, "c", 4)
    assert (kept(cache, "a", old), kept(cache, "b", new)) == (2, 4)


def test_a_namespace_that_is_alone_may_have_all() -> None:
    cache = PrefixCache(10, 1, cache_quota=0.2)
    for _ in range(5):
        leave(cache, None, 3)
    assert owned(cache) == {None: 10}


def test_one_who_had_all_gives_way_down_to_its_quota_and_no_further() -> None:
    cache = PrefixCache(10, 1, cache_quota=0.5)
    leave(cache, None, 10)
    for _ in range(5):
        leave(cache, "a", 1)
    assert owned(cache) == {None: 5, "a": 5}
    leave(cache, "b", 1)  # from now on the oldest goes, and that is the shared default's
    assert owned(cache) == {None: 4, "a": 5, "b": 1}


def test_what_is_beyond_the_quota_goes_first_though_it_was_used_last() -> None:
    cache = PrefixCache(10, 1, cache_quota=0.5)
    old = leave(cache, "small", 2)
    hog = [leave(cache, "hog", 2) for _ in range(4)]
    leave(cache, "new", 2)
    assert kept(cache, "small", old) == 2
    assert [kept(cache, "hog", tokens) for tokens in hog] == [0, 2, 2, 2]


def test_of_a_prefix_beyond_the_quota_only_the_excess_goes() -> None:
    cache = PrefixCache(10, 1, cache_quota=0.5)
    old = leave(cache, "small", 3)
    hog = leave(cache, "hog", 7)
    leave(cache, "new", 4)
    assert (kept(cache, "hog", hog), kept(cache, "small", old)) == (5, 1)


def test_of_several_beyond_the_quota_the_least_valuable_leaf_goes() -> None:
    cache = PrefixCache(12, 1, cache_quota=0.25)
    first, second = leave(cache, "a", 5), leave(cache, "b", 5)
    leave(cache, "c", 2)
    leave(cache, "c", 1)
    assert (kept(cache, "a", first), kept(cache, "b", second)) == (4, 5)


def test_what_is_borrowed_or_pinned_beyond_the_quota_stays_and_others_make_room() -> None:
    cache = PrefixCache(10, 1, cache_quota=0.5, pin_quota=1.0)
    old = leave(cache, "small", 2)
    hog = leave(cache, "hog", 4)
    pinned = leave(cache, "hog", 4)
    cache.pin(pinned, 4, ttl=100.0, namespace="hog")
    lease = cache.acquire(array("q", [*hog, 0]), namespace="hog")
    leave(cache, "new", 1)
    assert kept(cache, "small", old) == 1
    assert kept(cache, "hog", hog) == kept(cache, "hog", pinned) == 4
    cache.check([lease])


def test_a_quota_of_next_to_nothing_still_lets_a_page_be_cached() -> None:
    cache = PrefixCache(4, 1, cache_quota=0.0)
    one, other = leave(cache, "a", 1), leave(cache, "b", 1)
    leave(cache, "c", 2)
    assert kept(cache, "a", one) == kept(cache, "b", other) == 1


def test_a_flush_and_a_return_are_counted() -> None:
    cache = PrefixCache(10, 1, cache_quota=0.5)
    leave(cache, "a", 6)
    leave(cache, "b", 2)
    cache.flush("a")
    assert owned(cache) == {"b": 2}
    leave(cache, "a", 3)
    assert owned(cache) == {"a": 3, "b": 2}


def test_a_wrong_count_is_noticed() -> None:
    tree = RadixTree(1, quota=2)
    tree.insert(array("q", [1, 2, 3]), array("q", [0, 1, 2]), namespace="a")
    tree.owned.num_pages["a"] = 2
    with pytest.raises(AssertionError, match="namespaces own"):
        tree.check()


def test_a_namespace_not_known_to_be_beyond_its_quota_is_noticed() -> None:
    tree = RadixTree(1, quota=2)
    tree.insert(array("q", [1, 2, 3]), array("q", [0, 1, 2]), namespace="a")
    tree.owned.quota = 3
    with pytest.raises(AssertionError, match="quota"):
        tree.check()


def test_the_first_of_a_namespace_is_found_however_often_leaves_were_refiled() -> None:
    index = EvictionIndex()
    leaves = [Node(name, last_used=tick) for tick, name in enumerate("abab")]
    for leaf in leaves:
        index.add(leaf)
    assert index.first_of("b") is leaves[1]
    for tick in range(4, 1000):
        index.remove(leaf := leaves[tick % 3])
        leaf.last_used = tick
        index.add(leaf)
    assert index.first_of(["b"]) is leaves[3]
    index.remove(leaves[3])
    assert index.first_of(["b", "c"]) is leaves[1]
    assert index.first_of(["c"]) is None
    assert index.first_of("ab") is next(iter(index))
    audit.run(index.checks())
    assert sum(len(ranks.heap) for ranks in index._ranks.values()) < 300, "it remembers everything"


def test_the_last_use_orders_within_a_namespace_beyond_its_quota() -> None:
    cache = PrefixCache(8, 1, cache_quota=0.5)
    small = leave(cache, "small", 2)
    worn, rare = leave(cache, "hog", 3), leave(cache, "hog", 3)
    lease = cache.acquire(array("q", [*worn, 0]), namespace="hog")
    cache.release(lease, array("q", worn), 3)
    leave(cache, "new", 1)
    assert (kept(cache, "hog", worn), kept(cache, "hog", rare)) == (3, 2)
    assert kept(cache, "small", small) == 2

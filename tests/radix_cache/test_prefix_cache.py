"""The page accountant: each verb, its refusals, and the ledger."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from foretoken.radix_cache import KVLease, PrefixCache
from foretoken.radix_cache.node import Match


def ids(*values: int) -> array[int]:
    return array("q", values)


def seq(num_tokens: int, start: int = 0) -> array[int]:
    return array("q", range(start, start + num_tokens))


def serve(cache: PrefixCache, tokens: array[int], namespace: str | None = None) -> None:
    """A request that computes all its tokens and ends."""
    lease = cache.acquire(tokens, namespace=namespace)
    assert cache.extend(lease, len(tokens))
    cache.release(lease, tokens, len(tokens))


def computing(cache: PrefixCache, tokens: array[int]) -> KVLease:
    lease = cache.acquire(tokens)
    assert cache.extend(lease, len(tokens))
    return lease


def test_acquire_from_an_empty_cache_borrows_nothing() -> None:
    cache = PrefixCache(4, 2)
    lease = cache.acquire(seq(5))
    assert (lease.page_ids, lease.num_shared_pages, lease.num_cached_tokens) == (ids(), 0, 0)
    cache.check([lease])


@pytest.mark.parametrize(("asked", "found"), [(0, 0), (1, 0), (2, 0), (3, 2), (6, 4), (7, 6)])
def test_acquire_leaves_the_last_token_to_be_computed(asked: int, found: int) -> None:
    cache = PrefixCache(4, 2)
    serve(cache, seq(8))
    lease = cache.acquire(seq(asked))
    assert lease.num_cached_tokens == found
    assert cache.match_len(seq(asked)) == found
    cache.check([lease])


@pytest.mark.parametrize(("limit", "found"), [(0, 0), (1, 0), (2, 2), (5, 4), (99, 6)])
def test_acquire_borrows_at_most_its_limit(limit: int, found: int) -> None:
    cache = PrefixCache(4, 2)
    serve(cache, seq(8))
    assert cache.match_len(seq(8), limit=limit) == found
    assert cache.acquire(seq(8), limit=limit).num_cached_tokens == found


def test_acquire_counts_queries_and_hits_in_tokens() -> None:
    cache = PrefixCache(4, 2)
    serve(cache, seq(8))
    cache.match_len(seq(8))
    assert (cache.num_queries, cache.num_hits) == (8, 0)
    cache.acquire(seq(8))
    assert (cache.num_queries, cache.num_hits) == (16, 6)


def test_a_node_counts_the_requests_that_found_it() -> None:
    cache = PrefixCache(8, 2)
    serve(cache, seq(8))
    for _ in range(2):
        cache.acquire(seq(8))
    hits = {node.key.tolist()[0]: node.num_hits for node in cache.tree.nodes() if node.parent}
    assert hits == {0: 2, 6: 0}, "the last page is computed again"


def test_publishing_what_is_published_shares_nothing_new() -> None:
    cache = PrefixCache(4, 2)
    lease = computing(cache, seq(6))
    assert cache.publish(lease, seq(6), 5) == range(4)
    assert cache.publish(lease, seq(6), 5) == range(0)


def test_a_preempted_request_that_comes_back_counts_no_second_time() -> None:
    cache = PrefixCache(4, 2)
    serve(cache, seq(8))
    lease = cache.acquire(seq(8), is_first=False)
    assert lease.num_cached_tokens == 6
    assert (cache.num_queries, cache.num_hits) == (8, 0)


def test_match_len_has_no_side_effects() -> None:
    cache = PrefixCache(2, 1)
    serve(cache, ids(1))
    serve(cache, ids(2))
    assert cache.match_len(ids(1, 0)) == 1  # does not make it the more recent
    cache.extend(cache.acquire(ids(9)), 1)
    assert cache.match_len(ids(1, 0)) == 0


def test_namespaces_never_share_pages() -> None:
    cache = PrefixCache(8, 1)
    serve(cache, seq(3), "a")
    assert cache.match_len(seq(3)) == cache.match_len(seq(3), namespace="b") == 0
    assert cache.match_len(seq(3), namespace="a") == 2
    lease = cache.acquire(seq(3), namespace="b")
    assert lease.num_cached_tokens == 0
    cache.check([lease])


@pytest.mark.parametrize(
    ("upto", "slack", "fits"),
    [(6, 0, True), (7, 0, False), (5, 1, True), (6, 1, False), (3, 3, True), (3, 4, False)],
)
def test_would_fit_counts_a_match_as_borrowed_and_not_as_evictable(
    upto: int, slack: int, fits: bool
) -> None:
    cache = PrefixCache(8, 1)
    serve(cache, seq(4))
    holder = computing(cache, ids(8, 9))  # two pages gone, six available
    assert cache.would_fit(seq(4), upto, slack=slack) == fits
    lease = cache.acquire(seq(4))
    assert cache.extend(lease, upto + slack) == fits
    cache.check([holder, lease])


def test_a_waiting_request_is_matched_again_only_when_the_tree_or_its_tokens_changed() -> None:
    cache, num_matches = PrefixCache(16, 1), 0
    serve(cache, seq(4))
    match = cache.tree.match

    def counted(*args: Any, **kwargs: Any) -> Match:
        nonlocal num_matches
        num_matches += 1
        return match(*args, **kwargs)

    cache.tree.match = counted  # type: ignore[method-assign]
    waiting = seq(6)
    assert [cache.match_len(waiting), cache.would_fit(waiting, 6)] == [4, True]
    assert [cache.match_len(waiting), cache.would_fit(waiting, 17)] == [4, False]
    assert num_matches == 1
    assert cache.match_len(waiting, limit=2) == 2
    serve(cache, seq(6))
    assert cache.match_len(waiting) == 5
    cache.flush()
    assert cache.match_len(waiting) == 0
    serve(cache, seq(8))
    assert cache.match_len(waiting) == 5
    waiting.append(seq(7)[6])
    assert cache.match_len(waiting) == 6


def test_would_fit_counts_a_page_begun_as_a_whole_one() -> None:
    cache = PrefixCache(4, 2)
    assert cache.would_fit(seq(5), 8)
    assert not cache.would_fit(seq(5), 9)


def test_would_fit_counts_pages_that_others_pin_as_neither_evictable_nor_needed() -> None:
    cache = PrefixCache(8, 1)
    serve(cache, seq(4))
    lease = cache.acquire(seq(3))  # pins two of the three that will match
    assert cache.would_fit(seq(4), 8)
    assert not cache.would_fit(seq(4), 9)
    assert not cache.would_fit(seq(4), 8, namespace="a")
    assert cache.would_fit(seq(4), 6, namespace="a")
    assert not cache.would_fit(seq(4), 8, slack=1)
    cache.check([lease])


def test_extend_reaches_the_position_and_no_further() -> None:
    cache = PrefixCache(4, 4)
    lease = cache.acquire(seq(9))
    assert cache.extend(lease, 0)
    assert len(lease.page_ids) == 0
    for upto, num_pages in ((1, 1), (4, 1), (5, 2), (3, 2), (16, 4)):
        assert cache.extend(lease, upto)
        assert len(lease.page_ids) == num_pages
        cache.check([lease])
    assert not cache.extend(lease, 17)


def test_extend_says_no_without_changing_anything() -> None:
    cache = PrefixCache(4, 1)
    serve(cache, seq(2))
    lease = cache.acquire(ids(9))
    cache.take_newly_allocated_pages()
    assert not cache.extend(lease, 5)
    assert len(lease.page_ids) == 0
    assert cache.take_newly_allocated_pages() == ids()
    assert cache.match_len(seq(3)) == 2, "a refusal must not evict"
    cache.check([lease])


def test_extend_evicts_only_what_is_short() -> None:
    cache = PrefixCache(4, 1)
    serve(cache, seq(3))
    lease = cache.acquire(ids(9))
    assert cache.extend(lease, 2)
    assert cache.match_len(seq(4)) == 2
    cache.check([lease])


def test_extend_for_drafts_never_evicts() -> None:
    cache = PrefixCache(4, 1)
    serve(cache, seq(3))
    lease = cache.acquire(ids(9))
    assert not cache.extend(lease, 2, evict=False)
    assert cache.extend(lease, 1, evict=False)
    assert cache.match_len(seq(4)) == 3
    cache.check([lease])


def test_extend_never_evicts_what_a_lease_borrows() -> None:
    cache = PrefixCache(4, 1)
    serve(cache, seq(3))
    reader, writer = cache.acquire(seq(4)), cache.acquire(ids(9))
    assert not cache.extend(writer, 2)
    cache.release(reader, seq(4), 3)
    assert cache.extend(writer, 2)
    cache.check([writer])


def test_shrink_gives_back_private_pages_and_never_what_the_tree_lent() -> None:
    cache = PrefixCache(8, 2)
    serve(cache, seq(6))
    lease = cache.acquire(seq(7))
    assert cache.extend(lease, 12)
    table = lease.page_ids[:]
    cache.shrink(lease, 9)
    assert (lease.page_ids, cache.num_free_pages) == (table[:5], 3)
    cache.shrink(lease, 1)
    assert (lease.page_ids, cache.num_free_pages) == (table[:3], 5)
    cache.check([lease])


def test_publish_shares_whole_pages_with_requests_that_still_run() -> None:
    cache = PrefixCache(8, 2)
    lease = computing(cache, seq(6))
    cache.publish(lease, seq(6), 5)
    assert lease.num_shared_pages == 2
    other = cache.acquire(seq(6))
    assert other.page_ids == lease.page_ids[:2]
    cache.check([lease, other])


def test_publish_adopts_the_copy_of_the_tree_and_frees_its_own() -> None:
    cache = PrefixCache(8, 2)
    first, second = computing(cache, seq(6)), computing(cache, seq(6))
    cache.take_newly_allocated_pages()
    cache.publish(first, seq(6), 4)
    tail = second.page_ids[2]
    cache.publish(second, seq(6), 6)
    assert second.page_ids == first.page_ids[:2] + ids(tail)
    assert cache.num_free_pages == 8 - 6 + 2
    assert cache.take_newly_allocated_pages() == ids(), "adopted pages hold valid content"
    cache.check([first, second])


def test_publish_of_a_growing_request_leaves_one_node() -> None:
    cache = PrefixCache(8, 1)
    tokens = seq(8)
    lease = computing(cache, tokens)
    for num_computed in range(1, 9):
        cache.publish(lease, tokens, num_computed)
        cache.check([lease])
    assert cache.tree.num_nodes == 1


def test_publish_of_nothing_new_is_no_error() -> None:
    cache = PrefixCache(4, 2)
    lease = computing(cache, seq(4))
    for num_computed in (0, 1, 4, 2, 4):
        cache.publish(lease, seq(4), num_computed)
    assert lease.num_shared_pages == 2
    cache.check([lease])


@pytest.mark.parametrize("num_computed", [-1, 5, 7])
def test_publish_of_more_than_was_computed_is_refused(num_computed: int) -> None:
    cache = PrefixCache(4, 2)
    lease = cache.acquire(seq(6))
    cache.extend(lease, 4)
    with pytest.raises(ValueError, match="exceed"):
        cache.publish(lease, seq(6), num_computed)
    with pytest.raises(ValueError, match="exceed"):
        cache.release(lease, seq(6), num_computed)
    cache.check([lease])


def test_release_keeps_what_was_committed_and_frees_the_rest() -> None:
    cache = PrefixCache(8, 2)
    lease = computing(cache, seq(10))
    cache.release(lease, seq(10), 7)
    assert (cache.num_free_pages, cache.num_evictable_pages) == (5, 3)
    assert lease.page_ids == ids()
    assert lease.num_shared_pages == 0
    cache.check([])


def test_release_of_a_failed_request_publishes_nothing() -> None:
    cache = PrefixCache(8, 1)
    lease = computing(cache, seq(6))
    cache.publish(lease, seq(6), 2)
    cache.release(lease, seq(6), 6, keep=False)
    assert cache.match_len(seq(7)) == 2
    assert cache.num_free_pages == 6
    cache.check([])


def test_a_released_lease_is_refused_by_every_verb() -> None:
    cache = PrefixCache(4, 1)
    lease = computing(cache, seq(2))
    cache.release(lease, seq(2), 2)
    before = cache.num_free_pages
    with pytest.raises(ValueError, match="released already"):
        cache.release(lease, seq(2), 0)
    with pytest.raises(ValueError, match="released already"):
        cache.release(lease, seq(2), 0, keep=False)
    with pytest.raises(ValueError, match="released already"):
        cache.publish(lease, seq(2), 0)
    with pytest.raises(ValueError, match="released already"):
        cache.extend(lease, 0)
    assert cache.num_free_pages == before
    cache.check([])


def test_release_leaves_the_page_table_lent_to_a_running_step_alone() -> None:
    cache = PrefixCache(4, 1)
    lease = computing(cache, seq(2))
    lent = lease.page_ids
    cache.release(lease, seq(2), 2)
    assert lent == ids(0, 1)


def test_fresh_pages_are_those_handed_out_since_the_last_call_each_once() -> None:
    cache = PrefixCache(3, 1)
    lease = cache.acquire(seq(2))
    cache.extend(lease, 2)
    cache.release(lease, seq(2), 0)
    again = cache.acquire(seq(2))
    cache.extend(again, 2)
    assert sorted(cache.take_newly_allocated_pages()) == sorted(again.page_ids)
    assert cache.take_newly_allocated_pages() == ids()


def test_borrowed_pages_are_not_fresh_but_evicted_ones_are() -> None:
    cache = PrefixCache(2, 1)
    serve(cache, ids(1))
    cache.take_newly_allocated_pages()
    lease = cache.acquire(ids(1, 2))
    cache.extend(lease, 2)
    assert cache.take_newly_allocated_pages() == lease.page_ids[1:]
    cache.release(lease, ids(1, 2), 2)
    lease = cache.acquire(ids(8, 9))
    cache.extend(lease, 2)
    assert sorted(cache.take_newly_allocated_pages()) == [0, 1]


def test_free_pages_are_reused_last_in_first_out() -> None:
    cache = PrefixCache(4, 1)
    lease = cache.acquire(ids(1))
    cache.extend(lease, 2)
    assert lease.page_ids == ids(0, 1)
    cache.release(lease, ids(1), 0)
    again = cache.acquire(ids(1))
    cache.extend(again, 1)
    assert again.page_ids == ids(1)


def test_usage_counts_only_what_live_leases_hold() -> None:
    cache = PrefixCache(8, 1)
    assert cache.usage == 0
    serve(cache, seq(4))
    assert cache.usage == 0
    lease = cache.acquire(seq(3))
    cache.extend(lease, 4)
    assert cache.usage == 4 / 8
    assert (cache.num_free_pages, cache.num_evictable_pages) == (2, 2)
    assert cache.num_available_pages == 4


def test_flush_frees_what_nobody_borrows() -> None:
    cache = PrefixCache(8, 1)
    serve(cache, seq(3))
    serve(cache, seq(2), "a")
    lease = cache.acquire(seq(3))
    assert cache.flush() == 3
    cache.check([lease])
    cache.release(lease, seq(3), 2)
    assert cache.flush("a") == 0
    assert cache.flush(None) == 2
    assert cache.num_free_pages == 8
    cache.check([])


def test_check_notices_a_lease_that_was_forgotten() -> None:
    cache = PrefixCache(4, 1)
    cache.acquire(seq(2))
    with pytest.raises(AssertionError, match="locks"):
        cache.check([])


def test_check_notices_a_lost_page() -> None:
    cache = PrefixCache(4, 1)
    lease = computing(cache, seq(2))
    lease.page_ids.pop()
    with pytest.raises(AssertionError, match="3 pages have an owner, but the pool has 4"):
        cache.check([lease])


def test_check_notices_a_page_with_two_owners() -> None:
    cache = PrefixCache(4, 1)
    first, second = computing(cache, ids(1)), computing(cache, ids(2))
    second.page_ids[0] = first.page_ids[0]
    with pytest.raises(AssertionError, match="two owners"):
        cache.check([first, second])


def test_check_notices_a_page_table_that_left_the_tree() -> None:
    cache = PrefixCache(4, 1)
    serve(cache, seq(2))
    lease = cache.acquire(seq(2))
    lease.page_ids[0] = 3
    with pytest.raises(AssertionError, match="differs from the tree"):
        cache.check([lease])


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 1), (4, 0)])
def test_sizes_must_be_positive(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PrefixCache(num_pages, page_size)

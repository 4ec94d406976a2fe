"""The radix tree on its own: matching, growing, pinning, cutting, dropping."""

from __future__ import annotations

from array import array

import pytest

from foretoken.radix_cache import Match, RadixTree


def ids(*values: int) -> array[int]:
    return array("q", values)


def dump(tree: RadixTree) -> list[object]:
    nodes = [
        (n.namespace, n.key.tolist(), n.page_ids.tolist(), n.ref_count, n.last_used)
        for n in tree.nodes()
    ]
    return [*sorted(nodes, key=repr), tree.num_pages, tree.num_locked_pages, tree.num_nodes]


def keys(tree: RadixTree) -> list[list[int]]:
    return sorted(n.key.tolist() for n in tree.nodes() if n.parent is not None)


def found(tree: RadixTree, *tokens: int) -> Match:
    return tree.match(ids(*tokens))


def test_match_of_an_empty_tree_finds_nothing() -> None:
    tree = RadixTree(2)
    assert tree.match(ids(1, 2, 3)).num_tokens == 0
    assert list(tree.nodes()) == []


def test_match_finds_the_longest_prefix_in_whole_pages() -> None:
    tree = RadixTree(2)
    tree.insert(ids(1, 2, 3, 4, 5, 6), ids(10, 11, 12))
    assert tree.match(ids(1, 2, 3, 4, 5, 6, 7)).page_ids == ids(10, 11, 12)
    assert tree.match(ids(1, 2, 3, 4, 5, 9)).page_ids == ids(10, 11)
    assert tree.match(ids(1, 2, 3)).page_ids == ids(10)
    assert tree.match(ids(1, 9, 3, 4)).num_tokens == 0
    assert tree.match(ids(1)).num_tokens == 0


@pytest.mark.parametrize("differs_at", [*range(1, 40), 63, 64, 65, 98, 99])
@pytest.mark.parametrize("page_size", [1, 4])
def test_match_stops_at_the_first_token_that_differs(differs_at: int, page_size: int) -> None:
    tree = RadixTree(page_size)
    tokens = array("q", range(100))
    tree.insert(tokens, array("q", range(100 // page_size)))
    tokens[differs_at] = -1
    assert tree.match(tokens).num_tokens == differs_at // page_size * page_size


@pytest.mark.parametrize("limit", range(-2, 8))
def test_match_respects_its_limit(limit: int) -> None:
    tree = RadixTree(2)
    tree.insert(ids(1, 2, 3, 4, 5, 6), ids(10, 11, 12))
    allowed = max(min(limit, 6), 0)
    assert tree.match(ids(1, 2, 3, 4, 5, 6), limit=limit).num_tokens == allowed // 2 * 2


def test_match_follows_several_nodes() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2, 3, 4), ids(0, 1, 2, 3))
    tree.insert(ids(1, 2, 7, 8), ids(8, 9, 4, 5))
    assert keys(tree) == [[1, 2], [3, 4], [7, 8]]
    assert tree.match(ids(1, 2, 7, 8)).page_ids == ids(0, 1, 4, 5)
    assert tree.match(ids(1, 2, 7, 9)).page_ids == ids(0, 1, 4)


def test_match_does_not_go_on_behind_a_page_that_differs() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2, 3), ids(0, 1, 2))
    tree.insert(ids(1, 2, 4), ids(8, 9, 3))
    assert found(tree, 1, 3).page_ids == ids(0), "3 follows 2 alone"


def test_a_match_of_nothing_has_no_pages_of_any_node() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1), ids(0))
    assert found(tree, 2).num_node_pages == 0
    assert found(tree, 2).num_idle_pages == 0


def test_inserting_what_is_cached_adds_no_node() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2, 3), ids(0, 1, 2))
    tree.insert(ids(1, 2, 4), ids(8, 9, 3))
    assert tree.insert(ids(1, 2), ids(6, 7)) == ids(0, 1)
    assert keys(tree) == [[1, 2], [3], [4]]


def test_match_changes_neither_shape_nor_recency() -> None:
    tree = RadixTree(2)
    tree.insert(ids(1, 2, 3, 4, 5, 6), ids(0, 1, 2))
    tree.insert(ids(1, 2, 9, 9), ids(3, 4))
    before = dump(tree)
    for tokens in (ids(), ids(1, 2), ids(1, 2, 3, 4), ids(1, 2, 3, 4, 5, 6), ids(7, 7)):
        tree.match(tokens)
        tree.match(tokens, namespace="nobody")
        tree.match(tokens, limit=3)
    assert dump(tree) == before
    tree.check()


def test_match_refuses_anything_but_64_bit_tokens() -> None:
    with pytest.raises(TypeError, match="array"):
        RadixTree(1).match(array("i", [1, 2]))


def test_namespaces_never_share() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2), ids(0, 1))
    tree.insert(ids(1, 2), ids(2, 3), namespace="a")
    assert tree.match(ids(1, 2)).page_ids == ids(0, 1)
    assert tree.match(ids(1, 2), namespace="a").page_ids == ids(2, 3)
    assert tree.match(ids(1, 2), namespace="b").num_tokens == 0
    assert tree.match(ids(1, 2), namespace="").num_tokens == 0
    tree.check()


def test_insert_returns_the_pages_that_were_there() -> None:
    tree = RadixTree(1)
    assert tree.insert(ids(1, 2, 3), ids(0, 1, 2)) == ids()
    assert tree.insert(ids(1, 2, 4, 5), ids(6, 7, 8, 9)) == ids(0, 1)
    assert tree.match(ids(1, 2, 4, 5)).page_ids == ids(0, 1, 8, 9)
    assert tree.num_pages == 5
    tree.check()


def test_a_tree_of_tokens_alone_needs_no_page_ids() -> None:
    tree = RadixTree(2)
    tree.insert(ids(1, 2, 3, 4), namespace="a")
    tree.insert(ids(1, 2, 5, 6), namespace="a")
    assert tree.match(ids(1, 2, 5, 6, 7), namespace="a").num_tokens == 4
    assert tree.num_pages == 3
    assert tree.evict(2) == ids(0, 0)
    with pytest.raises(ValueError, match="3 tokens do not fill 1 pages"):
        tree.insert(ids(1, 2, 3))


def test_insert_of_tokens_that_do_not_fill_their_pages_is_refused_and_leaves_no_trace() -> None:
    tree = RadixTree(2)
    with pytest.raises(ValueError, match="3 tokens do not fill 2 pages"):
        tree.insert(ids(1, 2, 3), ids(0, 1))
    assert list(tree.nodes()) == []
    tree.check()


def test_a_receipt_grows_its_own_leaf_in_place() -> None:
    tree = RadixTree(1)
    lock = tree.lock(tree.match(ids()))
    for token in range(5):
        tree.insert_below(lock, ids(token), ids(10 + token))
        tree.check()
    assert keys(tree) == [[0, 1, 2, 3, 4]]
    assert tree.num_locked_pages == lock.num_pages == 5
    tree.unlock(lock)
    tree.check()


def test_a_leaf_pinned_by_another_too_is_not_grown_in_place() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2), ids(0, 1))
    reader, writer = tree.lock(found(tree, 1, 2)), tree.lock(found(tree, 1, 2))
    tree.insert_below(writer, ids(3), ids(2))
    assert keys(tree) == [[1, 2], [3]]
    assert reader.num_pages == 2
    tree.check()
    tree.unlock(writer)
    assert tree.evict(9) == ids(2)
    tree.unlock(reader)
    tree.check()


def test_insert_below_adopts_what_another_published_first() -> None:
    tree = RadixTree(1)
    first, second = tree.lock(tree.match(ids())), tree.lock(tree.match(ids()))
    assert tree.insert_below(first, ids(1, 2, 3), ids(0, 1, 2)) == ids()
    assert tree.insert_below(second, ids(1, 2, 9), ids(5, 6, 7)) == ids(0, 1)
    tree.check()
    tree.unlock(first)
    assert tree.num_locked_pages == 3  # 1, 2 and 9; not 3
    tree.check()
    tree.unlock(second)
    tree.check()


def test_lock_pins_exactly_the_match() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2, 3, 4), ids(0, 1, 2, 3))
    lock = tree.lock(found(tree, 1, 2))
    assert tree.num_locked_pages == lock.num_pages == 2
    assert sorted(tree.evict(9)) == [2, 3]
    assert tree.match(ids(1, 2, 3, 4)).num_tokens == 2
    tree.check()
    tree.unlock(lock)
    assert sorted(tree.evict(9)) == [0, 1]
    assert list(tree.nodes()) == []
    tree.check()


def test_splitting_a_locked_node_keeps_its_receipts_right() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2, 3, 4), ids(0, 1, 2, 3))
    whole = tree.lock(found(tree, 1, 2, 3, 4))
    half = tree.lock(found(tree, 1, 2))
    tree.insert(ids(1, 8), ids(9, 5))
    tree.check()
    assert tree.num_locked_pages == 4
    tree.unlock(whole)
    tree.check()
    assert tree.num_locked_pages == 2
    tree.unlock(half)
    tree.check()
    assert tree.num_locked_pages == 0


def test_a_receipt_is_given_back_exactly_once() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2), ids(0, 1))
    lock, other = tree.lock(found(tree, 1, 2)), tree.lock(found(tree, 1, 2))
    tree.unlock(lock)
    with pytest.raises(ValueError, match="released already"):
        tree.unlock(lock)
    with pytest.raises(ValueError, match="released already"):
        tree.insert_below(lock, ids(3), ids(2))
    assert tree.num_locked_pages == 2
    tree.unlock(other)
    tree.check()


@pytest.mark.parametrize("num_pages", [1, 2])
def test_a_match_from_before_an_eviction_cannot_be_locked(num_pages: int) -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2), ids(0, 1))
    match = tree.match(ids(1, 2))
    tree.evict(num_pages)
    with pytest.raises(ValueError, match="stale"):
        tree.lock(match)


def test_a_match_from_before_a_split_cannot_be_locked() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2), ids(0, 1))
    match = tree.match(ids(1, 2))
    tree.insert(ids(1, 3), ids(5, 6))
    with pytest.raises(ValueError, match="stale"):
        tree.lock(match)


def test_a_match_survives_growth_of_the_node_it_ends_in() -> None:
    tree = RadixTree(1)
    writer = tree.lock(tree.match(ids()))
    tree.insert_below(writer, ids(1, 2), ids(0, 1))
    match = tree.match(ids(1, 2))
    tree.insert_below(writer, ids(3), ids(2))
    tree.unlock(writer)
    lock = tree.lock(match)
    assert tree.num_locked_pages == 2
    tree.check()
    tree.unlock(lock)


def test_an_empty_namespace_is_kept_only_while_a_receipt_pins_it() -> None:
    tree = RadixTree(1)
    lock = tree.lock(tree.match(ids(1), namespace="a"))
    assert [n.namespace for n in tree.nodes()] == ["a"]
    tree.check()
    tree.unlock(lock)
    assert list(tree.nodes()) == []
    tree.check()


def test_evict_takes_the_least_recently_used_leaf_first() -> None:
    tree = RadixTree(1)
    for token in (1, 2, 3):
        tree.insert(ids(token), ids(token))
    tree.unlock(tree.lock(found(tree, 1)))
    assert [tree.evict(1)[0] for _ in range(3)] == [2, 3, 1]
    assert tree.evict(1) == ids()


def test_locking_refreshes_recency_at_once() -> None:
    tree = RadixTree(1)
    for token in (1, 2):
        tree.insert(ids(token), ids(token))
    lock = tree.lock(found(tree, 1))
    assert lock.node is max(tree.nodes(), key=lambda node: (node.last_used, len(node.key)))
    tree.unlock(lock)


def test_unlocking_refreshes_recency_as_locking_does() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1), ids(1))
    lock = tree.lock(found(tree, 1))
    tree.insert(ids(2), ids(2))
    tree.unlock(lock)
    assert tree.evict(2) == ids(2, 1)


def test_evict_trims_only_the_tail_that_it_needs() -> None:
    tree = RadixTree(2)
    tree.insert(array("q", range(8)), ids(0, 1, 2, 3))
    assert tree.evict(1) == ids(3)
    tree.check()
    assert tree.match(array("q", range(8))).num_tokens == 6
    assert sorted(tree.evict(2)) == [1, 2]
    assert tree.match(array("q", range(8))).page_ids == ids(0)
    tree.check()


def test_evict_drops_a_parent_once_its_children_are_gone() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2), ids(0, 1))
    tree.insert(ids(1, 3), ids(8, 2))
    assert tree.evict(3) == ids(1, 2, 0)
    assert tree.num_pages == tree.num_nodes == 0
    tree.check()


@pytest.mark.parametrize("num_pages", [-1, 0])
def test_evict_of_nothing_drops_nothing(num_pages: int) -> None:
    tree = RadixTree(1)
    tree.insert(ids(1), ids(0))
    assert tree.evict(num_pages) == ids()
    assert tree.num_pages == 1


def test_flush_of_all_drops_every_unlocked_node() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2, 3), ids(0, 1, 2))
    tree.insert(ids(1, 2, 4), ids(7, 8, 3))
    tree.insert(ids(5), ids(4), namespace="a")
    lock = tree.lock(found(tree, 1))
    assert sorted(tree.flush()) == [1, 2, 3, 4]
    tree.check()
    assert keys(tree) == [[1]]
    tree.unlock(lock)
    assert tree.flush() == ids(0)
    tree.check()


def test_flush_of_one_namespace_leaves_the_others() -> None:
    tree = RadixTree(1)
    for page, namespace in enumerate((None, "a", "b")):
        tree.insert(ids(1), ids(page), namespace=namespace)
    assert tree.flush("a") == ids(1)
    assert tree.flush(None) == ids(0)
    tree.check()
    assert tree.match(ids(1), namespace="b").page_ids == ids(2)


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_holds_at_least_one_token(page_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        RadixTree(page_size)

"""The order in which each policy gives leaves up, and what touching them costs."""

from __future__ import annotations

from array import array

import pytest

from foretoken.radix_cache import PrefixCache, RadixTree, audit
from foretoken.radix_cache.eviction import EvictionIndex
from foretoken.radix_cache.node import Node


def ids(*values: int) -> array[int]:
    return array("q", values)


def use(tree: RadixTree, token: int, *, times: int = 1, priority: int = 0) -> None:
    for _ in range(times):
        tree.unlock(tree.lock(tree.match(ids(token)), priority=priority))


def three_leaves(policy: str, *, priority: int = 0) -> RadixTree:
    tree = RadixTree(1, policy)
    for token in (1, 2, 3):
        tree.insert(ids(token), ids(token), priority=priority)
    return tree


def test_lru_gives_up_the_least_recently_used() -> None:
    tree = three_leaves("lru")
    use(tree, 1)
    assert tree.evict(1) + tree.evict(1) + tree.evict(1) == ids(2, 3, 1)


def test_lfu_gives_up_the_least_often_used_then_the_oldest() -> None:
    tree = three_leaves("lfu")
    use(tree, 1, times=3)
    use(tree, 2)
    use(tree, 3)
    assert tree.evict(1) + tree.evict(1) + tree.evict(1) == ids(2, 3, 1)


def test_priority_gives_up_the_least_important_then_the_oldest() -> None:
    tree = three_leaves("priority", priority=5)
    use(tree, 1, priority=-1)
    use(tree, 2, priority=2)
    use(tree, 3, priority=9)
    use(tree, 1, priority=9)  # once important, it stays so
    assert tree.evict(1) + tree.evict(1) + tree.evict(1) == ids(3, 2, 1)


def test_a_new_leaf_is_as_important_as_the_request_that_published_it() -> None:
    cache = PrefixCache(2, 1, policy="priority")
    for token, priority in ((1, 1), (2, 7)):
        lease = cache.acquire(ids(token), priority=priority)
        assert cache.extend(lease, 1)
        cache.release(lease, ids(token), 1)
    assert cache.extend(cache.acquire(ids(9)), 1)
    assert cache.tree.match(ids(1)).num_tokens == 1
    assert cache.tree.match(ids(2)).num_tokens == 0


def test_the_upper_half_of_a_split_inherits_importance() -> None:
    tree = RadixTree(1, "priority")
    tree.insert(ids(1, 2), ids(0, 1), priority=-5)
    use(tree, 1, priority=8)
    assert tree.evict(1) == ids(1)
    tree.insert(ids(3), ids(2), priority=-1)
    assert tree.evict(2) == ids(2, 0)


def test_the_upper_half_of_a_split_inherits_hits() -> None:
    tree = RadixTree(1, "lfu")
    tree.insert(ids(1, 2), ids(0, 1))
    for _ in range(3):
        tree.unlock(tree.lock(tree.match(ids(1, 2))))
    use(tree, 1)
    assert tree.evict(1) == ids(1)
    tree.insert(ids(3), ids(2))
    use(tree, 3, times=2)
    assert tree.evict(2) == ids(2, 0)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'fifo'.*lru"):
        RadixTree(1, "fifo")


def test_the_index_gives_leaves_in_order_and_forgets_those_removed() -> None:
    index: EvictionIndex[Node] = EvictionIndex("lru")
    nodes = [Node(None, last_used=tick) for tick in (3, 1, 2)]
    for node in nodes:
        index.add(node)
    assert [node.last_used for node in index] == [1, 2, 3]
    index.remove(nodes[1])
    assert next(iter(index)) is nodes[2]
    with pytest.raises(KeyError):
        index.remove(nodes[1])
    assert len(index) == 2


def test_the_index_notices_a_rank_that_changed_behind_its_back() -> None:
    index: EvictionIndex[Node] = EvictionIndex("lru")
    node = Node(None, last_used=1)
    index.add(node)
    node.last_used = 2
    with pytest.raises(AssertionError, match="filed at 1"):
        audit.run(index.checks())


def test_touching_locked_or_inner_nodes_never_reaches_the_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = RadixTree(1)
    tree.insert(ids(1, 2), ids(0, 1))
    tree.insert(ids(1, 3), ids(8, 2))
    held = tree.lock(tree.match(ids(1, 2)))

    def forbidden(*_: object) -> None:
        raise AssertionError("the index was changed")

    monkeypatch.setattr(EvictionIndex, "add", forbidden)
    monkeypatch.setattr(EvictionIndex, "remove", forbidden)
    tree.unlock(tree.lock(tree.match(ids(1, 2))))  # locked by another
    tree.unlock(tree.lock(tree.match(ids(1))))  # inner
    monkeypatch.undo()
    tree.unlock(held)
    tree.check()

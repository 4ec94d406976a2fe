"""The order in which leaves are given up, and what touching them costs."""

from __future__ import annotations

from array import array

import pytest

from foretoken.radix_cache import RadixTree, audit
from foretoken.radix_cache.eviction import EvictionIndex
from foretoken.radix_cache.node import Node


def ids(*values: int) -> array[int]:
    return array("q", values)


def use(tree: RadixTree, token: int) -> None:
    tree.unlock(tree.lock(tree.match(ids(token))))


def three_leaves() -> RadixTree:
    tree = RadixTree(1)
    for token in (1, 2, 3):
        tree.insert(ids(token), ids(token))
    return tree


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = three_leaves()
    use(tree, 1)
    assert tree.evict(1) + tree.evict(1) + tree.evict(1) == ids(2, 3, 1)


def test_the_index_gives_leaves_in_order_and_forgets_those_removed() -> None:
    index = EvictionIndex()
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
    index = EvictionIndex()
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

"""The invariants of a radix tree, as sentences: each function raises AssertionError with one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from .eviction import EvictionIndex
from .node import Lock, Node, PageCounts
from .owned import OwnedPages


def check_pages(nodes: Sequence[Node], counts: PageCounts, num_nodes: int) -> None:
    """The counters are right, and no page is in two nodes. O(pages)."""
    owned = [page_id for node in nodes for page_id in node.page_ids]
    below_roots = sum(node.parent is not None for node in nodes)
    found = PageCounts()
    for node in nodes:
        found.add(node)
    assert counts == found, f"{found} are counted as {counts}"
    assert num_nodes == below_roots, f"{below_roots} nodes are counted as {num_nodes}"
    assert len(set(owned)) == len(owned), "two nodes own the same page"


def check_owned(nodes: Sequence[Node], owned: OwnedPages) -> None:
    """Every namespace is known to own the pages of its nodes. O(nodes)."""
    found: Counter[str | None] = Counter()
    for node in nodes:
        found[node.namespace] += len(node.page_ids)
    assert owned.num_pages == +found, f"{found} pages are owned, not {owned.num_pages}"
    owned.check({node.namespace for node in nodes})


def check_links(nodes: Sequence[Node], roots: Mapping[str | None, Node], page_size: int) -> None:
    """Nodes, parents and children know each other, under the right page. O(nodes)."""
    for node in nodes:
        if node.parent is None:
            _check_root(node, roots)
        else:
            assert node.page_ids, "a node below the root owns no page"
        num_tokens = len(node.page_ids) * page_size
        assert len(node.key) == num_tokens, f"{len(node.key)} tokens where {num_tokens} fit"
        for first_page, child in node.children.items():
            _check_child(node, child)
            assert first_page == child.key[:page_size].tobytes(), "a child is under a wrong page"


def _check_root(root: Node, roots: Mapping[str | None, Node]) -> None:
    assert roots.get(root.namespace) is root, "a root is in a wrong namespace"
    assert root.locks or root.children, "a root is kept for nothing"
    assert not root.key, "a root has tokens"


def _check_child(node: Node, child: Node) -> None:
    assert child.parent is node, "a child does not know its parent"
    assert child.namespace == node.namespace, "a child is in another namespace than its parent"
    assert 0 <= child.locks <= node.locks, "a child is held more often than its parent"


def check_locks(nodes: Sequence[Node], locks: Set[Lock]) -> None:
    """Every node is held exactly by the live receipts at or below it. O(locks * depth)."""
    paths = {lock: lock.node.path() for lock in locks}
    live = Counter(node for path in paths.values() for node in path)
    kept = Counter(node for lock, path in paths.items() if lock.is_pin for node in path)
    for node in nodes:
        held = live.pop(node, 0)
        pins = kept.pop(node, 0)
        assert node.locks == held, f"a node with {held} live receipts has {node.locks} locks"
        assert node.pins == pins, f"a node with {pins} live pins counts {node.pins}"
    assert not live, "a live receipt holds a node that left the tree"
    for lock, path in paths.items():
        depth = sum(len(node.page_ids) for node in path)
        assert lock.num_pages == depth, f"a receipt for {lock.num_pages} pages holds {depth}"
        assert lock.is_live, "a released receipt is held to be live"


def check_leaves(nodes: Sequence[Node], index: EvictionIndex[Node], clock: int) -> None:
    """The index files the unlocked leaves, all of them, under unique ranks. O(n log n)."""
    leaves = [node for node in nodes if node.parent is not None and not node.children]
    unlocked = {leaf for leaf in leaves if not leaf.locks}
    assert set(index) == unlocked, "the eviction index is not the set of unlocked leaves"
    index.check()
    ticks = {leaf.last_used for leaf in leaves}
    assert len(ticks) == len(leaves), "two leaves were last used at the same tick"
    assert max(ticks, default=0) <= clock, "a leaf was last used in the future"

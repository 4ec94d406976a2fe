"""Checks of the invariants of a cache and its radix tree.

An AssertionError states the broken invariant as a sentence. A large tree takes a while, so every
function is a generator that yields every few microseconds: its caller may do other work
between steps, or stop. The cache must not change until the last step.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from .attached import StateSlots
from .eviction import EvictionIndex, NamespaceQuota
from .node import KVLease, LockHandle, Node, StateLease

Steps = Iterator[None]
FEW = 64  # maximum number of page ids that one step reads


def run(steps: Steps) -> None:
    """Run all steps without a pause."""
    deque(steps, maxlen=0)


def gather(nodes: Iterable[Node], into: list[Node]) -> Steps:
    """Append all nodes to a list. O(nodes)."""
    for node in nodes:
        into.append(node)
        yield


def check_pages(nodes: Sequence[Node], counts: Mapping[str, int]) -> Steps:
    """Assert that the tree's ``counts`` are right and no page is in two nodes. O(pages)."""
    found, owned = Counter[str](), set[int]()
    for node in nodes:
        num_pages = len(node.page_ids)
        found["nodes"] += node.parent is not None
        found["pages"] += num_pages
        found["locked"] += num_pages if node.ref_count else 0
        found["pinned"] += num_pages if node.pins else 0
        found["yielding"] += num_pages if node.pins == node.ref_count > 0 else 0
        owned.update(node.page_ids)
        yield
    assert +found == +Counter(counts), f"the tree has {found}, but counts {counts}"
    assert len(owned) == found["pages"], "two nodes own the same page"


def check_owned(nodes: Sequence[Node], owned: NamespaceQuota) -> Steps:
    """Assert that the page count of every namespace is right. O(nodes)."""
    found: Counter[str | None] = Counter()
    for node in nodes:
        found[node.namespace] += len(node.page_ids)
        yield
    assert owned.num_pages == +found, (
        f"namespaces own {found} pages, but {owned.num_pages} are counted"
    )
    owned.check(found.keys())


def check_links(nodes: Sequence[Node], roots: Mapping[str | None, Node], page_size: int) -> Steps:
    """Assert that parents and children refer to each other, with the right keys. O(nodes)."""
    for node in nodes:
        if node.parent is None:
            _check_root(node, roots)
        else:
            assert node.page_ids, "a node below the root owns no page"
        num_tokens = len(node.page_ids) * page_size
        assert len(node.key) == num_tokens, (
            f"a node has {len(node.key)} tokens, but pages for {num_tokens}"
        )
        for first_page, child in node.children.items():
            _check_child(node, child)
            assert first_page == child.key[:page_size].tobytes(), (
                "a child is filed under the tokens of another page"
            )
            yield


def _check_root(root: Node, roots: Mapping[str | None, Node]) -> None:
    assert roots.get(root.namespace) is root, "a root is not filed under its namespace"
    assert root.ref_count or root.children, "a root without children and locks was not dropped"
    assert not root.key, "a root has tokens"


def _check_child(node: Node, child: Node) -> None:
    assert child.parent is node, "a child refers to another parent"
    assert child.namespace == node.namespace, "a child is in another namespace than its parent"
    assert 0 <= child.ref_count <= node.ref_count, "a child has more locks than its parent"


def check_locks(nodes: Sequence[Node], locks: Set[LockHandle]) -> Steps:
    """Assert that a node's lock count equals the live locks at or below it. O(locks * depth)."""
    live, kept = Counter[Node](), Counter[Node]()
    for lock in locks:
        path = lock.node.path()
        live.update(path)
        kept.update(path if lock.is_pin else ())
        depth = sum(len(node.page_ids) for node in path)
        assert lock.num_pages == depth, f"a lock counts {lock.num_pages} pages, but holds {depth}"
        assert lock.is_live, "a released lock is still listed as live"
        yield
    for node in nodes:
        held = live.pop(node, 0)
        pins = kept.pop(node, 0)
        assert node.ref_count == held, f"a node has {held} live locks, but counts {node.ref_count}"
        assert node.pins == pins, f"a node has {pins} live pins, but counts {node.pins}"
        yield
    assert not live, "a live lock holds a node that left the tree"


def check_leaves(nodes: Sequence[Node], index: EvictionIndex, clock: int) -> Steps:
    """Assert that the index contains exactly the unlocked leaves, with unique ranks. O(n log n)."""
    num_leaves, unlocked, ticks = 0, set[Node](), set[int]()
    for node in nodes:
        if node.parent is not None and not node.children:
            num_leaves += 1
            ticks.add(node.last_used)
            if not node.ref_count:
                unlocked.add(node)
        yield
    assert len(index) == len(unlocked), "the eviction index misses an unlocked leaf"
    for leaf in index:
        assert leaf in unlocked, "the eviction index has a node that is not an unlocked leaf"
        yield
    yield from index.checks()
    assert len(ticks) == num_leaves, "two leaves have the same time of last use"
    assert max(ticks, default=0) <= clock, "a leaf's time of last use is later than the clock"


def check_owners(
    free: array[int], nodes: Iterable[Node], leases: Iterable[KVLease], num_pages: int
) -> Steps:
    """Assert that every page is free, owned by a node, or private to one lease. O(pages)."""
    owned, count = set[int](), 0
    own = (lease.page_ids[lease.num_shared_pages :] for lease in leases)
    for page_ids in (*_pieces(free), *own):
        owned.update(page_ids)
        count += len(page_ids)
        yield
    for node in nodes:
        owned.update(node.page_ids)
        count += len(node.page_ids)
        yield
    assert count == num_pages, f"{count} pages have an owner, but the pool has {num_pages}"
    assert len(owned) == num_pages, "a page has two owners"
    bounds = min(owned), max(owned)
    assert bounds == (0, num_pages - 1), (
        f"page ids range over {bounds}, but the pool has {num_pages} pages"
    )


def _pieces(page_ids: array[int]) -> Iterator[array[int]]:
    return (page_ids[at : at + FEW] for at in range(0, len(page_ids), FEW))


def check_lease(lease: KVLease, page_size: int) -> None:
    """Assert that the tree owns the shared pages of a lease, in this order. O(pages)."""
    lent = [page_id for node in lease.lock.node.path() for page_id in node.page_ids]
    shared = lease.page_ids[: lease.num_shared_pages]
    assert lent == shared.tolist(), "a lease's page table differs from the tree's path"
    assert lease.lock.node.namespace == lease.namespace, "a lease holds a node of another namespace"
    assert lease.num_cached_tokens <= len(lent) * page_size, (
        "a lease counts more cached tokens than its shared pages hold"
    )


def check_states(states: StateSlots, nodes: Iterable[Node], leases: Iterable[KVLease]) -> Steps:
    """Assert that each slot and log has one owner, and that each lease has a log. O(pages)."""
    states.check()
    yield
    missing = set(states.attached)
    for node in nodes:
        if missing:
            missing.difference_update(node.page_ids)
        yield
    assert not missing, "a state is attached to a page that is not in the tree"
    private = [lease.state for lease in leases if lease.state is not None]
    num_without = len(list(leases)) - len(private)
    assert num_without <= len(states.loading), (
        "a lease has no state, although no load waits for its state"
    )
    yield
    _check_slots(states, private)


def _check_slots(states: StateSlots, private: Sequence[StateLease]) -> None:
    own = [lease.slot for lease in private]
    own += [slot for lease in private for _, slot, _ in lease.keeps]
    owned = [*states.free, *own, *states.loading, *(kept.slot for kept in states.attached.values())]
    assert len(owned) == states.num_total, (
        f"{len(owned)} state slots have an owner, but the pool has {states.num_total}"
    )
    assert set(owned) == set(range(states.num_total)), "a state slot has two owners"
    logs = [*states.free_logs, *(lease.log for lease in private)]
    assert sorted(logs) == list(range(states.num_logs)), (
        "a log of recent rows has two owners, or none"
    )
    read = Counter(id(lease.source) for lease in private if lease.source is not None)
    for kept in states.attached.values():
        assert kept.num_readers == read.pop(id(kept), 0), (
            "a kept state counts a wrong number of readers"
        )
    assert not read, "a state that a lease is about to copy was evicted"
    for lease in private:
        assert lease.wanted == sorted(lease.wanted), (
            "the page ends at which a lease keeps states are out of order"
        )

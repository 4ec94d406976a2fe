"""The order in which unlocked leaves go.

A policy is a function from a node to its rank; the lowest rank goes first. A node's rank changes
only while it is locked, and a locked node is not filed here, so an entry never has to move:
borrowing a leaf takes it out, giving it back files it anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from sortedcontainers import SortedDict

from .owned import OwnedPages


class Evictable(Protocol):
    """What a policy may look at, and whose the leaf is."""

    namespace: str | None
    last_used: int  # tick of the tree's clock; no two leaves of a tree share one
    num_hits: int  # leases that ever held the node
    priority: int  # of the most important of them; lower is more important


Rank = Any  # int or (int, int): all ranks of one policy can be compared
Policy = Callable[[Evictable], Rank]
Leaf = TypeVar("Leaf", bound=Evictable)


def lru(node: Evictable) -> int:
    """Least recently used first."""
    return node.last_used


def lfu(node: Evictable) -> tuple[int, int]:
    """Least often used first, then least recently used."""
    return node.num_hits, node.last_used


def priority(node: Evictable) -> tuple[int, int]:
    """Least important (highest number) first, then least recently used."""
    return -node.priority, node.last_used


SLACK = 64  # ranks of a namespace that may be out of date, beside as many as are not
POLICIES: Mapping[str, Policy] = {"lru": lru, "lfu": lfu, "priority": priority}


class _Ranks:
    """The ranks under which leaves of one namespace are or were filed, the lowest at hand."""

    __slots__ = ("heap", "most")

    def __init__(self, ranks: list[Rank]) -> None:
        self.heap = ranks  # sorted, which is a heap
        self.most = 2 * len(ranks) + SLACK

    def add(self, rank: Rank, filed: Mapping[Rank, object]) -> None:
        """O(log n) on average: those no longer ``filed`` are dropped when they may be most."""
        heapq.heappush(self.heap, rank)
        if len(self.heap) > self.most:
            self.heap = sorted(each for each in set(self.heap) if each in filed)
            self.most = 2 * len(self.heap) + SLACK

    def lowest(self, filed: Mapping[Rank, object]) -> Rank | None:
        """The lowest that is still filed. O(log n) for each dropped on the way."""
        while self.heap and self.heap[0] not in filed:
            heapq.heappop(self.heap)
        return self.heap[0] if self.heap else None


class EvictionIndex(Generic[Leaf]):
    """Leaves sorted by rank. Raises ValueError for an unknown policy."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}; known: {', '.join(POLICIES)}")
        self._rank = POLICIES[policy]
        # Ranks are unique because ``last_used`` is; none is ever of two namespaces.
        self._leaves: SortedDict[Rank, Leaf] = SortedDict()
        self._ranks: dict[str | None, _Ranks] | None = None  # by namespace, once somebody asked

    def add(self, leaf: Leaf) -> None:
        """Files a leaf under its present rank. O(log n)."""
        rank = self._rank(leaf)
        self._leaves[rank] = leaf
        if self._ranks is not None:
            if leaf.namespace not in self._ranks:
                self._ranks[leaf.namespace] = _Ranks([])
            self._ranks[leaf.namespace].add(rank, self._leaves)

    def remove(self, leaf: Leaf) -> None:
        """Takes a filed leaf out; KeyError when it is not filed. O(log n)."""
        del self._leaves[self._rank(leaf)]

    def take(
        self, missing: int, owned: OwnedPages, num_evicted: int
    ) -> tuple[Leaf | None, int, bool]:
        """Takes out who gives pages next; how many of those ``missing`` at most; if by its quota.

        ``num_evicted``: pages so far, which tell who is idle. O(log n), and O(namespaces beyond
        their quota).
        """
        if beyond := owned.beyond():
            if (leaf := self._idle_leaf(owned, num_evicted)) is not None:
                return self._taken(leaf), missing, False
            if (leaf := self.first_of(beyond)) is not None:
                return self._taken(leaf), min(missing, owned.excess(leaf.namespace)), True
        return (self._leaves.popitem(0)[1] if self._leaves else None), missing, False

    def _taken(self, leaf: Leaf) -> Leaf:
        self.remove(leaf)
        return leaf

    def _idle_leaf(self, owned: OwnedPages, num_evicted: int) -> Leaf | None:
        """A leaf of the namespace that is idle for longest. O(log n) on average."""
        while idlest := owned.idlest(num_evicted):
            if (leaf := self.first_of(idlest)) is not None:
                return leaf
            owned.use(idlest[0], num_evicted)  # all it has is held: then it is in use
        return None

    def first_of(self, namespaces: Iterable[str | None]) -> Leaf | None:
        """The leaf of these namespaces that goes next, or None. O(log n) each; O(n) at first."""
        if self._ranks is None:
            self._ranks = self._sorted_out()
        known = (self._ranks[name] for name in namespaces if name in self._ranks)
        ranks = (each.lowest(self._leaves) for each in known)
        lowest = min((rank for rank in ranks if rank is not None), default=None)
        leaf: Leaf | None = None if lowest is None else self._leaves[lowest]
        return leaf

    def forget(self, namespace: str | None) -> None:
        """A namespace has no leaf any more. O(1)."""
        if self._ranks is not None:
            self._ranks.pop(namespace, None)

    def _sorted_out(self) -> dict[str | None, _Ranks]:
        by_name: dict[str | None, list[Rank]] = {}
        for rank, leaf in self._leaves.items():
            by_name.setdefault(leaf.namespace, []).append(rank)
        return {name: _Ranks(ranks) for name, ranks in by_name.items()}

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[Leaf]:
        """Leaves in the order of their ranks. O(n)."""
        return iter(self._leaves.values())

    def checks(self) -> Iterator[None]:
        """Asserts that every leaf is filed under its present rank, and as its namespace's.

        In steps, O(n) in all.
        """
        known = {name: set(each.heap) for name, each in (self._ranks or {}).items()}
        for rank, leaf in self._leaves.items():
            assert rank == self._rank(leaf), f"a leaf of rank {self._rank(leaf)} is filed at {rank}"
            if self._ranks is not None:
                assert rank in known[leaf.namespace], "a leaf is not known to its namespace"
            yield
        num_known = 0
        for ranks in known.values():
            for rank in ranks:
                num_known += rank in self._leaves
                yield
        if self._ranks is not None:
            assert num_known == len(self._leaves), "a leaf is taken for another namespace's"

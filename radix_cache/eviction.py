"""The order in which unlocked leaves go.

A policy is a function from a node to its rank; the lowest rank goes first. A node's rank changes
only while it is locked, and a locked node is not filed here, so an entry never has to move:
borrowing a leaf takes it out, giving it back files it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from sortedcontainers import SortedDict


class Evictable(Protocol):
    """What a policy may look at."""

    last_used: int  # tick of the tree's clock; no two leaves of a tree share one
    num_hits: int  # leases that ever held the node
    priority: int  # of the most important of them; lower is more important


Rank = int | tuple[int, int]
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


POLICIES: Mapping[str, Policy] = {"lru": lru, "lfu": lfu, "priority": priority}


class EvictionIndex(Generic[Leaf]):
    """Leaves sorted by rank. Raises ValueError for an unknown policy."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}; known: {', '.join(POLICIES)}")
        self._rank = POLICIES[policy]
        self._leaves = SortedDict()  # rank -> leaf; ranks are unique because ``last_used`` is

    def add(self, leaf: Leaf) -> None:
        """Files a leaf under its present rank. O(log n)."""
        self._leaves[self._rank(leaf)] = leaf

    def remove(self, leaf: Leaf) -> None:
        """Takes a filed leaf out; KeyError when it is not filed. O(log n)."""
        del self._leaves[self._rank(leaf)]

    def first(self) -> Leaf | None:
        """The leaf that goes next, or None. O(1)."""
        leaf: Leaf | None = self._leaves.peekitem(0)[1] if self._leaves else None
        return leaf

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[Leaf]:
        """Leaves in the order in which they would go. O(n)."""
        return iter(self._leaves.values())

    def check(self) -> None:
        """Asserts that every leaf is filed under its present rank. O(n)."""
        for rank, leaf in self._leaves.items():
            assert rank == self._rank(leaf), f"a leaf of rank {self._rank(leaf)} is filed at {rank}"

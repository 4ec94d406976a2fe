"""Eviction of cached pages: their order, the quota of namespaces, and a log of evicted pages.

Unlocked leaves are evicted least recently used first. A leaf's rank is its ``last_used``, which
changes only while the node is locked, and a locked node is not in the index. So an entry never has
to move: locking a leaf removes it from the index, and unlocking adds it again.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Set

from sortedcontainers import SortedDict

from .node import Cause, Eviction, Node

NO_NAMESPACES: Set[str | None] = frozenset()
MAX_EVICTIONS = 8192
SLACK = 64  # a heap may hold this many ranks of removed leaves, plus one per valid rank


class NamespaceQuota:
    """Page counts of namespaces, compared with a quota.

    The pages of namespaces that own more than ``quota`` are evicted first. So no namespace can
    evict the pages of one within its quota, and a namespace that is alone in the tree may own all
    pages. At most ``pool / quota`` namespaces are over quota at a time.

    A namespace within its quota is protected only while it is used; otherwise tenants that are gone
    would hold most of the pool forever. A namespace is idle if no request used it while
    ``idle_after`` pages were evicted. The pages of idle namespaces are evicted even before the
    pages of namespaces over quota.
    """

    def __init__(self, quota: int | None, idle_after: float = math.inf) -> None:
        self.quota = quota  # pages; None: no namespace is ever over quota
        self.idle_after = idle_after  # number of evicted pages
        self.num_pages: dict[str | None, int] = {}  # only namespaces that own pages
        self._over_quota: set[str | None] = set()
        # pages evicted before the last use
        self._used: OrderedDict[str | None, int] = OrderedDict()

    def over_quota(self) -> Set[str | None]:
        """Return the namespaces over quota; empty if only one namespace owns pages. O(1)."""
        return self._over_quota if len(self.num_pages) > 1 else NO_NAMESPACES

    def excess(self, namespace: str | None) -> int:
        """Return how many pages a namespace owns beyond the quota. O(1)."""
        return self.num_pages[namespace] - (self.quota or 0)

    def add(self, namespace: str | None, num_pages: int) -> None:
        """Add pages to a namespace's count, or subtract them if the number is negative. O(1)."""
        count = self.num_pages.get(namespace, 0) + num_pages
        if count:
            self.num_pages[namespace] = count
        else:
            del self.num_pages[namespace]
        if self.quota is not None:
            (self._over_quota.add if count > self.quota else self._over_quota.discard)(namespace)

    def use(self, namespace: str | None, num_evicted: int) -> None:
        """Record that a request uses the namespace. O(1).

        ``num_evicted``: number of pages evicted so far.
        """
        if self.quota is not None:
            self._used[namespace] = num_evicted
            self._used.move_to_end(namespace)

    def most_idle(self, num_evicted: int) -> tuple[str | None, ...]:
        """Return the namespace that has been idle for the longest time.

        The result is a tuple of one name, or an empty tuple if no namespace is idle. O(1).
        """
        for namespace, used in self._used.items():
            return (namespace,) if num_evicted - used > self.idle_after else ()
        return ()

    def forget(self, namespace: str | None) -> None:
        """Forget a namespace that has no node in the tree. O(1)."""
        self._used.pop(namespace, None)

    def check(self, namespaces: Set[str | None]) -> None:
        """Assert that the sets of namespaces over quota and in use are right. O(namespaces)."""
        many = {name for name, count in self.num_pages.items() if count > (self.quota or 0)}
        assert self._over_quota == (many if self.quota is not None else set()), (
            "the namespaces listed as over quota are not those over it"
        )
        known = namespaces if self.quota is not None else NO_NAMESPACES
        assert self._used.keys() == known, (
            "the namespaces with a time of last use are not those of the tree"
        )
        assert list(self._used.values()) == sorted(self._used.values()), (
            "times of last use are out of order"
        )


class _Ranks:
    """A heap of the ranks of one namespace's leaves; it may contain ranks of removed leaves."""

    __slots__ = ("heap", "most")

    def __init__(self, ranks: list[int]) -> None:
        self.heap = ranks  # a sorted list is a heap
        self.most = 2 * len(ranks) + SLACK

    def add(self, rank: int, leaves: Mapping[int, object]) -> None:
        """Add a rank; if the heap is full, remove the ranks of removed leaves. O(log n) on average.

        ``leaves``: the leaves of the index by rank.
        """
        heapq.heappush(self.heap, rank)
        if len(self.heap) > self.most:
            self.heap = sorted(each for each in set(self.heap) if each in leaves)
            self.most = 2 * len(self.heap) + SLACK

    def lowest(self, leaves: Mapping[int, object]) -> int | None:
        """Return the lowest rank of a leaf in the index, or None. O(log n) per removed leaf.

        ``leaves``: the leaves of the index by rank.
        """
        while self.heap and self.heap[0] not in leaves:
            heapq.heappop(self.heap)
        return self.heap[0] if self.heap else None


class EvictionIndex:
    """Index of the unlocked leaves, sorted by rank."""

    def __init__(self) -> None:
        # Ranks are unique because ``last_used`` is, across namespaces, too.
        self._leaves: SortedDict[int, Node] = SortedDict()
        # Ranks by namespace, made at the first call of `first_of`.
        self._ranks: dict[str | None, _Ranks] | None = None

    def add(self, leaf: Node) -> None:
        """Add a leaf under its present rank. O(log n)."""
        self._leaves[leaf.last_used] = leaf
        if self._ranks is not None:
            if leaf.namespace not in self._ranks:
                self._ranks[leaf.namespace] = _Ranks([])
            self._ranks[leaf.namespace].add(leaf.last_used, self._leaves)

    def remove(self, leaf: Node) -> None:
        """Remove a leaf. Raises KeyError if it is not in the index. O(log n)."""
        del self._leaves[leaf.last_used]

    def take(
        self, missing: int, owned: NamespaceQuota, num_evicted: int
    ) -> tuple[Node | None, int, bool]:
        """Remove the next leaf to evict from the index.

        Returns the leaf, the maximum number of its pages to evict, and whether it is evicted
        because its namespace is over quota. ``missing``: maximum number of pages to evict.
        ``num_evicted``: number of pages evicted so far, which determines whether a namespace is
        idle. O(log n + namespaces over quota).
        """
        if beyond := owned.over_quota():
            if (leaf := self._idle_leaf(owned, num_evicted)) is not None:
                return self._taken(leaf), missing, False
            if (leaf := self.first_of(beyond)) is not None:
                return self._taken(leaf), min(missing, owned.excess(leaf.namespace)), True
        return (self._leaves.popitem(0)[1] if self._leaves else None), missing, False

    def _taken(self, leaf: Node) -> Node:
        self.remove(leaf)
        return leaf

    def _idle_leaf(self, owned: NamespaceQuota, num_evicted: int) -> Node | None:
        """Return a leaf of the longest idle namespace, or None. O(log n) on average."""
        while most_idle := owned.most_idle(num_evicted):
            if (leaf := self.first_of(most_idle)) is not None:
                return leaf
            owned.use(most_idle[0], num_evicted)  # a namespace with locked leaves is in use
        return None

    def first_of(self, namespaces: Iterable[str | None]) -> Node | None:
        """Return the next leaf to evict in some namespaces, or None.

        O(log n) for each namespace; the first call takes O(n).
        """
        if self._ranks is None:
            self._ranks = self._sorted_out()
        known = (self._ranks[name] for name in namespaces if name in self._ranks)
        ranks = (each.lowest(self._leaves) for each in known)
        lowest = min((rank for rank in ranks if rank is not None), default=None)
        return None if lowest is None else self._leaves[lowest]

    def forget(self, namespace: str | None) -> None:
        """Forget a namespace that has no leaf any more. O(1)."""
        if self._ranks is not None:
            self._ranks.pop(namespace, None)

    def _sorted_out(self) -> dict[str | None, _Ranks]:
        by_name: dict[str | None, list[int]] = {}
        for rank, leaf in self._leaves.items():
            by_name.setdefault(leaf.namespace, []).append(rank)
        return {name: _Ranks(ranks) for name, ranks in by_name.items()}

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[Node]:
        """Iterate over the leaves in the order of their ranks. O(n)."""
        return iter(self._leaves.values())

    def checks(self) -> Iterator[None]:
        """Assert that each leaf is indexed under its rank, and its rank under its namespace.

        Yields after each step; O(n) for all steps.
        """
        known = {name: set(each.heap) for name, each in (self._ranks or {}).items()}
        for rank, leaf in self._leaves.items():
            assert rank == leaf.last_used, (
                f"a leaf last used at {leaf.last_used} is filed at {rank}"
            )
            if self._ranks is not None:
                assert rank in known[leaf.namespace], (
                    "a leaf is missing from the heap of its namespace"
                )
            yield
        num_known = 0
        for ranks in known.values():
            for rank in ranks:
                num_known += rank in self._leaves
                yield
        if self._ranks is not None:
            assert num_known == len(self._leaves), "a leaf is in the heap of another namespace"


class EvictionLog:
    """A log of the last `MAX_EVICTIONS` evictions, by the page at which each one began.

    The key of a page consists of its tokens and the tokens of the page before it, so that logging
    an eviction does not need the whole prefix. Equal pairs of pages in different prefixes share a
    key. A later eviction with the same key replaces an earlier one.
    """

    def __init__(self, page_size: int) -> None:
        self.now = 0.0  # seconds
        self._page_size = page_size  # tokens
        self._evictions: OrderedDict[tuple[str | None, int], Eviction] = OrderedDict()

    def dropped(self, node: Node, first: int, cause: Cause) -> None:
        """Record that ``node.page_ids[first:]`` leave the tree; the tree calls this method."""
        key = (node.namespace, hash(node.boundary_tokens(first, self._page_size)))
        self._evictions[key] = Eviction(cause, self.now)
        self._evictions.move_to_end(key)
        if len(self._evictions) > MAX_EVICTIONS:
            self._evictions.popitem(last=False)

    def find(self, namespace: str | None, tokens: array[int], num_cached: int) -> Eviction | None:
        """Return how the page after ``num_cached`` tokens was lost; None if unknown. O(1)."""
        stop = num_cached + self._page_size
        if stop > len(tokens):
            return None
        boundary_tokens = tokens[max(0, num_cached - self._page_size) : stop]
        return self._evictions.get((namespace, hash(boundary_tokens.tobytes())))

    def __len__(self) -> int:
        return len(self._evictions)

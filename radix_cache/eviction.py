"""Eviction of cached pages: the order, each namespace's quota, and a log of evicted pages.

Unlocked leaves go least recently used first. A leaf's rank is its ``last_used``, which changes only
while the node is locked, and a locked node is not filed here. So an entry never has to move:
borrowing a leaf takes it out, giving it back files it anew.
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
SLACK = 64  # ranks of a namespace that may be out of date, beside as many as are not


class NamespaceQuota:
    """Pages by namespace, against a quota.

    The pages of a namespace that owns more than ``quota`` are evicted first. So no namespace can
    evict the pages of one that keeps to its quota, and a namespace that is alone in the tree may
    own all pages. At most ``pool / quota`` namespaces are over quota at a time.

    A namespace that keeps to its quota is protected only while it is used: otherwise tenants that
    are gone would hold most of the pool for ever. A namespace is idle if no request used it while
    ``idle_after`` pages were evicted; its pages go before those of namespaces over quota.
    """

    def __init__(self, quota: int | None, idle_after: float = math.inf) -> None:
        self.quota = quota  # pages; None: no namespace is ever over quota
        self.idle_after = idle_after  # evicted pages
        self.num_pages: dict[str | None, int] = {}  # of those that own some
        self._over_quota: set[str | None] = set()
        self._used: OrderedDict[str | None, int] = OrderedDict()  # how many were evicted by then

    def over_quota(self) -> Set[str | None]:
        """Namespaces that own more than the quota while others own pages, too. O(1)."""
        return self._over_quota if len(self.num_pages) > 1 else NO_NAMESPACES

    def excess(self, namespace: str | None) -> int:
        """Pages that a namespace owns beyond the quota. O(1)."""
        return self.num_pages[namespace] - (self.quota or 0)

    def add(self, namespace: str | None, num_pages: int) -> None:
        """Count pages that a namespace gained, or lost if the number is negative. O(1)."""
        count = self.num_pages.get(namespace, 0) + num_pages
        if count:
            self.num_pages[namespace] = count
        else:
            del self.num_pages[namespace]
        if self.quota is not None:
            (self._over_quota.add if count > self.quota else self._over_quota.discard)(namespace)

    def use(self, namespace: str | None, num_evicted: int) -> None:
        """Note that a request uses the namespace after ``num_evicted`` evictions. O(1)."""
        if self.quota is not None:
            self._used[namespace] = num_evicted
            self._used.move_to_end(namespace)

    def most_idle(self, num_evicted: int) -> tuple[str | None, ...]:
        """The namespace that has been idle for longest, if one is idle. O(1)."""
        for namespace, used in self._used.items():
            return (namespace,) if num_evicted - used > self.idle_after else ()
        return ()

    def forget(self, namespace: str | None) -> None:
        """Forget a namespace that has no node in the tree. O(1)."""
        self._used.pop(namespace, None)

    def check(self, namespaces: Set[str | None]) -> None:
        """Assert that those beyond the quota are known, and when each was used. O(namespaces)."""
        many = {name for name, count in self.num_pages.items() if count > (self.quota or 0)}
        assert self._over_quota == (many if self.quota is not None else set()), (
            "a quota is not kept"
        )
        known = namespaces if self.quota is not None else NO_NAMESPACES
        assert self._used.keys() == known, "it is not known when a namespace was used"
        assert list(self._used.values()) == sorted(self._used.values()), "uses are out of order"


class _Ranks:
    """The ranks under which leaves of one namespace are or were filed, the lowest at hand."""

    __slots__ = ("heap", "most")

    def __init__(self, ranks: list[int]) -> None:
        self.heap = ranks  # sorted, which is a heap
        self.most = 2 * len(ranks) + SLACK

    def add(self, rank: int, filed: Mapping[int, object]) -> None:
        """O(log n) on average: those no longer ``filed`` are dropped when they may be most."""
        heapq.heappush(self.heap, rank)
        if len(self.heap) > self.most:
            self.heap = sorted(each for each in set(self.heap) if each in filed)
            self.most = 2 * len(self.heap) + SLACK

    def lowest(self, filed: Mapping[int, object]) -> int | None:
        """The lowest rank that is still filed. O(log n) for each one dropped on the way."""
        while self.heap and self.heap[0] not in filed:
            heapq.heappop(self.heap)
        return self.heap[0] if self.heap else None


class EvictionIndex:
    """Unlocked leaves sorted by rank."""

    def __init__(self) -> None:
        # Ranks are unique because ``last_used`` is; none is ever of two namespaces.
        self._leaves: SortedDict[int, Node] = SortedDict()
        # by namespace, from the first `first_of` on
        self._ranks: dict[str | None, _Ranks] | None = None

    def add(self, leaf: Node) -> None:
        """File a leaf under its present rank. O(log n)."""
        self._leaves[leaf.last_used] = leaf
        if self._ranks is not None:
            if leaf.namespace not in self._ranks:
                self._ranks[leaf.namespace] = _Ranks([])
            self._ranks[leaf.namespace].add(leaf.last_used, self._leaves)

    def remove(self, leaf: Node) -> None:
        """Take a filed leaf out; KeyError when it is not filed. O(log n)."""
        del self._leaves[leaf.last_used]

    def take(
        self, missing: int, owned: NamespaceQuota, num_evicted: int
    ) -> tuple[Node | None, int, bool]:
        """Take out the leaf to evict next; return it, its pages to evict, and if by its quota.

        At most ``missing`` pages. ``num_evicted``: pages evicted so far, by which a namespace is
        idle. O(log n), and O(namespaces over quota).
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
        """A leaf of the namespace that has been idle for longest. O(log n) on average."""
        while most_idle := owned.most_idle(num_evicted):
            if (leaf := self.first_of(most_idle)) is not None:
                return leaf
            owned.use(most_idle[0], num_evicted)  # all it has is held: then it is in use
        return None

    def first_of(self, namespaces: Iterable[str | None]) -> Node | None:
        """The leaf of these namespaces that goes next, or None. O(log n) each; O(n) at first."""
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
        """Leaves in the order of their ranks. O(n)."""
        return iter(self._leaves.values())

    def checks(self) -> Iterator[None]:
        """Assert that every leaf is filed under its present rank, and as its namespace's.

        In steps, O(n) in all.
        """
        known = {name: set(each.heap) for name, each in (self._ranks or {}).items()}
        for rank, leaf in self._leaves.items():
            assert rank == leaf.last_used, f"a leaf of {leaf.last_used} is filed at {rank}"
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


class EvictionLog:
    """Remembers the last evictions by where they began, `MAX_EVICTIONS` at most.

    A place is known by its page and the one before it, so that noting an eviction need not walk to
    the root; two equal pairs of pages at different depths are taken for one. Of one place the last
    eviction counts.
    """

    def __init__(self, page_size: int) -> None:
        self.now = 0.0  # seconds
        self._page_size = page_size  # tokens
        self._evictions: OrderedDict[tuple[str | None, int], Eviction] = OrderedDict()

    def dropped(self, node: Node, first: int, cause: Cause) -> None:
        """Record that ``node.page_ids[first:]`` leave the tree; an `OnDropped`."""
        key = (node.namespace, hash(node.boundary_tokens(first, self._page_size)))
        self._evictions[key] = Eviction(cause, self.now)
        self._evictions.move_to_end(key)
        if len(self._evictions) > MAX_EVICTIONS:
            self._evictions.popitem(last=False)

    def find(self, namespace: str | None, tokens: array[int], num_cached: int) -> Eviction | None:
        """Why the page behind the first ``num_cached`` tokens is gone, if it was there. O(1)."""
        stop = num_cached + self._page_size
        if stop > len(tokens):
            return None
        boundary_tokens = tokens[max(0, num_cached - self._page_size) : stop]
        return self._evictions.get((namespace, hash(boundary_tokens.tobytes())))

    def __len__(self) -> int:
        return len(self._evictions)

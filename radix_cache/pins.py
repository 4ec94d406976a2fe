"""Pins: locks of the tree with a time to live, in place of a lease.

A pin ranks above what is merely cached and below what requests borrow: eviction passes it over,
and it gives way when a request could not be served otherwise. It never outgrows its quota.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict

from .node import LockHandle, Match, Node
from .tree import RadixTree


@dataclass(slots=True, eq=False)
class PinnedPrefix:
    """A prefix that one pin keeps."""

    lock: LockHandle  # owned by `PinnedPrefixes`
    ttl: float  # seconds from the last hit
    until: float  # on the clock of `PinnedPrefixes.expire`
    serial: int  # distinguishes pins that end at the same time

    @property
    def namespace(self) -> str | None:
        """The namespace of its pages."""
        return self.lock.node.namespace


class PinnedPrefixes:
    """The pins of a tree, one at most for each prefix.

    ``quota``: pages that one namespace may pin; all together may pin twice as many, as far as
    ``num_pages`` goes. Beyond that the oldest pin of the namespace gives way, or of the one that
    pins most. A pin is as old as its last hit. Pages under several pins count once.
    """

    def __init__(self, tree: RadixTree, *, quota: int, num_pages: int) -> None:
        self.quota = min(quota, num_pages)  # pages
        self.total_quota = min(2 * quota, num_pages)
        self.now = 0.0  # seconds
        self._tree = tree
        # by their last node, the oldest first
        self._pins: OrderedDict[Node, PinnedPrefix] = OrderedDict()
        # by the time they end
        self._due: SortedDict[tuple[float, int], PinnedPrefix] = SortedDict()
        self._num_pages: Counter[str | None] = Counter()  # pinned pages of each namespace
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._pins)

    def keep(self, match: Match, ttl: float) -> None:
        """Pin a match of at most ``quota`` pages, or prolong the pin it has. O(depth + pins)."""
        before = self._tree.num_pinned_pages
        lock = self._tree.lock(match, is_pin=True)
        known = self._pins.get(lock.node)
        if known is not None:
            self._tree.unlock(lock)
            known.ttl = max(known.ttl, ttl)
            self._renew(known)
            return
        self._num_pages[match.namespace] += self._tree.num_pinned_pages - before
        self._num_made += 1
        pinned = PinnedPrefix(lock, ttl, self.now + ttl, self._num_made)
        self._pins[lock.node] = self._due[pinned.until, pinned.serial] = pinned
        self._shrink(pinned)

    def touch(self, node: Node) -> None:
        """A request hit the path to ``node``: its pins live on. O(depth) where there are pins."""
        if self._pins:
            for passed in node.path():
                if passed.pins and (pinned := self._pins.get(passed)) is not None:
                    self._renew(pinned)

    def expire(self, now: float) -> None:
        """Remove the pins whose time is over. O(1), and O(depth + log n) for each of them."""
        self.now = now
        while self._due and self._due.peekitem(0)[0][0] <= now:
            self._drop(self._due.peekitem(0)[1])

    def evict_pin(self) -> None:
        """Remove the oldest pin that makes pages evictable; there must be one. O(pins)."""
        self._drop(next(pin for pin in self._pins.values() if pin.lock.node.ref_count == 1))

    def drop(self, *namespaces: str | None) -> None:
        """Remove all pins of these namespaces, of all when none is named. O(pins)."""
        for pinned in list(self._pins.values()):
            if not namespaces or pinned.namespace in namespaces:
                self._drop(pinned)

    def drop_below(self, node: Node) -> None:
        """Remove the pins that go through ``node``. O(pins * depth)."""
        for pinned in list(self._pins.values()):
            if node in pinned.lock.node.path():
                self._drop(pinned)

    def last_pages(self) -> set[int]:
        """The last page of each pin. O(pins)."""
        return {pinned.lock.node.page_ids[-1] for pinned in self._pins.values()}

    def of(self, namespace: str | None) -> list[PinnedPrefix]:
        """The pins of a namespace, the oldest first. O(pins)."""
        return [pinned for pinned in self._pins.values() if pinned.namespace == namespace]

    def num_pages(self, namespace: str | None) -> int:
        """Pages that a namespace pins. O(1)."""
        return self._num_pages[namespace]

    def locks(self) -> Iterator[LockHandle]:
        """The locks of all pins."""
        return (pinned.lock for pinned in self._pins.values())

    def check(self) -> None:
        """Assert that pins, times and page counts agree. O(pins * depth)."""
        found: Counter[str | None] = Counter()
        nodes = {node for pinned in self._pins.values() for node in pinned.lock.node.path()}
        for node in nodes:
            found[node.namespace] += len(node.page_ids)
        for last, pinned in self._pins.items():
            assert pinned.lock.node is last, "a pin is filed under a wrong node"
            assert pinned.lock.is_pin, "a pin holds the lock of a lease"
            assert self._due[pinned.until, pinned.serial] is pinned, "a pin has no end"
        assert len(self._due) == len(self._pins), "the end of a pin that is gone is still awaited"
        assert +found == +self._num_pages, f"{found} pages are pinned, not {self._num_pages}"
        assert found.total() <= self.total_quota, "more is pinned than may be"
        assert max(found.values(), default=0) <= self.quota, "a namespace pins more than it may"

    def _renew(self, pinned: PinnedPrefix) -> None:
        del self._due[pinned.until, pinned.serial]
        pinned.until = self.now + pinned.ttl
        self._due[pinned.until, pinned.serial] = pinned
        self._pins.move_to_end(pinned.lock.node)

    def _drop(self, pinned: PinnedPrefix) -> None:
        before = self._tree.num_pinned_pages
        self._tree.unlock(pinned.lock)
        self._num_pages[pinned.namespace] -= before - self._tree.num_pinned_pages
        if not self._num_pages[pinned.namespace]:
            del self._num_pages[pinned.namespace]
        del self._pins[pinned.lock.node], self._due[pinned.until, pinned.serial]

    def _shrink(self, newest: PinnedPrefix) -> None:
        """Remove older pins until the quotas hold."""
        own = newest.namespace
        while self._num_pages[own] > self.quota:
            self._drop(next(self._others(own, newest)))
        while self._tree.num_pinned_pages > self.total_quota:
            biggest = (name for name, _ in self._num_pages.most_common())
            self._drop(next(pin for name in biggest for pin in self._others(name, newest)))

    def _others(self, namespace: str | None, newest: PinnedPrefix) -> Iterator[PinnedPrefix]:
        """Pins of a namespace whose going unpins pages, but for the newest; the oldest first."""
        return (
            pinned
            for pinned in self._pins.values()
            if pinned.namespace == namespace and pinned is not newest
            if pinned.lock.node.pins == 1
        )

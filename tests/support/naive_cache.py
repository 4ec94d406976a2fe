"""A prefix cache too naive to be wrong: the oracle of the state machine.

It knows no nodes: it keeps one entry per cached page, under the whole token prefix, and evicts page
by page, by quota and recency. Which pin gives way it does not foresee: it is told which are left,
and whoever tells it says that none went without need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from foretoken.radix_cache import KVLease
from foretoken.radix_cache.node import LockHandle

Prefix = tuple[str | None, tuple[int, ...]]  # namespace, tokens up to the end of the page


@dataclass(eq=False)
class Borrower:
    lease: KVLease
    tokens: list[int]
    shared: list[Prefix] = field(default_factory=list)  # pages lent to it
    private: list[int] = field(default_factory=list)  # page ids of its own


@dataclass(eq=False)
class Pin:
    ttl: float
    until: float
    serial: int


@dataclass(eq=False)
class NaiveCache:
    """Pages by prefix; O(everything) at every turn."""

    page_size: int
    free: set[int]
    quota: int | None  # pages of one namespace beyond which they go first
    pages: dict[Prefix, int] = field(default_factory=dict)
    used: dict[Prefix, int] = field(default_factory=dict)
    live: list[Borrower] = field(default_factory=list)
    pins: dict[Prefix, Pin] = field(default_factory=dict)  # by their ends; the oldest first
    clock: int = 0
    now: float = 0.0  # seconds

    def prefixes(self, namespace: str | None, tokens: list[int]) -> list[Prefix]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def match(self, namespace: str | None, tokens: list[int]) -> list[Prefix]:
        return list(takewhile(self.pages.__contains__, self.prefixes(namespace, tokens)))

    def is_last(self, prefix: Prefix) -> bool:
        namespace, tokens = prefix
        end = len(tokens)
        return not any(
            ns == namespace and t[:end] == tokens and len(t) > end for ns, t in self.pages
        )

    def pinned(self) -> set[Prefix]:
        return {each for end in self.pins for each in self.prefixes(end[0], list(end[1]))}

    def idle(self) -> set[Prefix]:
        """Return the prefixes that could be had back: evictable, or kept by pins alone."""
        return set(self.pages).difference(*(b.shared for b in self.live))

    def evictable(self) -> set[Prefix]:
        return self.idle() - self.pinned()

    def evict(self, num_pages: int) -> None:
        for _ in range(num_pages):
            last = [p for p in self.evictable() if self.is_last(p)]
            beyond = self.beyond()
            first = [p for p in last if p[0] in beyond] or last
            self.drop(min(first, key=self.used.__getitem__))

    def beyond(self) -> set[str | None]:
        owned = Counter(namespace for namespace, _ in self.pages)
        if self.quota is None or len(owned) == 1:
            return set()
        return {name for name, count in owned.items() if count > self.quota}

    def drop(self, prefix: Prefix) -> None:
        self.free.add(self.pages.pop(prefix))

    def publish(self, borrower: Borrower, num_computed: int) -> None:
        namespace = borrower.lease.namespace
        for prefix in self.prefixes(namespace, borrower.tokens[:num_computed]):
            if prefix in borrower.shared:
                continue
            own = borrower.private.pop(0)
            if prefix in self.pages:
                self.free.add(own)
            self.pages.setdefault(prefix, own)
            borrower.shared.append(prefix)

    def use(self, prefixes: list[Prefix]) -> None:
        self.clock += 1
        self.used.update(dict.fromkeys(prefixes, self.clock))

    def pin(self, found: list[Prefix], ttl: float) -> None:
        self.use(found)
        pin = self.pins.setdefault(found[-1], Pin(ttl, 0.0, self.clock))
        pin.ttl = max(pin.ttl, ttl)
        self.hit(found[-1:])

    def hit(self, prefixes: list[Prefix]) -> None:
        """The time of these pins begins anew, the shortest first."""
        for end in [each for each in prefixes if each in self.pins]:
            pin = self.pins[end] = self.pins.pop(end)
            pin.until = self.now + pin.ttl

    def unpin(self, *ends: Prefix) -> None:
        for end in ends:
            del self.pins[end]
            self.use(self.prefixes(end[0], list(end[1])))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        over = [(pin.until, pin.serial, end) for end, pin in self.pins.items()]
        self.unpin(*(end for until, _, end in sorted(over) if until <= self.now))

    def pins_too_much(self, namespace: str | None, quota: int, total_quota: int) -> bool:
        pinned = self.pinned()
        own = [each for each in pinned if each[0] == namespace]
        return len(own) > quota or len(pinned) > total_quota

    def flush(self, prefixes: Iterable[Prefix]) -> int:
        """Drops those of them that can go, each when nothing is behind it; returns how many."""
        num_before = len(self.pages)
        for prefix in sorted(prefixes, key=lambda each: -len(each[1])):
            if prefix in self.evictable() and self.is_last(prefix):
                self.drop(prefix)
        return num_before - len(self.pages)

    def release(self, borrower: Borrower) -> None:
        self.use(borrower.shared)
        self.free.update(borrower.private)
        self.live.remove(borrower)


def nth(prefixes: Iterable[Prefix], which: int) -> Prefix:
    """Any of them, by a number."""
    ordered = sorted(prefixes, key=lambda each: (each[0] or "", each[1]))
    return ordered[which % len(ordered)]


def prefix_of(lock: LockHandle) -> Prefix:
    """Return the prefix that a receipt of the tree holds."""
    path = lock.node.path()
    return lock.node.namespace, tuple(token for node in path for token in node.key)

"""Shares: a bounded memory that is shared fairly by its owners."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Owner = bytes
K = TypeVar("K", bound=Hashable)


FAIR_SHARE = 0.25  # share of the memory that an owner keeps under pressure


class Shares(Generic[K]):
    """Entries of a bounded memory by owner, and the choice of the entry to evict.

    The entry to evict is the oldest one of the largest owner if that owner has more than a quarter
    of the memory, else the oldest of all. An owner below a quarter thus keeps its entries under
    another owner's load, and a single owner may use the whole memory.
    """

    def __init__(self, max_bytes: int, max_entries: float = float("inf")) -> None:
        self.num_bytes = 0
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self._entries: OrderedDict[K, tuple[Owner, int]] = OrderedDict()  # oldest first
        self._by_owner: dict[Owner, OrderedDict[K, None]] = {}
        self._bytes: dict[Owner, int] = {}
        self._large: set[Owner] = set()  # owners above `FAIR_SHARE`; there are few

    def add(self, owner: Owner, key: K, num_bytes: int) -> None:
        """Add an entry as the youngest."""
        self._entries[key] = (owner, num_bytes)
        if owner not in self._by_owner:
            self._by_owner[owner], self._bytes[owner] = OrderedDict(), 0
        self._by_owner[owner][key] = None
        self._count(owner, num_bytes)

    def remove(self, key: K) -> None:
        """Remove an entry. Raises KeyError if it is missing."""
        owner, num_bytes = self._entries.pop(key)
        del self._by_owner[owner][key]
        self._count(owner, -num_bytes)
        if not self._by_owner[owner]:
            del self._by_owner[owner], self._bytes[owner]

    def grow(self, key: K, num_bytes: int) -> None:
        """Add bytes to an entry, and make it the youngest. Raises KeyError if it is missing."""
        owner, size = self._entries[key]
        self._entries[key] = (owner, size + num_bytes)
        self._count(owner, num_bytes)
        self.touch(key)

    def touch(self, key: K) -> None:
        """Make an entry the youngest."""
        self._entries.move_to_end(key)
        self._by_owner[self._entries[key][0]].move_to_end(key)

    def excess(self) -> K | None:
        """Return the entry to evict next; None while the bounds are respected. O(1)."""
        if self.num_bytes <= self._max_bytes and len(self._entries) <= self._max_entries:
            return None
        if self._large:
            return next(iter(self._by_owner[max(self._large, key=self._part)]))
        return next(iter(self._entries))

    def _count(self, owner: Owner, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes[owner] += num_bytes
        if self._part(owner) > FAIR_SHARE:
            self._large.add(owner)
        elif self._large:
            self._large.discard(owner)

    def _part(self, owner: Owner) -> float:
        """Return an owner's share of the memory: the larger of its shares of bytes and of
        entries.
        """
        in_bytes = self._bytes[owner] / self._max_bytes
        in_entries = len(self._by_owner[owner]) / self._max_entries
        return in_bytes if in_bytes > in_entries else in_entries

"""Who asks, whose a prompt or a response is, and how owners share a bounded memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from contextvars import ContextVar
from typing import Generic, TypeVar

import msgspec

Owner = bytes
K = TypeVar("K", bound=Hashable)
FAIR_SHARE = 0.25  # of a memory that all owners have in common
NOBODY = b""  # whoever comes without a key, and the SDK
CALLER: ContextVar[bytes] = ContextVar("caller", default=NOBODY)
"""The caller of the request that is being served, as a hash of its key; the gate sets it.

It is no argument of the routes, so that none of them can forget to pass it on.
"""


def caller_of(key: str | bytes) -> bytes:
    """A caller by its key, which is not kept."""
    given = key if isinstance(key, bytes) else key.encode("latin-1")  # as starlette read it
    return hashlib.sha256(given).digest() if given else NOBODY


def owner_of(cache_salt: str | None) -> Owner:
    """Whose responses and prompts the caller may read: those of its key and of this salt."""
    return hashlib.sha256(msgspec.json.encode((CALLER.get().hex(), cache_salt))).digest()


def tenant_of(cache_salt: str | None) -> str | None:
    """Whom the scheduler charges: the salt, else the caller's key by a short hash, else nobody."""
    if cache_salt is not None:
        return cache_salt
    return f"key-{CALLER.get().hex()[:16]}" if CALLER.get() else None


class Shares(Generic[K]):
    """Who takes how much of a bounded memory, and whose entry must make room.

    The oldest goes of the owner that has most, if that is more than a quarter; else the oldest of
    all. So nobody can drive out those who keep to their quarter, and one who is alone has all.
    """

    def __init__(self, max_bytes: int, max_entries: float = float("inf")) -> None:
        self.num_bytes = 0
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self._entries: OrderedDict[K, tuple[Owner, int]] = OrderedDict()  # oldest first
        self._by_owner: dict[Owner, OrderedDict[K, None]] = {}
        self._bytes: dict[Owner, int] = {}
        self._large: set[Owner] = set()  # those beyond their share, of whom there are few

    def add(self, owner: Owner, key: K, num_bytes: int) -> None:
        """A new entry, the youngest."""
        self._entries[key] = (owner, num_bytes)
        self._by_owner.setdefault(owner, OrderedDict())[key] = None
        self._count(owner, num_bytes)

    def remove(self, key: K) -> None:
        """An entry that is gone; it must be there."""
        owner, num_bytes = self._entries.pop(key)
        del self._by_owner[owner][key]
        self._count(owner, -num_bytes)
        if not self._by_owner[owner]:
            del self._by_owner[owner], self._bytes[owner]

    def touch(self, key: K) -> None:
        """Make an entry the youngest."""
        self._entries.move_to_end(key)
        self._by_owner[self._entries[key][0]].move_to_end(key)

    def excess(self) -> K | None:
        """The entry that must go next; None while all is within the bounds. O(1)."""
        if self.num_bytes <= self._max_bytes and len(self._entries) <= self._max_entries:
            return None
        if self._large:
            return next(iter(self._by_owner[max(self._large, key=self._part)]))
        return next(iter(self._entries))

    def _count(self, owner: Owner, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes[owner] = self._bytes.get(owner, 0) + num_bytes
        mark = self._large.add if self._part(owner) > FAIR_SHARE else self._large.discard
        mark(owner)

    def _part(self, owner: Owner) -> float:
        """How much of the memory it has, by bytes or by entries, whichever is more."""
        in_entries = len(self._by_owner[owner]) / self._max_entries
        return max(self._bytes[owner] / self._max_bytes, in_entries)

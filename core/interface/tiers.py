"""Tiers: stores that keep KV pages beyond the pool, as the engine knows them.

Calls that may take long are made in a thread of their own. No token depends on a tier: a page that
is missing, late or unsound is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

Medium = Literal["host", "disk", "remote"]
IsValid = Callable[[], bool]


class PageStore(Protocol):
    """Keeps pages by key, as bytes of one fixed length. Called in one thread, the I/O thread.

    Any method may raise OSError: then the caller leaves the store alone for a while.
    """

    medium: Medium
    capacity: int  # pages

    def __len__(self) -> int:
        """Return how many pages are kept; any thread may ask."""

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys``, from the first on, are kept. It may be wrong."""

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read a page. False means that it is missing or unsound: then ``into`` is void."""

    def put(self, key: bytes, tag: bytes, page: memoryview, is_valid: IsValid) -> bool:
        """Keep a page; return whether it is kept now.

        ``page`` may change while it is read: ``is_valid`` is called when it was read, and only if
        it returns true the page can be found. ``tag``: 8 bytes that name the key's namespace.
        """

    def flush(self, tag: bytes | None = None) -> None:
        """Forget the pages of a namespace, of all when none is named."""

    def stats(self) -> Mapping[str, int]:
        """Return counts of pages that were given up, by cause; any thread may ask."""

    def close(self) -> None:
        """Write what is not written yet, and let go of files and connections."""

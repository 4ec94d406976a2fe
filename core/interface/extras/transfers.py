"""Transfers: KV pages that go from the pool of one engine to that of another.

The engine that has computed a prompt (P) holds its pages; the one that goes on with it (D) reads
them out of P's memory, as it would read them from a disk. P is not asked while that happens, so a
word in P's memory says whether the pages are still held: D looks at it behind its reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

MemoryKind = Literal["DRAM", "VRAM"]
Refusal = Literal[
    "role", "unsigned", "expired", "fingerprint", "out_of_range", "foreign", "unreachable"
]
"""Why pages that a request names are not read: they are computed."""


class Region(NamedTuple):
    """Consecutive bytes in the memory of another process."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The place of a pool in the memory of its process.

    ``parts``: for each part of a page's record the row of page 0; those of other pages follow it.
    ``words``: address of `TransferLocks.words`.
    """

    agent: bytes  # by which others reach it
    kind: MemoryKind
    parts: tuple[Region, ...]
    words: int


@dataclass(slots=True, eq=False)
class PageOffer:
    """Pages of a peer that a request may read, from the beginning of its prompt on."""

    name: str  # of the peer's transfer
    memory: PoolMemory
    key: bytes  # of the last page, which fixes all tokens up to its end
    page_ids: Sequence[int]  # the peer's
    slot: int  # of the word
    nonce: int  # in the word while the pages are held
    is_met: bool = False  # whether the peer was reached, and held the pages by then

    @property
    def word(self) -> int:
        """Address of its word."""
        return self.memory.words + 8 * self.slot


class PageServer(Protocol):
    """Memory that other processes read. Belongs to the event loop's thread."""

    memory: PoolMemory  # where the memory lies

    def notes(self) -> Sequence[bytes]:
        """Return what readers have sent since the last call; returns at once."""

    def close(self) -> None:
        """Let go of the memory."""


class PageReader(Protocol):
    """Reads the memory of other processes. Belongs to the I/O thread.

    Its methods raise OSError where a peer does not answer, or is gone.
    """

    capacity: int  # bytes that one call can read

    def read(self, memory: PoolMemory, regions: Sequence[Region]) -> memoryview:
        """Read regions of a pool, one after the other; valid until the next call."""

    def read_word(self, offer: PageOffer) -> int:
        """Read the word of an offer. Pages that were read before it were read before it."""

    def send(self, memory: PoolMemory, note: bytes) -> None:
        """Send a note to the process of a pool."""

    def close(self) -> None:
        """Let go of memory and connections."""


RENEW, DONE = b"renew ", b"done "
"""Notes to P: the name of the transfer follows."""

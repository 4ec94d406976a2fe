"""Transfers: KV pages that go from the pool of one engine to another engine's.

The engine that has computed a prompt (P) holds its pages; the engine that continues the request (D)
reads them from P's memory, as it would read them from a disk. P takes no part in the reading, so a
word in P's memory says whether the pages are still held: D checks it after its reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

MemoryKind = Literal["DRAM", "VRAM"]
Refusal = Literal[
    "role", "unsigned", "expired", "fingerprint", "out_of_range", "foreign", "unreachable"
]
"""Reason why pages that a request names are not read: they are computed instead."""


class Region(NamedTuple):
    """Consecutive bytes in the memory of another process."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Location of a pool in the memory of its process.

    ``parts``: for each tensor that holds a part of a page, the memory of page 0's row; the rows of
    the other pages follow. ``words``: address of `TransferLocks.words`.
    """

    agent: bytes  # metadata by which other processes reach the pool
    kind: MemoryKind
    parts: tuple[Region, ...]
    words: int


@dataclass(slots=True, eq=False)
class PageOffer:
    """Pages of a peer that a request may read, from the beginning of its prompt on."""

    name: str  # name of the peer's transfer
    memory: PoolMemory
    key: bytes  # key of the last page, which determines all tokens up to its end
    page_ids: Sequence[int]  # page ids in the peer's pool
    slot: int  # slot of the peer's word
    nonce: int  # value of the word while the pages are held
    is_met: bool = False  # whether the peer was reached, and held the pages then

    @property
    def word(self) -> int:
        """Address of the word that says whether the pages of this offer are still held."""
        return self.memory.words + 8 * self.slot


class PageServer(Protocol):
    """Memory that other processes read. Belongs to the event loop's thread."""

    memory: PoolMemory  # location of the memory

    def notes(self) -> Sequence[bytes]:
        """Return the messages that readers have sent since the last call; returns at once."""

    def close(self) -> None:
        """Release the memory."""


class PageReader(Protocol):
    """Reader of the memory of other processes. Belongs to the I/O thread.

    Its methods raise OSError if a peer does not answer, or is gone.
    """

    capacity: int  # most bytes that one call can read

    def read(self, memory: PoolMemory, regions: Sequence[Region]) -> memoryview:
        """Return the joined bytes of some regions of a pool; valid until the next call."""

    def read_word(self, offer: PageOffer) -> int:
        """Return the word that says whether an offer's pages are still held.

        It is read after all pages that were read before this call.
        """

    def send(self, memory: PoolMemory, note: bytes) -> None:
        """Send a message to the process that holds a pool."""

    def close(self) -> None:
        """Release memory and connections."""


RENEW, DONE = b"renew ", b"done "
"""Notes to P; each is followed by the name of the transfer."""

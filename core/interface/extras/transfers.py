"""Transfers of KV pages from the pool of one engine to the pool of another engine.

The engine that has computed a prompt (P) holds the prompt's pages; the engine that continues the
request (D) reads them from P's memory, as it would read them from a disk. P takes no part in the
reading, so a 64-bit word in P's memory says whether the pages are still held: D checks the word
after its reading.
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

    Several tensors may hold a part of each page. ``parts``: the memory of page 0 in each of the
    tensors; the other pages follow it. ``words``: address of `TransferLocks.words`.
    """

    agent: bytes  # metadata by which other processes can connect to the pool's process
    kind: MemoryKind
    parts: tuple[Region, ...]
    words: int


@dataclass(slots=True, eq=False)
class PageOffer:
    """Pages of another engine, the peer, which hold the beginning of a request's prompt."""

    name: str  # name of the transfer at the peer
    memory: PoolMemory
    key: bytes  # key of the last page, which determines all tokens up to its end
    page_ids: Sequence[int]  # page ids in the peer's pool
    slot: int  # index of the transfer's word in the peer's `TransferLocks.words`
    nonce: int  # value of the word while the pages are held
    is_met: bool = False  # whether the peer was connected, and held the pages at that time

    @property
    def word(self) -> int:
        """Address of the word that says whether the pages of this offer are still held."""
        return self.memory.words + 8 * self.slot


class PageServer(Protocol):
    """Memory that other processes can read. Only the event loop's thread calls the methods."""

    memory: PoolMemory  # location of the memory

    def notes(self) -> Sequence[bytes]:
        """Return the messages that readers have sent since the last call, without waiting."""

    def close(self) -> None:
        """End the access of other processes to the memory."""


class PageReader(Protocol):
    """Reader of the memory of other processes. Only the I/O thread calls the methods.

    They raise OSError if a peer does not answer or has exited.
    """

    capacity: int  # maximum number of bytes that one call can read

    def read(self, memory: PoolMemory, regions: Sequence[Region]) -> memoryview:
        """Read regions of a pool; return the joined bytes, which are valid until the next call."""

    def read_word(self, offer: PageOffer) -> int:
        """Read the word that says whether the pages of an offer are still held.

        The word is read after the pages of all earlier calls.
        """

    def send(self, memory: PoolMemory, note: bytes) -> None:
        """Send a message to the process that holds a pool."""

    def close(self) -> None:
        """Release the memory and the connections of this reader."""


RENEW, DONE = b"renew ", b"done "
"""Notes to P; each is followed by the name of the transfer."""

"""Transfers inside one process: memory is read by its address; peers die when they are told to."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence

from torch import Tensor

from foretoken.core.interface.extras.transfers import (
    DONE,
    RENEW,
    PageOffer,
    PageReader,
    PageServer,
    PoolMemory,
    Region,
)
from foretoken.radix_cache import TransferLocks

_numbers = itertools.count()
_servers: dict[bytes, LoopbackServer] = {}


class LoopbackServer(PageServer):
    """A `PageServer` of tensors; ``is_dead`` makes it unreachable."""

    def __init__(self, parts: Sequence[Tensor], words: array[int]) -> None:
        self._kept = parts, words
        self.sent: list[bytes] = []
        self.is_dead = False
        rows = tuple(Region(part.data_ptr(), part[0].nbytes) for part in parts)
        agent = b"loopback %d" % next(_numbers)
        self._memory = PoolMemory(agent, "DRAM", rows, words.buffer_info()[0])
        _servers[agent] = self

    @property
    def memory(self) -> PoolMemory:
        return self._memory

    def notes(self) -> Sequence[bytes]:
        found, self.sent = self.sent, []
        return found

    def close(self) -> None:
        self.is_dead = True


class LoopbackReader(PageReader):
    """A `PageReader` of the servers in this process.

    ``before`` is called with the name of each method before anything is done.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._buffer = bytearray(capacity)
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda name: None
        self.is_closed = False

    @property
    def capacity(self) -> int:
        return self._capacity

    def _reach(self, name: str, memory: PoolMemory) -> LoopbackServer:
        self.calls.append(name)
        self.before(name)
        server = _servers[memory.agent]
        if server.is_dead:
            raise OSError("the peer is gone")
        return server

    def read(self, memory: PoolMemory, regions: Sequence[Region]) -> memoryview:
        self._reach("read", memory)
        data = b"".join(ctypes.string_at(*region) for region in regions)
        self._buffer[: len(data)] = data
        return memoryview(self._buffer)[: len(data)]

    def read_word(self, offer: PageOffer) -> int:
        self._reach("read_word", offer.memory)
        return int.from_bytes(ctypes.string_at(offer.word, 8), "little")

    def send(self, memory: PoolMemory, note: bytes) -> None:
        self._reach("send", memory).sent.append(note)

    def close(self) -> None:
        self.is_closed = True


def take_notes(server: LoopbackServer, locks: TransferLocks) -> None:
    """Do what readers have asked for, as an engine's `TransferDesk` does."""
    for note in server.notes():
        verb, _, name = note.decode().partition(" ")
        {DONE: locks.end, RENEW: locks.renew}[verb.encode() + b" "](name)

"""Transfers of a plan: pools whose pages take time to read and have no content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from typing_extensions import override

from ...core.interface.extras.transfers import PageOffer, PageReader, PageServer, PoolMemory, Region
from ...radix_cache import HeldPages, TransferLocks

PAGE_BYTES = 1  # Bytes that stand for a page.


class Spends(Protocol):
    """A virtual thread whose running call can be made to take longer."""

    def spend(self, seconds: float) -> None:
        """Make the running call take ``seconds`` longer."""


class VirtualServer(PageServer):
    """The pool of a replica that computes prompts for others."""

    def __init__(self, locks: TransferLocks, memory: PoolMemory) -> None:
        self.locks = locks
        self.sent: list[bytes] = []  # Notes from readers since the last call of `notes`.
        self.memory = memory

    @override
    def notes(self) -> Sequence[bytes]:
        found, self.sent = self.sent, []
        return found

    def close(self) -> None:
        """Do nothing: the memory is this process's own."""

    def offer(self, held: HeldPages, key: bytes) -> PageOffer:
        """Offer held pages; ``key`` is the key of the last page."""
        pages = held.page_ids.tolist()
        return PageOffer(held.name, self.memory, key, pages, held.slot, held.nonce)


class Network:
    """The pools of a plan that other replicas read. ``page_seconds``: time to read a page."""

    def __init__(self, page_seconds: float) -> None:
        self.page_seconds = page_seconds
        self.servers: dict[bytes, VirtualServer] = {}  # Servers by agent.

    def add(self, locks: TransferLocks) -> VirtualServer:
        """Let other replicas read a pool."""
        agent = b"%d" % len(self.servers)
        server = VirtualServer(locks, PoolMemory(agent, "DRAM", (Region(0, PAGE_BYTES),), 0))
        self.servers[agent] = server
        return server


class VirtualReader(PageReader):
    """Reads pools of a network, ``capacity`` pages per call; belongs to the I/O thread."""

    def __init__(self, network: Network, capacity: int, thread: Spends) -> None:
        self._network, self._thread = network, thread
        self.capacity = capacity * PAGE_BYTES

    def read(self, memory: PoolMemory, regions: Sequence[Region]) -> memoryview:
        """Spend the time of reading the pages."""
        del memory
        self._thread.spend(self._network.page_seconds * len(regions))
        return memoryview(bytes(PAGE_BYTES * len(regions)))

    @override
    def read_word(self, offer: PageOffer) -> int:
        return self._network.servers[offer.memory.agent].locks.words[offer.slot]

    @override
    def send(self, memory: PoolMemory, note: bytes) -> None:
        self._network.servers[memory.agent].sent.append(note)

    def close(self) -> None:
        """Do nothing."""

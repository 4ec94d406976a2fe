"""Host tier: pages by key in host memory, for engines whose pool lies on a GPU."""

from __future__ import annotations

import torch

from ...ops.machine.host_memory import map_zeros
from .slotted_store import Entry, SlottedStore


class HostSlots:
    """Slots in one area of host memory.

    ``pinned``: the memory is page-locked, so that a GPU copies pages directly. Pages have no
    checksums, because memory does not damage them, and no entries, because nothing survives the
    process.
    """

    def __init__(self, page_bytes: int, capacity: int, *, pinned: bool) -> None:
        self.capacity = capacity
        size = capacity * page_bytes
        memory = (
            torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else map_zeros(size)
        )
        self._pages = memory.view(capacity, page_bytes).numpy()

    def allocate(self, slot: int) -> bool:
        """Return whether the slot exists: all slots are allocated from the start."""
        return slot < self.capacity

    def write(self, slot: int, page: memoryview) -> int:
        """Copy a page into its slot; return 0 as its checksum."""
        self._pages[slot] = page
        return 0

    def read(self, slot: int, into: memoryview) -> int | None:
        """Copy a page out of its slot; return 0 as its checksum."""
        into[:] = self._pages[slot].data
        return 0

    def write_entry(self, slot: int, entry: Entry) -> None:
        """Do nothing: entries are never read back."""

    def void(self, slot: int) -> None:
        """Do nothing: entries are never read back."""

    def clear(self) -> None:
        """Do nothing: a page without a key is not read."""

    def close(self) -> None:
        """Do nothing: the memory is freed with the store."""


class HostStore(SlottedStore):
    """`SlottedStore` of pages of ``page_bytes`` in ``max_bytes`` of host memory."""

    def __init__(
        self, page_bytes: int, max_bytes: int, *, pinned: bool, quota: float = 1.0
    ) -> None:
        slots = HostSlots(page_bytes, max_bytes // page_bytes, pinned=pinned)
        super().__init__(slots, "host", page_bytes, quota)

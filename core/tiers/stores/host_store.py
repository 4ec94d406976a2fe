"""The host tier: pages by key in memory of the host, for engines whose pool lies on a GPU."""

from __future__ import annotations

import torch

from ...ops.machine.host_memory import map_zeros
from .slotted_store import Entry, SlottedStore


class HostSlots:
    """Slots in one area of memory, page-locked if ``pinned``: a GPU then copies by itself.

    Memory does not damage pages: there are no checksums, and entries are kept by the store alone.
    """

    def __init__(self, page_bytes: int, capacity: int, *, pinned: bool) -> None:
        self.capacity = capacity
        size = capacity * page_bytes
        memory = (
            torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else map_zeros(size)
        )
        self._pages = memory.view(capacity, page_bytes).numpy()

    def allocate(self, slot: int) -> bool:
        """Return true: all slots are there."""
        return slot < self.capacity

    def write(self, slot: int, page: memoryview) -> int:
        """Copy a page into its slot."""
        self._pages[slot] = page
        return 0

    def read(self, slot: int, into: memoryview) -> int | None:
        """Copy a page out of its slot."""
        into[:] = self._pages[slot].data
        return 0

    def write_entry(self, slot: int, entry: Entry) -> None:
        """Do nothing: nobody reads entries again."""

    def void(self, slot: int) -> None:
        """Do nothing: nobody reads entries again."""

    def clear(self) -> None:
        """Do nothing: what no key leads to is not read."""

    def close(self) -> None:
        """Do nothing: the memory goes with the store."""


class HostStore(SlottedStore):
    """Keeps pages of ``page_bytes`` in ``max_bytes`` of host memory; see `SlottedStore`."""

    def __init__(
        self, page_bytes: int, max_bytes: int, *, pinned: bool, quota: float = 1.0
    ) -> None:
        slots = HostSlots(page_bytes, max_bytes // page_bytes, pinned=pinned)
        super().__init__(slots, "host", page_bytes, quota)

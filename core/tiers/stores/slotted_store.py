"""SlottedStore: pages by key in slots of files or memory, with eviction by last use."""

from __future__ import annotations

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from typing_extensions import override

from ....radix_cache.eviction import NamespaceQuota
from ....radix_cache.prefix_cache import IDLE_AFTER
from ...interface.extras.tiers import IsValid, Medium, PageStore
from ..keys import KEY_BYTES, TAG_BYTES

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
# A page's slot, and its entry's checksum, tick and tag. It is a plain tuple, which Python's garbage
# collector skips, because a store may have millions of pages.
_Kept = tuple[int, int, int, bytes]


class Entry(NamedTuple):
    """Record of a stored page, which is written to the page's slot."""

    key: bytes
    check: int  # checksum of the page
    tick: int  # number of uses of the store up to the page's last use
    tag: bytes  # tag of the page's namespace, see `tag_of`


class Slots(Protocol):
    """Protocol of storage with ``capacity`` slots, each for a page and its entry."""

    capacity: int

    def allocate(self, slot: int) -> bool:
        """Reserve room for a slot that was never used; return whether there is room."""

    def write(self, slot: int, page: memoryview) -> int:
        """Write a page into a slot; return its checksum."""

    def read(self, slot: int, into: memoryview) -> int | None:
        """Read the page of a slot; return its checksum, or None if the slot has no page."""

    def write_entry(self, slot: int, entry: Entry) -> None:
        """Write the entry of a slot."""

    def void(self, slot: int) -> None:
        """Erase the entry of a slot, so that its page counts as missing."""

    def clear(self) -> None:
        """Erase all pages."""

    def close(self) -> None:
        """Release the files and the memory of the slots."""


class SlottedStore(PageStore):
    """`PageStore` of pages of ``page_bytes`` in slots.

    A page is written to a free slot before its entry is written; the entry of an older page is
    erased before its slot is overwritten. ``quota``: fraction of all pages that one namespace may
    have; pages of namespaces with more pages are evicted first, as in the pool. The index takes
    about half a kilobyte of memory per page.
    """

    def __init__(self, slots: Slots, medium: Medium, page_bytes: int, quota: float) -> None:
        self.medium = medium
        self._slots = slots
        self._page_bytes = page_bytes
        self._quota = quota
        self._tick = 0
        self._counts = {"unsound": 0, "given_up": 0, "evicted": 0}
        self._adopt([])

    def _adopt(self, found: list[tuple[int, Entry]]) -> None:
        """Replace the index by the pages in ``found``, which are pairs (slot, entry)."""
        self.capacity = self._slots.capacity  # it becomes less when the disk is full
        share = None if self._quota >= 1 else max(1, int(self.capacity * self._quota))
        self._owned = NamespaceQuota(share, IDLE_AFTER * self.capacity)
        self._pages: OrderedDict[bytes, _Kept] = OrderedDict()  # oldest first
        self._by_tag: dict[str | None, OrderedDict[bytes, None]] = {}  # keys, oldest first
        self._num_slots = max((slot + 1 for slot, _ in found), default=0)  # number of slots used
        used = {slot for slot, _ in found}
        self._free = [slot for slot in range(self._num_slots) if slot not in used]
        for slot, entry in sorted(found, key=lambda each: each[1].tick):
            if entry.key in self._pages:  # a power failure restored an entry that was erased
                self._forget(entry.key)
            self._add(slot, entry)

    @override
    def __len__(self) -> int:
        return len(self._pages)

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many leading ``keys`` are stored. O(keys)."""
        for num_found, key in enumerate(keys):
            if key not in self._pages:
                return num_found
        return len(keys)

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read a page; return False if it is missing or damaged. O(1).

        A damaged page is dropped. Raises OSError if the disk fails; the page is dropped then, too.
        """
        if key not in self._pages:
            return False
        slot, check, _, _ = self._pages[key]
        is_sound = False
        try:
            is_sound = self._slots.read(slot, into) == check
        finally:
            if not is_sound:
                self._counts["unsound"] += 1
                self._forget(key)
        if is_sound:
            self._use(key)
        return is_sound

    def put(self, key: bytes, tag: bytes, page: memoryview, is_valid: IsValid) -> bool:
        """Store a page if it is still valid after writing; return whether it is stored. O(1).

        Raises OSError if the disk fails or is full; all other pages stay stored.
        """
        if (len(key), len(tag), page.nbytes) != (KEY_BYTES, TAG_BYTES, self._page_bytes):
            raise ValueError("the key, the tag or the page has a wrong length")
        if key in self._pages:
            self._use(key)
            return True
        slot = self._free_slot()
        try:
            check = self._slots.write(slot, page)
            if not is_valid():
                self._counts["given_up"] += 1
                return False
            entry = Entry(key, check, self._next_tick(), tag)
            self._slots.write_entry(slot, entry)
        except OSError as error:
            if error.errno in _FULL and slot == self._num_slots:
                self._stop_growing()
            raise
        if slot == self._num_slots:
            self._num_slots += 1
        else:
            self._free.pop()
        self._add(slot, entry)
        return True

    def _free_slot(self) -> int:
        """Return a slot for a new page: the last free one, else a slot that was never used.

        If the store is full, a page is evicted first.
        """
        if not self._free and not self._can_grow():
            if not self._pages:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._counts["evicted"] += 1
            self._forget(self._victim())
        return self._free[-1] if self._free else self._num_slots

    def _can_grow(self) -> bool:
        if self._num_slots == self.capacity:
            return False
        if self._slots.allocate(self._num_slots):
            return True
        self._stop_growing()  # other processes use the rest of the disk's room
        return False

    def _stop_growing(self) -> None:
        """Limit the capacity to the slots that were used; without any, leave it unchanged."""
        if self._num_slots:
            self.capacity = self._num_slots
            logger.warning(
                "the KV tier on %s cannot grow: its capacity is now %d pages",
                self.medium,
                self.capacity,
            )

    def _victim(self) -> bytes:
        """Return the key of the page to evict next. O(namespaces over quota)."""
        beyond = self._owned.over_quota()
        if not beyond:
            return next(iter(self._pages))
        names = self._owned.most_idle(self._counts["evicted"]) or beyond
        oldest = (next(iter(self._by_tag[name])) for name in names)
        return min(oldest, key=self._tick_of)

    def _tick_of(self, key: bytes) -> int:
        return self._pages[key][2]

    def _add(self, slot: int, entry: Entry) -> None:
        """Add a page to the index as the page used last; its entry must be written."""
        name = entry.tag.hex()
        self._pages[entry.key] = slot, entry.check, entry.tick, entry.tag
        self._by_tag.setdefault(name, OrderedDict())[entry.key] = None
        self._owned.add(name, 1)
        self._owned.use(name, self._counts["evicted"])
        self._tick = entry.tick

    def _use(self, key: bytes) -> None:
        """Record a use of a page, in the index and in the page's entry."""
        slot, check, _, tag = self._pages[key]
        tick, name = self._next_tick(), tag.hex()
        self._pages[key] = slot, check, tick, tag
        self._pages.move_to_end(key)
        self._by_tag[name].move_to_end(key)
        self._owned.use(name, self._counts["evicted"])
        self._slots.write_entry(slot, Entry(key, check, tick, tag))

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def _forget(self, key: bytes) -> None:
        """Drop a page from the index, and erase its entry."""
        self._slots.void(self._drop(key))

    def _drop(self, key: bytes) -> int:
        """Drop a page from the index; return its slot, whose entry the caller must erase."""
        slot, _, _, tag = self._pages.pop(key)
        name = tag.hex()
        self._by_tag[name].pop(key)
        self._owned.add(name, -1)
        if not self._by_tag[name]:
            del self._by_tag[name]
            self._owned.forget(name)
        self._free.append(slot)
        return slot

    def flush(self, tag: bytes | None = None) -> None:
        """Drop the pages of the namespace ``tag``; None: of all namespaces. O(pages)."""
        if tag is None:
            self._adopt([])
            self._slots.clear()
            return
        slots = [self._drop(key) for key in list(self._by_tag.get(tag.hex(), ()))]
        for slot in slots:
            self._slots.void(slot)

    def stats(self) -> Mapping[str, int]:
        """Return the number of lost pages by cause.

        A page was damaged when read, changed while it was copied, or was evicted.
        """
        return dict(self._counts)

    def close(self) -> None:
        """Close the slots; files stay for the next process."""
        self._slots.close()

    def check(self) -> None:
        """Assert that each slot is free or has one page, and that the indices agree. O(n log n)."""
        slots = sorted([slot for slot, _, _, _ in self._pages.values()] + self._free)
        assert slots == list(range(self._num_slots)), "a slot is lost or has two owners"
        assert self._num_slots <= self.capacity, "more slots are used than the store has"
        ticks = [self._tick_of(key) for key in self._pages]
        assert ticks == sorted(set(ticks)), "pages are not in the order of their use"
        by_tag: dict[str | None, list[bytes]] = {}
        for key, (_, _, _, tag) in self._pages.items():
            by_tag.setdefault(tag.hex(), []).append(key)
        assert by_tag == {name: list(keys) for name, keys in self._by_tag.items()}, (
            "the index by namespace does not have exactly the stored pages"
        )
        assert self._owned.num_pages == {name: len(keys) for name, keys in by_tag.items()}
        self._owned.check(by_tag.keys())

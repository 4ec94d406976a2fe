"""Files of a disk store: slabs, which are files of page slots, and an index of the pages.

The index is a header and an entry of 64 bytes for each slot. An entry is valid if its own checksum
is right; a page is valid if the checksum of its bytes equals the checksum in its entry. So damage
and crashes may lose pages but never yield wrong pages, and no write waits for the disk. The index
is not memory-mapped, because on a full or failing disk a write to a mapped file ends the process.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import zlib
from collections.abc import Iterator

from typing_extensions import override

from ..keys import KEY_BYTES, TAG_BYTES
from .slotted_store import Entry, Slots
from .store_folder import INDEX, StoreFolder, refused

logger = logging.getLogger(__name__)

VERSION = 2
LEAST_PAGES = 64
SLAB_BYTES = 256 << 20
BLOCK = 4096  # block size of the file system in bytes; two pages never share a block
_ENTRY = struct.Struct(f"<{KEY_BYTES}sQQ{TAG_BYTES}s")  # the fields of an `Entry`
_CHECK = struct.Struct("<Q")  # checksum of the bytes before it
_RECORD = _ENTRY.size + _CHECK.size  # bytes of an index entry
_VOID = bytes(_RECORD)
_HEADER = struct.Struct("<12sIQQ")  # mark, version, bytes of a page, slots of a slab
_AT_ONCE = 1 << 14  # number of entries to read in one call


class SlabFiles(Slots):
    """`Slots` in the files of one folder. All methods raise OSError if the disk fails."""

    def __init__(
        self,
        folder: StoreFolder,
        page_bytes: int,
        slab_bytes: int,
        *,
        most_bytes: int,
        least_pages: int,
        noun: str,
    ) -> None:
        self.capacity = 0  # until the index is loaded
        self._folder = folder
        self._page_bytes = page_bytes
        self._most_bytes, self._least_pages, self._noun = most_bytes, least_pages, noun
        self._stride = -(-page_bytes // BLOCK) * BLOCK
        self._per_slab = max(1, slab_bytes // self._stride)
        self._header = _header(folder.fingerprint, page_bytes, self._per_slab)
        self._files: dict[str, int] = {}  # descriptors of open files, by name

    def load(self) -> list[tuple[int, Entry]]:
        """Set the capacity to the available room; return the slots with valid entries.

        Files are truncated to the capacity. Damaged entries are dropped, and files of another
        version are emptied, each with a warning. Raises `InvalidRequest` for too little room.
        """
        self.capacity = self._measured()
        self._check_header()
        self._cut()
        self._folder.make_room(0)
        return self._sound_entries()

    def _measured(self) -> int:
        """Return the number of pages that fit. Raises `InvalidRequest` if it is too small."""
        room, per_page = min(self._folder.room(), self._most_bytes), self._stride + _RECORD
        least = BLOCK + self._least_pages * per_page
        if room < least:
            pages = f"{self._least_pages} {self._noun}"
            needed = f"{pages} need {least} bytes, but of the {self._most_bytes} allowed "
            raise refused(self._folder.root, needed + f"{max(0, room)} are left; raise the size")
        return (room - BLOCK) // per_page

    def _check_header(self) -> None:
        index = self._file(INDEX)
        header = os.pread(index, len(self._header), 0)
        if header != self._header:
            if header:
                logger.warning(
                    "%s is damaged or was written by another version: emptying it",
                    self._folder.path,
                )
            self.clear()

    def _cut(self) -> None:
        index = self._file(INDEX)
        os.truncate(index, min(os.fstat(index).st_size, BLOCK + self.capacity * _RECORD))
        for number, path in self._folder.slabs().items():
            size = self._slab_size(number)
            if size <= 0:
                path.unlink()
            elif size < path.stat().st_size:
                os.truncate(path, size)

    def _slab_size(self, number: int) -> int:
        """Return the size of a slab in bytes; 0 or less for a slab beyond the capacity."""
        return min(self._per_slab, self.capacity - number * self._per_slab) * self._stride

    def _sound_entries(self) -> list[tuple[int, Entry]]:
        found, num_damaged = [], 0
        for slot, record in self._records():
            head, check = record[: _ENTRY.size], record[_ENTRY.size :]
            if check == _checksum(head):
                found.append((slot, Entry(*_ENTRY.unpack(head))))
            elif record != _VOID:
                num_damaged += 1
        if num_damaged:
            logger.warning("%s: dropped %d damaged entries", self._folder.path, num_damaged)
        return found

    def _records(self) -> Iterator[tuple[int, bytes]]:
        index, slot = self._file(INDEX), 0
        while data := os.pread(index, _AT_ONCE * _RECORD, BLOCK + slot * _RECORD):
            for start in range(0, len(data), _RECORD):
                yield slot, data[start : start + _RECORD]
                slot += 1

    def clear(self) -> None:
        """Drop all pages: empty the index, then remove the slabs."""
        index = self._file(INDEX)
        os.truncate(index, 0)
        for number, path in self._folder.slabs().items():
            if (slab := self._files.pop(_slab(number), None)) is not None:
                os.close(slab)
            path.unlink()
        _write(index, memoryview(self._header.ljust(BLOCK, b"\0")), 0)

    def allocate(self, slot: int) -> bool:
        """Allocate the slab of a slot that was never used; return whether the disk has room."""
        slab, start = self._place(slot)
        size, wanted = os.fstat(slab).st_size, self._slab_size(slot // self._per_slab)
        if size > start:
            return True
        if not self._folder.make_room(wanted - size):
            return False
        try:
            os.posix_fallocate(slab, 0, wanted)
        except OSError:  # the file system does not support it or is full: then a write will fail
            os.truncate(slab, wanted)
        return True

    @override
    def write(self, slot: int, page: memoryview) -> int:
        slab, start = self._place(slot)
        _write(slab, page, start)
        return zlib.crc32(page)

    def read(self, slot: int, into: memoryview) -> int | None:
        """Read a page; return its checksum, or None if the slab is too short."""
        slab, start = self._place(slot)
        num_read = 0
        while num_read < self._page_bytes:
            count = os.preadv(slab, [into[num_read:]], start + num_read)
            if not count:
                return None
            num_read += count
        return zlib.crc32(into)

    @override
    def write_entry(self, slot: int, entry: Entry) -> None:
        head = _ENTRY.pack(*entry)
        self._write_record(slot, head + _checksum(head))

    @override
    def void(self, slot: int) -> None:
        self._write_record(slot, _VOID)

    def _write_record(self, slot: int, record: bytes) -> None:
        _write(self._file(INDEX), memoryview(record), BLOCK + slot * _RECORD)

    def _place(self, slot: int) -> tuple[int, int]:
        """Return the descriptor of a slot's slab, and the slot's first byte in it."""
        number, place = divmod(slot, self._per_slab)
        return self._file(_slab(number)), place * self._stride

    def _file(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = self._folder.open(name)
        return self._files[name]

    def close(self) -> None:
        """Close all files, and unlock the folder."""
        while self._files:
            os.close(self._files.popitem()[1])
        self._folder.close()


def _slab(number: int) -> str:
    return f"slab-{number}"


def _header(fingerprint: bytes, page_bytes: int, per_slab: int) -> bytes:
    head = _HEADER.pack(b"foretoken kv", VERSION, page_bytes, per_slab) + fingerprint
    return head + _checksum(head)


def _checksum(data: bytes) -> bytes:
    return _CHECK.pack(zlib.crc32(data))


def _write(file: int, data: memoryview, start: int) -> None:
    while data:
        count = os.pwrite(file, data, start)
        if not count:
            raise OSError(errno.EIO, "the disk accepted no data")
        data, start = data[count:], start + count

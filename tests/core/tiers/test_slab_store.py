"""The disk tier: it finds what it kept, and gives no wrong page, whatever happens to its files."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from foretoken.core.errors import InvalidRequest
from foretoken.core.tiers.stores.slab_store import SlabStore
from foretoken.radix_cache.prefix_cache import IDLE_AFTER
from support.slab_writer import (
    FINGERPRINT,
    NUM_PAGES,
    PAGE_BYTES,
    TAG,
    key_of,
    opened,
    page_of,
    writers,
)

SMALL = 200  # bytes of a page
CAPACITY = 64


def size_of(num_pages: int) -> int:
    """Bytes that so many small pages take: a header, then a block and an entry each."""
    return 4096 + num_pages * (4096 + 64)


def small_store(
    root: Path,
    *,
    fingerprint: bytes = FINGERPRINT,
    num_pages: int = CAPACITY,
    quota: float = 1.0,
    page_bytes: int = SMALL,
) -> SlabStore:
    """A store with five pages a slab."""
    size, slab = size_of(num_pages), 5 * 4096
    return SlabStore(root, fingerprint, page_bytes, size, quota=quota, slab_bytes=slab)


def write(store: SlabStore, number: int, tag: bytes, *, is_valid: bool) -> bool:
    page = memoryview(page_of(key_of(number), SMALL))
    return store.put(key_of(number), tag, page, lambda: is_valid)


def put(store: SlabStore, *numbers: int, tag: bytes = TAG) -> None:
    for number in numbers:
        assert write(store, number, tag, is_valid=True)


def gets(store: SlabStore, number: int) -> bool:
    """Whether a page is found; then it must be right."""
    into = memoryview(bytearray(SMALL))
    is_found = store.get(key_of(number), into)
    assert not is_found or bytes(into) == page_of(key_of(number), SMALL)
    return is_found


def kept(store: SlabStore, numbers: range) -> set[int]:
    """Pages that can be read, of those with these numbers."""
    return {number for number in numbers if gets(store, number)}


def folder_of(root: Path, fingerprint: bytes = FINGERPRINT) -> Path:
    return root / fingerprint.hex()


def num_bytes(root: Path) -> int:
    return sum(each.stat().st_size for each in root.rglob("*") if each.is_file())


class NaiveStore:
    """The rules of eviction, as slow as they are short."""

    def __init__(self, quota: float) -> None:
        self.quota = None if quota >= 1 else int(CAPACITY * quota)
        self.tags: OrderedDict[int, bytes] = OrderedDict()
        self.last_used: dict[bytes, int] = {}  # evictions by then
        self.num_evicted = 0

    def use(self, number: int, tag: bytes) -> None:
        if number not in self.tags and len(self.tags) == CAPACITY:
            del self.tags[self._victim()]
            self.num_evicted += 1
        self.tags[number] = tag
        self.tags.move_to_end(number)
        self.last_used[tag] = self.num_evicted

    def _victim(self) -> int:
        sizes = {tag: list(self.tags.values()).count(tag) for tag in self.tags.values()}
        beyond = {tag for tag in sizes if self.quota and sizes[tag] > self.quota and len(sizes) > 1}
        idle = min(sizes, key=lambda tag: self.last_used[tag])
        if beyond and self.num_evicted - self.last_used[idle] > IDLE_AFTER * CAPACITY:
            beyond = {idle}
        return next(number for number, tag in self.tags.items() if not beyond or tag in beyond)


@pytest.mark.parametrize("quota", [1.0, 0.3])
def test_it_keeps_what_a_naive_store_keeps(tmp_path: Path, quota: float) -> None:
    rng, naive, store = random.Random(1), NaiveStore(quota), small_store(tmp_path, quota=quota)
    tags = [bytes([each]) * 8 for each in range(4)]
    for step in range(2_000):
        number = rng.randrange(150)
        tag = tags[number % 4 if step > 500 else number % 3]  # the last one comes late
        match rng.random():
            case low if low < 0.5:
                put(store, number, tag=naive.tags.get(number, tag))
                naive.use(number, naive.tags.get(number, tag))
            case low if low < 0.9:
                assert gets(store, number) == (number in naive.tags)
                if number in naive.tags:
                    naive.use(number, naive.tags[number])
            case low if low < 0.99:
                keys = [key_of(each) for each in range(number, 150)]
                known = [each in naive.tags for each in range(number, 150)]
                assert store.find(keys) == [*known, False].index(False)
            case low if low < 0.995:
                store.flush(tag)
                naive.tags = OrderedDict(each for each in naive.tags.items() if each[1] != tag)
            case _ if quota == 1:  # which namespaces are idle is not known to the next process
                store.close()
                store = small_store(tmp_path, quota=quota)
        store.check()
        assert len(store) == len(naive.tags)
    assert store.stats()["evicted"] or quota == 1
    store.close()


def test_the_next_process_finds_all_pages_in_the_order_of_their_use(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    put(store, *range(CAPACITY))
    assert gets(store, 0)
    store.close()
    store = small_store(tmp_path)
    put(store, 1_000)
    assert kept(store, range(CAPACITY)) == set(range(CAPACITY)) - {1}
    store.close()


def test_a_namespace_beyond_its_share_loses_its_own_pages(tmp_path: Path) -> None:
    store = small_store(tmp_path, quota=0.5)
    put(store, *range(30), tag=b"modest__")
    put(store, *range(100, 300), tag=b"flooding")
    assert kept(store, range(30)) == set(range(30))
    assert kept(store, range(100, 300)) == set(range(266, 300))
    store.close()


def test_a_namespace_that_is_gone_makes_room(tmp_path: Path) -> None:
    store = small_store(tmp_path, quota=0.5)
    put(store, *range(30), tag=b"gone____")
    put(store, *range(100, 100 + (IDLE_AFTER + 2) * CAPACITY), tag=b"flooding")
    assert kept(store, range(30)) == set()
    store.close()


def test_a_flush_empties_one_namespace_or_all_for_good(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    put(store, 1, 2, tag=b"one_____")
    put(store, 3, tag=b"two_____")
    store.flush(b"one_____")
    store.flush(b"unknown_")
    assert kept(store, range(4)) == {3}
    store.close()
    store = small_store(tmp_path)
    assert kept(store, range(4)) == {3}
    store.flush()
    assert (len(store), list(folder_of(tmp_path).glob("slab-*"))) == (0, [])
    put(store, 5)
    store.close()
    store = small_store(tmp_path)
    assert kept(store, range(6)) == {5}
    store.close()


def test_a_page_is_found_only_if_it_was_valid_once_it_was_written(tmp_path: Path) -> None:
    store, page = small_store(tmp_path), bytearray(page_of(key_of(1), SMALL))

    def changes_late() -> bool:
        assert store.find([key_of(1)]) == 0
        page[:] = bytes(SMALL)
        return True

    assert not write(store, 2, TAG, is_valid=False)
    assert store.put(key_of(1), TAG, memoryview(page), changes_late)
    assert kept(store, range(3)) == {1}
    assert store.stats()["given_up"] == 1
    store.check()
    put(store, *range(100, 100 + CAPACITY))
    assert not write(store, 2, TAG, is_valid=False)
    store.check()
    store.close()
    store = small_store(tmp_path)
    assert kept(store, range(100, 100 + CAPACITY)) == set(range(101, 100 + CAPACITY))
    store.close()


def test_pages_are_read_into_and_written_from_the_middle_of_other_memory(tmp_path: Path) -> None:
    store, pool = small_store(tmp_path), np.zeros((3, SMALL), np.uint8)
    pool[1] = 7
    assert store.put(key_of(0), TAG, memoryview(pool[1]), lambda: True)
    pool[1] = 0
    assert store.get(key_of(0), memoryview(pool[2]))
    assert pool.sum(1).tolist() == [0, 0, 7 * SMALL]
    store.close()


def test_lengths_must_be_those_of_all_pages(tmp_path: Path) -> None:
    store, page = small_store(tmp_path), memoryview(bytes(SMALL))
    for key, tag, data in ((b"", TAG, page), (key_of(0), b"", page), (key_of(0), TAG, page[1:])):
        with pytest.raises(ValueError, match="wrong length"):
            store.put(key, tag, data, lambda: True)
    store.close()


# Damage


def overwrite(path: Path, start: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(data)


def filled(root: Path, num_pages: int = 10) -> Path:
    """A folder with pages in slots of their numbers."""
    store = small_store(root)
    put(store, *range(num_pages))
    store.close()
    return folder_of(root)


def test_a_damaged_page_is_found_out_and_forgotten(tmp_path: Path) -> None:
    overwrite(filled(tmp_path) / "slab-1", 4096 + SMALL - 1, b"?")
    store = small_store(tmp_path)
    assert store.find([key_of(6)]) == 1
    assert kept(store, range(10)) == set(range(10)) - {6}
    assert (store.find([key_of(6)]), store.stats()["unsound"], len(store)) == (0, 1, 9)
    store.check()
    store.close()
    store = small_store(tmp_path)
    assert store.find([key_of(6)]) == 0
    put(store, 6)
    assert kept(store, range(10)) == set(range(10))
    store.close()


@pytest.mark.parametrize("byte", [0, 32, 40, 48, 56, 63])
def test_a_damaged_entry_is_lost_with_a_warning(
    tmp_path: Path, byte: int, caplog: pytest.LogCaptureFixture
) -> None:
    index = filled(tmp_path) / "index"
    start = 4096 + 64 * 4 + byte
    overwrite(index, start, bytes([index.read_bytes()[start] ^ 1]))
    store = small_store(tmp_path)
    assert kept(store, range(10)) == set(range(10)) - {4}
    assert [each.getMessage() for each in caplog.records] == [
        f"{index.parent}: dropped 1 damaged entries"
    ]
    store.check()
    store.close()


def test_void_entries_are_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    store = small_store(tmp_path)
    store.flush(TAG)
    put(store, 20)
    store.close()
    store = small_store(tmp_path)
    assert (kept(store, range(21)), caplog.records) == ({20}, [])
    store.check()
    store.close()


@pytest.mark.parametrize("byte", [0, 12, 16, 24, 32, 64])
def test_files_of_another_version_are_emptied_with_a_warning(
    tmp_path: Path, byte: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = filled(tmp_path)
    overwrite(folder / "index", byte, b"\xff\xff")
    store = small_store(tmp_path)
    assert (len(store), list(folder.glob("slab-*"))) == (0, [])
    assert [each.getMessage() for each in caplog.records] == [
        f"{folder} is damaged or was written by another version: emptying it"
    ]
    put(store, 3)
    store.close()
    store = small_store(tmp_path)
    assert kept(store, range(10)) == {3}
    assert len(caplog.records) == 1
    store.close()


def test_pages_of_another_size_are_not_found(tmp_path: Path) -> None:
    filled(tmp_path)
    store = small_store(tmp_path, page_bytes=SMALL + 1)
    assert len(store) == 0
    store.close()


def test_of_two_entries_with_one_key_the_younger_counts(tmp_path: Path) -> None:
    folder = filled(tmp_path, 3)
    old = (folder / "index").read_bytes()[4096 + 64 : 4096 + 128]
    store = small_store(tmp_path)
    store.flush(TAG)
    put(store, 1)  # in slot 2 now
    store.close()
    overwrite(folder / "index", 4096 + 64, old)
    store = small_store(tmp_path)
    store.check()
    assert kept(store, range(3)) == {1}
    store.close()


def test_missing_and_short_slabs_lose_their_pages_alone(tmp_path: Path) -> None:
    folder = filled(tmp_path, 15)
    (folder / "slab-0").unlink()
    os.truncate(folder / "slab-1", 2 * 4096 + 10)
    store = small_store(tmp_path)
    assert kept(store, range(15)) == {5, 6, *range(10, 15)}
    assert store.stats()["unsound"] == 8
    put(store, *range(15))
    assert kept(store, range(15)) == set(range(15))
    store.check()
    store.close()


def test_400_overwrites_give_no_wrong_page(tmp_path: Path) -> None:
    rng, num_found = random.Random(3), 0
    folder = filled(tmp_path, CAPACITY)
    for _ in range(100):
        for path in rng.choices([folder / "index", *sorted(folder.glob("slab-*"))], k=4):
            data = rng.randbytes(rng.randrange(1, 300))
            overwrite(path, rng.randrange(path.stat().st_size - 300), data)
        store = small_store(tmp_path)
        num_found += len(kept(store, range(CAPACITY)))
        store.check()
        put(store, *range(CAPACITY))
        store.close()
    assert 0.5 * 100 * CAPACITY < num_found < 0.99 * 100 * CAPACITY


# Death


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, float], None]]:
    """Let the writing of bytes end: the so manieth call from now on, with a share of its bytes."""
    write, calls = os.pwrite, [10**9, 1.0]

    def dying_write(file: int, data: memoryview, start: int) -> int:
        calls[0] -= 1
        if calls[0] == 0:
            write(file, data[: int(len(data) * calls[1])], start)
            raise Killed
        return write(file, data, start)

    def plan(num_calls: int, share: float) -> None:
        calls[:] = num_calls, share

    monkeypatch.setattr(os, "pwrite", dying_write)
    return plan


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_wherever_writing_ends_no_page_is_wrong_and_one_is_lost(
    tmp_path: Path, killed_at: Callable[[int, float], None], share: float
) -> None:
    """A put into a full store writes thrice: a void entry, the page, its entry."""
    before = filled(tmp_path / "before", CAPACITY).parent
    for num_calls in range(1, 7):
        root = tmp_path / str(num_calls)
        shutil.copytree(before, root)
        store = small_store(root)
        killed_at(num_calls, share)
        with pytest.raises(Killed):
            put(store, 1_000, 1_001)
        store.close()
        store = small_store(root)
        store.check()
        found = kept(store, range(1_002))
        assert len(found) >= CAPACITY - 1
        assert found >= set(range(2, CAPACITY))
        assert (1_000 in found) == (num_calls > 3 or (num_calls, share) == (3, 1.0))
        store.close()


@pytest.mark.slow
def test_200_killed_writers_leave_no_wrong_page_and_all_that_they_kept(tmp_path: Path) -> None:
    rng, last, into = random.Random(5), -1, memoryview(bytearray(PAGE_BYTES))
    with writers(tmp_path) as processes:
        for _ in range(200):
            last = processes.write_and_die(last + 1, rng.randrange(12))
            store = opened(tmp_path)
            store.check()
            found = set()
            for number in range(max(0, last - 2 * NUM_PAGES), last + 3):
                if store.get(key_of(number), into):
                    assert bytes(into) == page_of(key_of(number))
                    found.add(number)
            assert len(found) == len(store)
            assert found >= set(range(max(0, last - NUM_PAGES + 2), last + 1))
            store.close()
    assert last > 5 * 200


# Folders


def test_a_folder_that_another_process_holds_is_refused(tmp_path: Path) -> None:
    with writers(tmp_path) as processes:
        processes.start(0)
        with pytest.raises(
            InvalidRequest, match=r"^--kv-disk .* another process uses it"
        ) as caught:
            opened(tmp_path)
    assert caught.value.param == "kv_disk"


def test_a_folder_is_held_until_its_store_is_closed(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    with pytest.raises(InvalidRequest, match="another process"):
        small_store(tmp_path)
    store.close()
    small_store(tmp_path).close()
    with pytest.raises(OSError, match="the store is closed"):
        put(store, 1)


def refusal(root: Path, **options: int) -> str:
    """The one line with which a folder is refused."""
    with pytest.raises(InvalidRequest) as caught:
        small_store(root, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"--kv-disk {root}: ")
    return text.removeprefix(f"--kv-disk {root}: ")


def test_what_is_no_folder_or_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    assert refusal(tmp_path / "file") == f"{tmp_path}/file is not a folder"
    assert refusal(tmp_path / "file" / "below") == f"{tmp_path}/file/below is not a folder"
    assert "/proc/lock" in refusal(Path("/proc"))
    (tmp_path / "store" / FINGERPRINT.hex() / "index").mkdir(parents=True)
    assert "Is a directory" in refusal(tmp_path / "store")
    assert (tmp_path / "file").read_text() == "text"


def test_a_folder_that_somebody_else_may_have_prepared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    folder_of(tmp_path).symlink_to(tmp_path / "theirs")
    assert "belongs to another user" in refusal(tmp_path)
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_size_below_64_pages_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    assert refusal(tmp_path, num_pages=63) == (
        f"64 pages need {size_of(64)} bytes, but of the {size_of(63)} allowed {size_of(63)} "
        "are left; raise the size"
    )
    store = small_store(tmp_path)
    assert kept(store, range(10)) == set(range(10))
    store.close()


def test_only_the_owner_may_read_what_is_kept(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = filled(tmp_path / "root")
    finally:
        os.umask(before)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()}
    assert modes == dict.fromkeys(["index", "lock", "slab-0", "slab-1"], 0o600)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    folder.chmod(0o777)
    filled(tmp_path / "root")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# Sizes


def test_another_size_keeps_what_lies_within_it(tmp_path: Path) -> None:
    store = small_store(tmp_path, num_pages=100)
    put(store, *range(100))
    store.close()
    store = small_store(tmp_path, num_pages=72)
    store.check()
    assert (store.capacity, kept(store, range(100))) == (72, set(range(72)))
    assert num_bytes(tmp_path) <= size_of(72)
    store.close()
    store = small_store(tmp_path, num_pages=100)
    put(store, *range(72, 100))
    assert kept(store, range(100)) == set(range(100))
    store.close()


def use_folders(root: Path, *names: str, num_pages: int = CAPACITY) -> None:
    """Fill a folder for each name, with room for all, and make the later ones the younger."""
    for age, name in enumerate(names):
        store = small_store(root, fingerprint=name.encode(), num_pages=10 * num_pages)
        put(store, *range(num_pages))
        store.close()
        os.utime(folder_of(root, name.encode()) / "lock", (age, age))


def test_the_oldest_folders_of_others_make_room_and_no_more_of_them(tmp_path: Path) -> None:
    use_folders(tmp_path, "new", "old", "mid")
    for age, name in enumerate(("old", "mid", "new")):
        os.utime(folder_of(tmp_path, name.encode()) / "lock", (age, age))
    for name in ("deadbeef", "notes"):  # none of ours
        (tmp_path / name).mkdir()
        (tmp_path / name / "index").write_text("text")
    store = small_store(tmp_path, num_pages=3 * CAPACITY + 10)
    put(store, 0)
    assert not folder_of(tmp_path, b"old").exists()
    assert folder_of(tmp_path, b"mid").exists()
    put(store, *range(CAPACITY + 20))
    assert not folder_of(tmp_path, b"mid").exists()
    assert folder_of(tmp_path, b"new").exists()
    put(store, *range(3 * CAPACITY + 10))
    assert len(store) == 3 * CAPACITY + 10
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        ["deadbeef", "notes", "lock", FINGERPRINT.hex()]
    )
    store.close()


def test_a_lower_size_removes_folders_of_others_at_once(tmp_path: Path) -> None:
    use_folders(tmp_path, "one", "two")
    small_store(tmp_path, num_pages=CAPACITY + 10).close()
    assert num_bytes(tmp_path) <= size_of(CAPACITY + 10)
    assert folder_of(tmp_path, b"two").exists()


def test_stores_that_are_held_share_the_size(tmp_path: Path) -> None:
    one = small_store(tmp_path, fingerprint=b"one", num_pages=200)
    put(one, *range(100))
    two = small_store(tmp_path, fingerprint=b"two", num_pages=200)
    assert 90 < two.capacity < 100
    put(two, *range(40))
    put(one, *range(200))  # as many as fit beside the other's
    one.check()
    assert len(one) == one.capacity < 165
    assert num_bytes(tmp_path) <= size_of(200)
    assert len(kept(one, range(200))) == len(one)
    put(two, *range(100))
    assert num_bytes(tmp_path) <= size_of(200)
    assert "are" in refusal(tmp_path, num_pages=200)
    one.close()
    two.close()
    three = small_store(tmp_path, num_pages=200)
    assert three.capacity == 200
    three.close()


# A disk that is full or fails


Fails = Callable[[int, int], bool]  # where a call begins, and of how many bytes


def never(start: int, length: int) -> bool:
    return False


class Disk:
    """Fails calls that write or read, as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails_to_write: Fails = never
        self.fails_to_read: Fails = never
        self.error = errno.ENOSPC
        self._write, self._read = os.pwrite, os.preadv
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "preadv", self.preadv)

    def pwrite(self, file: int, data: memoryview, start: int) -> int:
        self._check(self.fails_to_write(start, len(data)))
        return self._write(file, data, start)

    def preadv(self, file: int, buffers: list[memoryview], start: int) -> int:
        self._check(self.fails_to_read(start, len(buffers[0])))
        return self._read(file, buffers, start)

    def _check(self, fails: bool) -> None:
        if fails:
            raise OSError(self.error, os.strerror(self.error))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def no_allocation(file: int, start: int, length: int) -> None:
    raise OSError(errno.EOPNOTSUPP, "not here")


def test_a_file_system_without_allocation_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_allocation)
    store = small_store(tmp_path)
    put(store, *range(CAPACITY))
    assert kept(store, range(CAPACITY)) == set(range(CAPACITY))
    store.close()


def test_of_a_full_disk_what_fits_is_used(
    tmp_path: Path,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_allocation)
    store = small_store(tmp_path)
    put(store, *range(7))
    disk.fails_to_write = lambda start, length: length == SMALL and start == 2 * 4096
    with pytest.raises(OSError, match="No space left"):
        put(store, 7)
    store.check()
    put(store, 7, 8)
    assert kept(store, range(9)) == {*range(2, 9)}
    assert (store.capacity, store.stats()["evicted"]) == (7, 2)
    assert [each.getMessage() for each in caplog.records] == [
        "the KV tier on disk cannot grow: its capacity is now 7 pages"
    ]
    store.check()
    disk.fails_to_write = never
    store.flush()
    assert store.capacity == CAPACITY
    store.close()


def test_a_disk_without_room_for_one_page_is_tried_again(tmp_path: Path, disk: Disk) -> None:
    store = small_store(tmp_path)
    disk.fails_to_write = lambda start, length: length == SMALL
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            put(store, 1)
        store.check()
    disk.fails_to_write = never
    put(store, *range(CAPACITY))
    assert kept(store, range(CAPACITY)) == set(range(CAPACITY))
    store.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("length", [64, SMALL])
def test_a_failed_write_leaves_the_other_pages(
    tmp_path: Path, disk: Disk, error: int, length: int
) -> None:
    """In a full store: voiding an entry, or writing a page, fails."""
    store = small_store(tmp_path)
    put(store, *range(CAPACITY))
    disk.error = error
    disk.fails_to_write = lambda start, each: each == length
    for number in (1_000, 1_001):
        with pytest.raises(OSError, match=os.strerror(error)):
            put(store, number)
        store.check()
    disk.fails_to_write = never
    put(store, 1_002)
    found = kept(store, range(1_003))
    assert found >= {*range(2, CAPACITY), 1_002}
    assert store.capacity == CAPACITY
    store.close()
    store = small_store(tmp_path)
    assert kept(store, range(1_003)) >= found
    store.close()


def test_a_page_that_cannot_be_read_is_forgotten(tmp_path: Path, disk: Disk) -> None:
    store = small_store(tmp_path)
    put(store, *range(3))
    disk.error = errno.EIO
    disk.fails_to_read = lambda start, length: start == 4096
    with pytest.raises(OSError, match="Input/output error"):
        gets(store, 1)
    store.check()
    assert kept(store, range(3)) == {0, 2}
    assert store.stats()["unsound"] == 1
    store.close()


def test_calls_that_move_a_part_of_the_bytes_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, start: write(file, data[:50], start))
    monkeypatch.setattr(os, "preadv", lambda file, to, start: read(file, [to[0][:70]], start))
    store = small_store(tmp_path)
    put(store, 1)
    assert gets(store, 1)
    store.close()

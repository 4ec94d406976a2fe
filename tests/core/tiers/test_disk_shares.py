"""Shares of one disk: a folder for each engine, held until it is closed or its process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.core.errors import InvalidRequest
from foretoken.core.tiers.stores.disk_shares import DiskShare
from support.forked import run_forked
from support.slab_writer import key_of, opened, page_of

SIZE = 9_000


def share(root: Path, num_shares: int = 3) -> DiskShare:
    return DiskShare(root, SIZE, num_shares)


def hold_and_die(root: Path) -> None:
    """End without closing what is held."""
    share(root)


def test_each_takes_the_first_free_folder_and_its_part_of_the_size(tmp_path: Path) -> None:
    shares = [share(tmp_path) for _ in range(3)]
    assert [each.path for each in shares] == [tmp_path / str(number) for number in range(3)]
    assert {each.num_bytes for each in shares} == {3_000}
    with pytest.raises(InvalidRequest, match="other replicas use all of its 3 shares"):
        share(tmp_path)
    shares[1].close()
    shares[1] = share(tmp_path)
    assert shares[1].path == tmp_path / "1"
    for each in shares:
        each.close()


def test_the_end_of_a_process_frees_its_folder(tmp_path: Path) -> None:
    assert run_forked(hold_and_die, tmp_path).returncode == 0
    found = share(tmp_path)
    assert found.path == tmp_path / "0"
    found.close()


def test_a_share_that_becomes_free_is_waited_for(tmp_path: Path) -> None:
    held = share(tmp_path, 1)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        held.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretoken.core.tiers.stores.disk_shares.time.sleep", sleep)
        found = DiskShare(tmp_path, SIZE, 1, wait_seconds=60)
    assert (found.path, len(waits)) == (tmp_path / "0", 1)
    found.close()


def test_fewer_shares_remove_the_pages_of_those_beyond_unless_they_are_held(tmp_path: Path) -> None:
    for number in range(4):
        store = opened(tmp_path / str(number))
        key = key_of(number)
        assert store.put(key, b"\0" * 8, memoryview(page_of(key)), lambda: True)
        store.close()
    (tmp_path / "2" / "mine").write_text("kept")
    first, *others, last = [share(tmp_path, 4) for _ in range(4)]
    for each in (first, *others):
        each.close()
    found = share(tmp_path, 2)
    sizes = [
        sum(each.stat().st_size for each in (tmp_path / str(number)).rglob("slab-*"))
        for number in range(4)
    ]
    assert [size > 0 for size in sizes] == [True, True, False, True]
    assert (tmp_path / "2" / "mine").read_text() == "kept"
    for each in (found, last):
        each.close()


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(InvalidRequest, match=r"^--kv-disk \S+/file/0: \S+ is not a folder$"):
        share(tmp_path / "file")

"""Parts of an update: their limit, when they are dropped, and what killed processes leave."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from foretoken.api.build.updates.held_folder import PREFIX, HeldFolder, remove_left_folders
from foretoken.api.build.updates.new_weights import NewWeights, WeightFolder
from foretoken.api.build.updates.refusal import UpdateConflict, WeightsRefused
from foretoken.api.server.rollouts.staged_update import StagedUpdate

MAX_BYTES = 10


class FakeRollouts:
    """Reads the weights of each update instead of serving them."""

    max_bytes = MAX_BYTES

    def __init__(self) -> None:
        self.contents: list[bytes] = []

    async def update(self, weights: NewWeights, *, version: str | None = None) -> str:
        assert isinstance(weights, WeightFolder)
        self.contents += [(weights.folder / name).read_bytes() for name in weights.sha256]
        return version or "1"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def staged(**options: Any) -> tuple[StagedUpdate, FakeRollouts]:
    rollouts = FakeRollouts()
    return StagedUpdate(rollouts, **options), rollouts  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]


def write_more(folder: Path, data: bytes) -> None:
    (file,) = folder.glob(f"{PREFIX}*/*")
    file.write_bytes(file.read_bytes() + data)


async def test_parts_have_the_limit_of_the_served_files_and_a_refused_part_changes_nothing(
    folder: Path,
) -> None:
    update, rollouts = staged()
    await update.start()
    assert await update.add(b"12345678", 0) == 8
    with pytest.raises(WeightsRefused, match="must not exceed 10") as refused:
        await update.add(b"9ab", 8)
    assert refused.value.param == "update_info.data"
    assert await update.add(b"9a", 8) == MAX_BYTES
    await update.finish("0" * 64, None)
    assert rollouts.contents == [b"123456789a"]
    assert not update.is_open
    assert names(folder) == []


async def test_a_part_that_could_not_be_stored_can_be_sent_again(folder: Path) -> None:
    update, rollouts = staged()
    await update.start()
    await update.add(b"12", 0)
    write_more(folder, b"xxx")  # as a write that ended when the disk was full
    await update.add(b"345", 2)
    await update.finish("0" * 64, None)
    assert rollouts.contents == [b"12345"]


async def test_a_new_start_drops_an_open_update_only_if_it_says_so(folder: Path) -> None:
    update, rollouts = staged()
    await update.start()
    await update.add(b"old", 0)
    with pytest.raises(UpdateConflict, match="drop_open"):
        await update.start()
    await update.start(drops_open=True)
    assert len(names(folder)) == 1
    await update.add(b"new", 0)
    await update.finish("0" * 64, None)
    assert rollouts.contents == [b"new"]


async def test_an_update_without_calls_is_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, loop, remove = asyncio.Event(), asyncio.get_running_loop(), HeldFolder.remove

    def noted(held: HeldFolder) -> None:
        remove(held)
        loop.call_soon_threadsafe(removed.set)

    monkeypatch.setattr(HeldFolder, "remove", noted)
    update, _ = staged(idle_seconds=0.0)
    await update.start()
    await removed.wait()
    assert names(folder) == []
    assert not update.is_open
    with pytest.raises(UpdateConflict, match="no update"):
        await update.add(b"part", 0)
    await update.start()  # a dropped one is not in the way


async def test_each_call_begins_the_idle_time_anew_and_finish_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def noted(*args: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*args))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", noted)
    update, _ = staged(idle_seconds=100.0)
    await update.start()
    await update.add(b"part", 0)
    assert [each.cancelled() for each in timers] == [True, False]
    await update.finish("0" * 64, None)
    assert [each.cancelled() for each in timers] == [True, True]


def test_folders_of_killed_processes_are_removed_and_held_ones_stay(folder: Path) -> None:
    code = (
        "import os, signal\n"
        "from foretoken.api.build.updates.held_folder import HeldFolder\n"
        "held = HeldFolder()\n"
        "(held.path / 'part').write_bytes(b'part')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=_environment(folder), check=False)
    (left,) = folder.iterdir()
    assert (left / "part").exists()
    (folder / f"{PREFIX}link").symlink_to(tmp := folder / "other")
    tmp.mkdir()
    with HeldFolder() as held:
        assert remove_left_folders() == 1
        assert held.path.exists()
        assert not left.exists()
        assert tmp.exists(), "links are not followed"
    assert not held.path.exists()


def test_a_process_that_exits_removes_its_folders(folder: Path) -> None:
    code = (
        "from foretoken.api.build.updates.held_folder import HeldFolder\n"
        "held = HeldFolder()\n"
        "(held.path / 'part').write_bytes(b'part')\n"
    )
    subprocess.run([sys.executable, "-c", code], env=_environment(folder), check=True)
    assert [*folder.iterdir()] == []


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder)}

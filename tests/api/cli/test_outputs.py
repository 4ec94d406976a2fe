"""Output files: whole or not at all, and devices in place."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from foretoken.api.cli import outputs
from foretoken.api.cli.outputs import check_out, write_out
from foretoken.core.errors import ForetokenError, InvalidRequest


def test_a_file_is_replaced_and_no_other_one_stays(tmp_path: Path) -> None:
    file, link = tmp_path / "a.json", tmp_path / "link"
    link.symlink_to(file)
    for text in ("old", "new \ud800"):
        write_out(link, text)
    assert file.read_text() == "new ?"
    assert link.is_symlink()
    assert {*tmp_path.iterdir()} == {file, link}


def test_what_cannot_be_written_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs.os, "replace", full)
    with pytest.raises(ForetokenError, match=r"a\.json: No space left on device"):
        write_out(file, "new")
    assert [*tmp_path.iterdir()] == [file]
    assert file.read_text() == "old"


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    """A rename would replace /dev/null for all programs of the machine."""
    pipe, found = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    check_out(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_out(pipe, "text")
    reader.join(10)
    assert found == ["text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is a folder"):
        check_out(tmp_path)

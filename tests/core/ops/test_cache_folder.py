"""The cache folder: kept for this user, and not used where others could put kernels into it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.core.ops.machine import cache_folder as folders
from foretoken.core.ops.machine.cache_folder import cache_folder, whoever_writes


@pytest.fixture(autouse=True)
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that is asked for; temporary files are beside it."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "asked"))
    folders._trusted.cache_clear()
    yield tmp_path / "asked"
    folders._trusted.cache_clear()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The folder in its place."""
    return tmp_path / "temporary" / f"foretoken-{os.geteuid()}"


def of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process another user than the owner of what it has made, neither of them root."""
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    monkeypatch.setattr(folders, "_ROOT", -1)


def test_a_folder_that_is_missing_is_made_for_this_user_alone(asked: Path, own: Path) -> None:
    old = os.umask(0o002)
    try:
        assert cache_folder() == asked
    finally:
        os.umask(old)
    assert asked.stat().st_mode & 0o777 == 0o700
    assert not own.exists()


def test_without_a_variable_it_is_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORETOKEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "foretoken"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o702])
def test_a_folder_that_others_may_write_is_not_used(
    asked: Path, own: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    asked.mkdir()
    asked.chmod(mode)
    assert cache_folder() == own == cache_folder()
    assert own.stat().st_mode & 0o777 == 0o700
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert line.startswith(
        f"not using {asked} as the cache folder, but {own}: others may write to "
    )


def test_a_folder_of_another_user_is_not_used(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one in its place that the other user was quick to make."""
    asked.mkdir()
    of_another_user(monkeypatch)
    own = asked.parent / "temporary" / f"foretoken-{os.geteuid()}"
    own.mkdir(mode=0o700)
    with pytest.raises(PermissionError, match=r"asked belongs to another user .*, and .*temporary"):
        cache_folder()


def test_a_link_in_its_place_is_not_followed(asked: Path, own: Path, tmp_path: Path) -> None:
    asked.mkdir()
    asked.chmod(0o777)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is a symbolic link"):
        cache_folder()


def test_what_root_wrote_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image has its cache or its packages from root, and the server is another user."""
    monkeypatch.setattr(folders, "_ROOT", tmp_path.stat().st_uid)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    assert whoever_writes(tmp_path) == ""

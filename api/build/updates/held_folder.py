"""HeldFolder: a temporary folder that a later process removes if its own process is killed."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)
PREFIX = "foretoken-update-"


class HeldFolder:
    """A temporary folder of this process, removed by `remove` and when the process exits.

    The process keeps a lock on it. The system releases the lock if the process is killed, and then
    `remove_left_folders` of a later process removes the folder.
    """

    def __init__(self) -> None:
        while True:
            self._folder = TemporaryDirectory(prefix=PREFIX)
            self.path = Path(self._folder.name)
            with suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._lock)
            # Another process removed the folder before it had a lock.

    def remove(self) -> None:
        """Remove the folder and everything in it. Blocking."""
        if self._lock >= 0:
            self._folder.cleanup()
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def remove_left_folders() -> int:
    """Remove this user's folders that killed processes left; return how many. Blocking."""
    num_removed = 0
    for folder in Path(gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process holds or removed it
            num_removed += _remove_if_left(folder)
    if num_removed:
        logger.info("removed %d folders of updates that were not finished", num_removed)
    return num_removed


def _remove_if_left(folder: Path) -> bool:
    """Remove a folder unless a process holds it. Raises OSError if one does."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
    return True

"""Shares of one disk for several engines: DIR/0, DIR/1, ..., each held by one process.

A share is the root of a `StoreFolder`. Its lock ends with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from .store_folder import make_root, refused, refusing, remove_stores

HOLDER = "holder"  # file that the process of a share locks; its stores have their own locks
_POLL_SECONDS = 0.1


class DiskShare:
    """First free share of a disk, held until it is closed or the process ends.

    ``num_bytes`` of the disk are divided evenly among ``num_shares``. Shares with higher numbers,
    left over from a larger ``num_shares``, are emptied unless a process holds them. Waits
    ``wait_seconds`` for a free share: a process may be about to end. Raises `InvalidRequest` for a
    folder that cannot be used, and if no share is free.
    """

    def __init__(
        self, root: Path, num_bytes: int, num_shares: int, *, wait_seconds: float = 0.0
    ) -> None:
        self.num_bytes = num_bytes // num_shares
        with refusing(root):
            self.path, self._lock = _first_free(root, num_shares, time.monotonic() + wait_seconds)
            _empty_beyond(root, num_shares)

    def close(self) -> None:
        """Release the share to other processes."""
        os.close(self._lock)


def _first_free(root: Path, num_shares: int, deadline: float) -> tuple[Path, int]:
    while True:
        for number in range(num_shares):
            path = root / str(number)
            if (lock := _try_hold(path)) is not None:
                return path, lock
        if time.monotonic() >= deadline:
            raise refused(root, f"other replicas use all of its {num_shares} shares (--replicas)")
        time.sleep(_POLL_SECONDS)


def _empty_beyond(root: Path, num_shares: int) -> None:
    for path in root.iterdir():
        is_beyond = path.name.isdecimal() and int(path.name) >= num_shares
        if is_beyond and (path / HOLDER).is_file() and (lock := _try_hold(path)) is not None:
            remove_stores(path)
            os.close(lock)


def _try_hold(path: Path) -> int | None:
    """Return the descriptor that holds a share; None if another process holds it."""
    make_root(path)
    lock = os.open(path / HOLDER, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock

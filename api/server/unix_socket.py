"""The lock on the path of a Unix socket, which a server holds from its start to its end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

SOCKET_MODE = 0o600  # not accessible to other users


@contextlib.contextmanager
def owned(path: Path) -> Iterator[None]:
    """Hold ``PATH.lock`` inside the block, and remove a socket left by a killed server.

    A bound socket that does not listen yet looks like a stale one; the lock distinguishes them.
    Raises OSError, with EADDRINUSE if another server holds the lock.
    """
    lock = path.with_name(f"{path.name}.lock")
    descriptor = _locked(lock)
    try:
        if _is_stale(path):
            path.unlink(missing_ok=True)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def remove(path: Path, ours: os.stat_result) -> None:
    """Remove a socket, unless another file has replaced it."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), ours):
            path.unlink()


def _locked(lock: Path) -> int:
    """Return a locked descriptor of the file. Raises OSError."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, SOCKET_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner may have removed the file after it was opened here.
            if lock.exists() and os.path.samestat(lock.stat(), os.fstat(descriptor)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_stale(path: Path) -> bool:
    """Whether a killed server left this socket; False for other kinds of files."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a busy server would block the connection attempt
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED

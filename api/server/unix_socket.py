"""The path of a Unix socket: one server has it, from before it loads its model to its end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

SOCKET_MODE = 0o600  # other users of the machine have no business here


@contextlib.contextmanager
def owned(path: Path) -> Iterator[None]:
    """Hold ``PATH.lock``, and remove a socket that a killed server left.

    A socket that is bound and does not listen yet looks like such a one; the lock tells them
    apart. Raises OSError, EADDRINUSE where another server holds it.
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
    """Remove a socket, unless another file is there now."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), ours):
            path.unlink()


def _locked(lock: Path) -> int:
    """Return a descriptor of the file, which is locked. Raises OSError."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, SOCKET_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its owner may have ended, and removed it, after it was opened here.
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
        probe.setblocking(False)  # a server that is busy would keep us waiting
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED

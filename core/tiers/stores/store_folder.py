"""Folders of disk stores: one for each fingerprint, below the root that the user names.

The process that uses a folder locks it. One size limits all of them together: folders that no
process holds are removed when another one needs their room, the least recently used first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ...errors import InvalidRequest

INDEX = "index"
LOCK = "lock"  # its time of modification is the last use of the folder
_FINGERPRINT = re.compile("(?:[0-9a-f]{2})+")
_SLAB = re.compile(r"slab-(\d+)")


def refused(root: Path, reason: str) -> InvalidRequest:
    """Return the error for a root or a size that cannot be used, as one line."""
    return InvalidRequest(f"--kv-disk {root}: {reason}", param="kv_disk")


@contextlib.contextmanager
def refusing(root: Path) -> Iterator[None]:
    """Convert an OSError inside the block to the error of `refused`."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise refused(root, f"{error.filename} is not a folder") from None
    except OSError as error:
        raise refused(root, f"{error.strerror} ({error.filename or root})") from None


def make_root(root: Path) -> None:
    """Make the folder of all stores, unless it exists.

    Raises `InvalidRequest` if the folder cannot be used.
    """
    with refusing(root):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(_open(root / LOCK))


def remove_stores(root: Path) -> None:
    """Remove the stores below a root that no process holds. Raises OSError if the disk fails."""
    for each in root.iterdir():
        if _is_store(each) and not _is_held(each):
            _remove(each)


class StoreFolder:
    """Folder of one fingerprint, held by this process until it is closed.

    ``max_bytes`` limits the files of all folders below ``root``. Raises `InvalidRequest` for a root
    that cannot be used, and for a folder that another process holds.
    """

    def __init__(self, root: Path, fingerprint: bytes, max_bytes: int) -> None:
        self.root = root
        self.fingerprint = fingerprint
        self.max_bytes = max_bytes
        self.path = root / fingerprint.hex()
        make_root(root)
        with refusing(root), self._root_locked():
            self._make()
            self._lock = _try_lock(self.path)
        if self._lock is None:
            raise refused(root, "another process uses it for the same model")
        os.utime(self._lock)

    def _make(self) -> None:
        """Make the folder unless it exists; only its owner may read it.

        Its files decide which KV is used, so a folder of another user is refused.
        """
        self.path.mkdir(mode=0o700, exist_ok=True)
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise refused(self.root, f"{self.path.name} in it belongs to another user")
        self.path.chmod(0o700)

    def open(self, name: str) -> int:
        """Return a descriptor of a file in the folder. Raises OSError, also after `close`."""
        if self._lock is None:
            raise OSError("the store is closed")
        return _open(self.path / name)

    def slabs(self) -> dict[int, Path]:
        """Return the existing slabs, by number."""
        found = ((_SLAB.fullmatch(each.name), each) for each in self.path.iterdir())
        return {int(name[1]): path for name, path in found if name is not None}

    def room(self) -> int:
        """Return the bytes that this folder may use: the limit less folders of other processes."""
        with self._root_locked():
            return self.max_bytes - sum(_size(each) for each in self._others(held=True))

    def make_room(self, num_bytes: int) -> bool:
        """Make room for ``num_bytes`` more; return whether they fit.

        Folders that no process holds are removed if necessary.
        """
        with self._root_locked():
            idle = sorted(self._others(held=False), key=lambda each: (each / LOCK).stat().st_mtime)
            used = sum(_size(each) for each in (self.path, *idle, *self._others(held=True)))
            for each in idle:
                if used + num_bytes <= self.max_bytes:
                    break
                used -= _size(each)
                _remove(each)
            return used + num_bytes <= self.max_bytes

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            # if it fails, the folder may be removed earlier than others
            with contextlib.suppress(OSError):
                os.utime(self._lock)
            os.close(self._lock)
            self._lock = None

    def _others(self, *, held: bool) -> list[Path]:
        return [
            each
            for each in self.root.iterdir()
            if each != self.path and _is_store(each) and _is_held(each) == held
        ]

    @contextlib.contextmanager
    def _root_locked(self) -> Iterator[None]:
        """Lock the root inside the block, so that no other process adds or removes folders."""
        lock = _open(self.root / LOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _is_store(folder: Path) -> bool:
    return bool(_FINGERPRINT.fullmatch(folder.name)) and (folder / LOCK).is_file()


def _try_lock(folder: Path) -> int | None:
    """Return the descriptor that holds the lock of a folder; None if another process holds it."""
    lock = _open(folder / LOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _is_held(folder: Path) -> bool:
    lock = _try_lock(folder)
    if lock is not None:
        os.close(lock)
    return lock is None


def _content(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.name == INDEX or _SLAB.fullmatch(each.name)]


def _size(folder: Path) -> int:
    return sum(each.stat().st_size for each in _content(folder))


def _remove(folder: Path) -> None:
    """Remove a store. Its lock file is removed last, because it marks the folder as a store."""
    for each in (*_content(folder), folder / LOCK):
        each.unlink()
    with contextlib.suppress(OSError):  # the folder has a file that is not ours
        folder.rmdir()

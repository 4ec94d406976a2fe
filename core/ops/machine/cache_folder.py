"""The folder of files that are kept between processes.

It has compiled kernels, and a user who can change a library can run code as the user who loads it.
So a folder that other users may write is not used.
"""

from __future__ import annotations

import logging
import os
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_ROOT = 0
_OTHERS_WRITE = 0o022


def cache_folder() -> Path:
    """Return ``FORETOKEN_CACHE``, else foretoken's folder in the user's cache; made if missing.

    If other users may write it, this user's folder in the temporary folder takes its place. Raises
    `OSError` if neither is usable.
    """
    own = os.environ.get("FORETOKEN_CACHE")
    if own:
        return _trusted(Path(own))
    return _trusted(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken")


@cache
def _trusted(asked: Path) -> Path:
    asked.mkdir(parents=True, exist_ok=True, mode=0o700)
    why = whoever_writes(asked)
    if not why:
        return asked
    own = Path(tempfile.gettempdir()) / f"foretoken-{os.geteuid()}"
    own.mkdir(exist_ok=True, mode=0o700)
    if also := f"{own} is a symbolic link" if own.is_symlink() else whoever_writes(own):
        raise PermissionError(f"{why}, and {also}")
    logger.warning("not using %s as the cache folder, but %s: %s", asked, own, why)
    return own


def whoever_writes(path: Path) -> str:
    """Return why users other than this one and root can change a file or folder, or ""."""
    found = path.stat()
    if found.st_uid not in (_ROOT, os.geteuid()):
        return f"{path} belongs to another user ({found.st_uid})"
    if found.st_mode & _OTHERS_WRITE:
        return f"others may write to {path} (chmod go-w)"
    return ""

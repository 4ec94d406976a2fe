"""Files that a command writes at its end: checked before its work, which may take hours."""

from __future__ import annotations

import os
from pathlib import Path

from ...core.errors import InvalidRequest


def check_out(path: Path) -> None:
    """Raise `InvalidRequest` where no file of ``--out`` could be written."""
    folder = path.parent
    if path.is_dir():
        problem = f"{path} is a folder"
    elif not folder.is_dir():
        problem = f"there is no folder {folder}"
    elif not os.access(folder, os.W_OK):
        problem = f"no file can be written to {folder.resolve()}"
    else:
        return
    raise InvalidRequest(f"--out: {problem}", param="out")

"""Checks of output files before a command's work, which may take hours."""

from __future__ import annotations

import os
from pathlib import Path

from ...core.errors import InvalidRequest


def check_out(path: Path, flag: str = "out") -> None:
    """Raise `InvalidRequest` if the file that a flag names cannot be written."""
    folder = path.parent
    if path.is_dir():
        problem = f"{path} is a folder"
    elif not folder.is_dir():
        problem = f"the folder {folder} does not exist"
    elif not os.access(folder, os.W_OK):
        problem = f"the folder {folder.resolve()} is not writable"
    else:
        return
    raise InvalidRequest(f"--{flag}: {problem}", param=flag)

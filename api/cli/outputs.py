"""Output files: checked before a command's work, which may take hours, and written whole."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ...core.errors import ForetokenError, InvalidRequest


def check_out(path: Path, flag: str = "out") -> None:
    """Raise `InvalidRequest` if the file that a flag names cannot be written."""
    folder = path.parent
    if path.is_dir():
        problem = f"{path} is a folder"
    elif _is_special(path):
        return
    elif not folder.is_dir():
        problem = f"the folder {folder} does not exist"
    elif not os.access(folder, os.W_OK):
        problem = f"the folder {folder.resolve()} is not writable"
    else:
        return
    raise InvalidRequest(f"--{flag}: {problem}", param=flag)


def write_out(path: Path, text: str) -> None:
    """Write a file that appears with its whole content, or not at all.

    A device or a pipe, such as /dev/null, is written in place: a rename would replace it. Raises
    `ForetokenError`.
    """
    data = text.encode("utf-8", "replace")  # arguments of a call may have lone surrogates
    try:
        if _is_special(path):
            path.write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise ForetokenError(f"{path}: {error.strerror}") from None


def _is_special(path: Path) -> bool:
    """Whether the path is a device, a pipe or a socket."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _replace(path: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise

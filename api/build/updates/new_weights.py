"""Sources of new weights: a folder of safetensors, or a block of shared memory.

Each says which files the loader shall read, and checks the digests that the trainer gave.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from ....core.model.formats.files import INDEX_FILE, SINGLE_FILE
from .refusal import WeightsRefused

DIGEST = re.compile(r"[0-9a-fA-F]{64}")
BLOCK = re.compile(r"/?[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}")  # a name of POSIX shared memory
SHARED_MEMORY = Path("/dev/shm")  # Linux shows shared memory as files here
NO_DIGESTS: Mapping[str, str] = {}


class NewWeights(Protocol):
    """New weights, which must not change until the update has ended."""

    def checked_files(self) -> Mapping[str, Path]:
        """Check the digests; return the files by their names in a checkpoint. Blocking.

        Raises `WeightsRefused`.
        """

    def named(self, message: str, staged: Path) -> str:
        """Return a message in the trainer's words. ``staged``: folder with links to the files."""


class WeightFolder(NamedTuple):
    """The safetensors of a folder. ``sha256``: digests in hexadecimal, by file name."""

    folder: Path
    sha256: Mapping[str, str] = NO_DIGESTS

    def checked_files(self) -> Mapping[str, Path]:
        """Check the digests; return the files by their names in a checkpoint. Blocking.

        Raises `WeightsRefused`.
        """
        for name, expected in self.sha256.items():
            file = self.folder / name
            if Path(name).name != name or not file.is_file():
                raise WeightsRefused(f"sha256: {self.folder} has no file {name}", param="sha256")
            check_digest(name, file, expected)
        return {file.name: file.absolute() for file in _weight_files(self.folder)}

    def named(self, message: str, staged: Path) -> str:
        """Return a message with the trainer's folder in place of the folder of links."""
        return message.replace(str(staged), str(self.folder))


class SharedWeights(NamedTuple):
    """The bytes of a safetensors file in a block of POSIX shared memory. Linux only.

    ``name``: name of the block. ``size``: number of its bytes. ``sha256``: their digest in
    hexadecimal, if the trainer gave one.
    """

    name: str
    size: int
    sha256: str | None = None

    def checked_files(self) -> Mapping[str, Path]:
        """Check name, size and digest; return the block as a checkpoint's only file. Blocking.

        Raises `WeightsRefused`.
        """
        if sys.platform != "linux":
            raise WeightsRefused("shared_memory needs Linux", param="shared_memory")
        if BLOCK.fullmatch(self.name) is None:
            message = "shared_memory must be a name of 1 to 251 letters, digits, _, - and ."
            raise WeightsRefused(message, param="shared_memory")
        block = SHARED_MEMORY / self.name.removeprefix("/")
        if block.is_symlink() or not block.is_file():
            message = f"there is no shared memory named {self.name}"
            raise WeightsRefused(message, param="shared_memory")
        found = block.stat().st_size
        if found != self.size:
            message = f"the shared memory {self.name} has {found} bytes, not {self.size}"
            raise WeightsRefused(message, param="size")
        if self.sha256 is not None:
            check_digest(f"the shared memory {self.name}", block, self.sha256)
        return {SINGLE_FILE: block}

    def named(self, message: str, staged: Path) -> str:
        """Return a message with the name of the block in place of the link."""
        whole = message.replace(str(staged / SINGLE_FILE), f"the shared memory {self.name}")
        return whole.replace(str(staged), f"the shared memory {self.name}")


def check_digest(name: str, file: Path, expected: str) -> None:
    """Raise `WeightsRefused` if a file does not have the SHA-256 ``expected``. Blocking."""
    if DIGEST.fullmatch(expected) is None:
        message = f"sha256: the digest of {name} must have 64 hexadecimal digits"
        raise WeightsRefused(message, param="sha256")
    try:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise WeightsRefused(f"{name} cannot be read: {error}") from None
    if found != expected.lower():
        message = f"sha256: {name} has the SHA-256 {found}, not {expected.lower()}"
        raise WeightsRefused(message, param="sha256")


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder and their index. Raises `WeightsRefused`."""
    if (folder / INDEX_FILE).is_file():
        return [folder / INDEX_FILE, *sorted(folder.glob("*.safetensors"))]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    raise WeightsRefused(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}", param="path")

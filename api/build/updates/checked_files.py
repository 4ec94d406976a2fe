"""Checks of new weights before anything is changed: checksums, names, shapes, dtypes, values.

The checked folder has the served model's config and links to the new files, so that the usual
loader reads it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from ....core.errors import ModelLoadError
from ....core.model.formats.files import TensorEntry
from ....core.model.formats.safetensors import INDEX_FILE, SINGLE_FILE, TensorFiles
from .refusal import WeightsRefused

CONFIGS = ("config.json", "generation_config.json")
DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class ServedTensors:
    """The served model's folder, with name, dtype and shape of each tensor as it was loaded.

    The configs are kept as well: a trainer may later write to the same folder. Raises
    `ModelLoadError` for a folder that is not in Hugging Face layout.
    """

    def __init__(self, folder: Path) -> None:
        self._configs = {
            name: (folder / name).read_bytes() for name in CONFIGS if (folder / name).exists()
        }
        self.entries: Mapping[str, TensorEntry] = TensorFiles(folder).entries

    @contextmanager
    def checked(self, folder: Path, sha256: Mapping[str, str]) -> Iterator[Path]:
        """Check the weights in ``folder``; yield a folder from which they can be loaded. Blocking.

        ``sha256``: digests in hexadecimal of files in ``folder``, by file name. Raises
        `WeightsRefused`.
        """
        check_digests(folder, sha256)
        with TemporaryDirectory(prefix="foretoken-update-") as name:
            staged = Path(name)
            for config, content in self._configs.items():
                (staged / config).write_bytes(content)
            for file in weight_files(folder):
                (staged / file.name).symlink_to(file.absolute())
            try:
                found = TensorFiles(staged)
                self._check_headers(found.entries)
                _check_values(found)
            except ModelLoadError as error:
                raise WeightsRefused(_unstaged(str(error), staged, folder)) from None
            found.release()
            yield staged

    def _check_headers(self, entries: Mapping[str, TensorEntry]) -> None:
        served = self.entries
        _refuse("the new weights lack tensors", served.keys() - entries.keys())
        _refuse("the served model does not have tensors", entries.keys() - served.keys())
        both = [(name, each, served[name]) for name, each in entries.items()]
        _refuse(
            "tensors have another shape than in the served model",
            (name for name, new, old in both if new.shape != old.shape),
        )
        _refuse(
            "tensors have another dtype than in the served model",
            (name for name, new, old in both if new.dtype != old.dtype),
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder and their index. Raises `WeightsRefused`."""
    if (folder / INDEX_FILE).is_file():
        return [folder / INDEX_FILE, *sorted(folder.glob("*.safetensors"))]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    raise WeightsRefused(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}", param="path")


def check_digests(folder: Path, sha256: Mapping[str, str]) -> None:
    """Raise `WeightsRefused` if a file does not have the given SHA-256, or does not exist."""
    for name, expected in sha256.items():
        if Path(name).name != name or not (folder / name).is_file():
            raise WeightsRefused(f"sha256: {folder} has no file {name}", param="sha256")
        if DIGEST.fullmatch(expected) is None:
            message = f"sha256: the digest of {name} must have 64 hexadecimal digits"
            raise WeightsRefused(message, param="sha256")
        with (folder / name).open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != expected.lower():
            message = f"sha256: {name} has the SHA-256 {found}, not {expected.lower()}"
            raise WeightsRefused(message, param="sha256")


def _check_values(found: TensorFiles) -> None:
    """Raise `WeightsRefused` for tensors with values that are not finite."""
    wrong = []
    for name, entry in found.entries.items():
        if entry.dtype in ("F32", "F16", "BF16"):
            value = found.read(name)
            if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
                wrong.append(name)
    _refuse("tensors have values that are NaN or infinite", wrong)


def _refuse(reason: str, names: Iterable[str]) -> None:
    if found := sorted(names):
        raise WeightsRefused(reason, tensors=found)


def _unstaged(message: str, staged: Path, folder: Path) -> str:
    """Return an error message with the caller's folder in place of the temporary one."""
    return message.replace(str(staged), str(folder))

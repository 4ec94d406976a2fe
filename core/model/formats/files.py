"""Files of models: the GGUF file at a path, and entries of tensors in files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ModelLoadError

GGUF = ".gguf"
SINGLE_FILE = "model.safetensors"  # the only file of weights, or else an index names the files
INDEX_FILE = "model.safetensors.index.json"
_NAMES_SHOWN = 4  # number of names that an error shows
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """File, type and shape of a stored tensor."""

    file: Path
    dtype: str  # type name in the header
    shape: tuple[int, ...]


def shown_names(names: Sequence[str]) -> str:
    """Return the first names and the number of the others, for an error."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file at a path; None for another kind of model.

    For a split file this is its first part. Raises `ModelLoadError` for a folder with several GGUF
    files and no config.json.
    """
    if path.suffix.lower() == GGUF:
        first = gguf_parts(path)[0]
        return first if first.exists() else path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(each for each in path.iterdir() if each.suffix.lower() == GGUF)
    if len({tuple(gguf_parts(each)) for each in files}) > 1:
        names = shown_names([each.name for each in files])
        raise ModelLoadError(f"{path} contains several GGUF files ({names}): name one of them")
    return files[0] if files else None


def gguf_parts(file: Path) -> list[Path]:
    """Return all parts of a split GGUF file, given one of them; for a whole file, the file alone.

    Missing parts are included.
    """
    found = _PART.fullmatch(file.name)
    if found is None:
        return [file]
    numbers = range(1, int(found[3]) + 1)
    names = (f"{found[1]}-{number:05}-of-{found[3]}{file.suffix}" for number in numbers)
    return [file.with_name(name) for name in names] or [file]


def gguf_name(file: Path) -> str:
    """Return the name of a GGUF file without its suffix and part number."""
    found = _PART.fullmatch(file.name)
    return file.stem if found is None else found[1]

"""Files of models: the GGUF file that a path names, and entries of tensors in files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import ModelLoadError

GGUF = ".gguf"
_NAMES_SHOWN = 4  # in an error


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """File, type and shape of a stored tensor."""

    file: Path
    dtype: str  # as the header names it
    shape: tuple[int, ...]


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names, or None where it names something else.

    Raises `ModelLoadError` for a folder with several of them and no config.json.
    """
    if path.suffix.lower() == GGUF:
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(each for each in path.iterdir() if each.suffix.lower() == GGUF)
    if len(files) > 1:
        names = ", ".join(each.name for each in files[:_NAMES_SHOWN])
        raise ModelLoadError(f"{path} contains several GGUF files ({names}): name one of them")
    return files[0] if files else None

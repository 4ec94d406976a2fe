"""A checkpoint: a config and tensors by name, whatever the format of its files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..errors import ModelLoadError
from ..ops.quantize import StoredWeight

if TYPE_CHECKING:
    from .config import DecoderConfig

_NAMES_SHOWN = 4  # in an error
GGUF = ".gguf"


class Checkpoint(Protocol):
    """Tensors by the names of transformers, each read when it is asked for."""

    where: Path
    config: DecoderConfig

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor in the files."""

    @property
    def stored_dtype(self) -> str:
        """Of the matrices: float32, bfloat16 or float16; of quantised ones, what they suit."""

    def read(self, name: str) -> StoredWeight:
        """One tensor, on the CPU, as it is stored. Raises `ModelLoadError`."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint in a folder in Hugging Face layout, in a GGUF file, or in a folder with one.

    Reads headers alone. Raises `ModelLoadError` for files that are missing, damaged or not
    supported.
    """
    file = gguf_file(Path(path))
    if file is not None:
        from .formats.gguf import GgufCheckpoint

        return GgufCheckpoint(file)
    from .formats.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(Path(path))


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


def check_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    *,
    ignored: Collection[str] = (),
) -> None:
    """Compare names and shapes with what a decoder needs. Raises `ModelLoadError`."""
    found = {name for name in checkpoint.shapes if name not in ignored and not _is_derived(name)}
    _refuse(checkpoint, "lacks", sorted(set(expected) - found))
    _refuse(checkpoint, "has unexpected", sorted(found - set(expected)))
    for name, shape in expected.items():
        actual = checkpoint.shapes[name]
        if actual != shape:
            raise ModelLoadError(
                f"{checkpoint.where}: {name} has shape {list(actual)}, but its config "
                f"implies {list(shape)}"
            )


def _refuse(checkpoint: Checkpoint, verb: str, names: list[str]) -> None:
    if not names:
        return
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    raise ModelLoadError(f"{checkpoint.where} {verb} tensors: {shown}{more}")


def _is_derived(name: str) -> bool:
    """Old checkpoints store RoPE's frequencies, which follow from the config."""
    return name.endswith(".rotary_emb.inv_freq")

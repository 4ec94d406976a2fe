"""A checkpoint: tensors by name, whatever the format of the files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

from ...errors import ModelLoadError
from ...ops.quantize import StoredWeight

_NAMES_SHOWN = 4  # in an error

OnRead: TypeAlias = Callable[[str, StoredWeight], StoredWeight]
"""Called with each tensor that is read, by name, before anything is made of it; returns the tensor
to use in its place, which has the same values."""


class Checkpoint(Protocol):
    """Tensors by the names of transformers, each read when it is asked for."""

    where: Path

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor in the files."""

    @property
    def stored_dtype(self) -> str:
        """The matrices' dtype: float32, bfloat16 or float16; bfloat16 for quantised ones."""

    def read(self, name: str) -> StoredWeight:
        """One tensor, on the CPU, as it is stored. Raises `ModelLoadError`."""


def check_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    *,
    ignored: Collection[str] = (),
) -> None:
    """Compare names and shapes with what a decoder needs. Raises `ModelLoadError`."""
    shapes = checkpoint.shapes
    found = {name for name in shapes if name not in ignored and not _is_derived(name)}
    _refuse(checkpoint, "lacks", sorted(set(expected) - found))
    _refuse(checkpoint, "has unexpected", sorted(found - set(expected)))
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ModelLoadError(
                f"{checkpoint.where}: {name} has shape {list(shapes[name])}, but its config "
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

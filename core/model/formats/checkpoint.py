"""A checkpoint: tensors by name, whatever the format of the files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from ...errors import ModelLoadError
from ...ops.quantize import StoredWeight
from .files import shown_names

OnRead: TypeAlias = Callable[[str, StoredWeight], StoredWeight]
"""Called with each tensor that is read, by name, before anything is made of it; returns the tensor
to use in its place, which has the same values."""
Read: TypeAlias = Callable[[str], StoredWeight]
"""Returns a tensor by its name."""


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

    def release(self) -> None:
        """Unmap what was read: until then the process holds the file's pages beside its weights.

        A tensor that is still in use stays valid.
        """


def observed(read: Read, on_read: OnRead) -> Read:
    """Read tensors, and call ``on_read`` with each."""
    return lambda name: on_read(name, read(name))


def check_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    *,
    ignored: Collection[str] = (),
) -> None:
    """Compare names and shapes with what a decoder needs. Raises `ModelLoadError`."""
    shapes = checkpoint.shapes
    found = {name for name in shapes if name not in ignored and not is_derived(name)}
    refuse_names(checkpoint, "lacks", set(expected) - found)
    refuse_names(checkpoint, "has unexpected", found - set(expected))
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise mismatch(checkpoint, name, shapes[name], shape)


def refuse_names(checkpoint: Checkpoint, verb: str, names: Iterable[str]) -> None:
    """Raise `ModelLoadError` if there are names."""
    found = sorted(names)
    if not found:
        return
    raise ModelLoadError(f"{checkpoint.where} {verb} tensors: {shown_names(found)}")


def mismatch(
    checkpoint: Checkpoint, name: str, stored: Sequence[int], expected: Sequence[int]
) -> ModelLoadError:
    """The error to raise about a tensor of another shape than the config's."""
    return ModelLoadError(
        f"{checkpoint.where}: {name} has shape {list(stored)}, but its config implies "
        f"{list(expected)}"
    )


def is_derived(name: str) -> bool:
    """Whether a tensor is of RoPE's frequencies, which old checkpoints store, and which follow from
    the config.
    """
    return name.endswith(".rotary_emb.inv_freq")

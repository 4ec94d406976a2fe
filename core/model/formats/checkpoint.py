"""A checkpoint: tensors by name, independent of the file format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from ...errors import ModelLoadError
from ...ops.quantize import StoredWeight
from .files import shown_names

OnRead: TypeAlias = Callable[[str, StoredWeight], StoredWeight]
"""Called with the name and value of each tensor right after it is read. Returns the tensor to use
instead, which must have the same values."""
Read: TypeAlias = Callable[[str], StoredWeight]
"""Returns a tensor by its name."""


class Checkpoint(Protocol):
    """Tensors by transformers' names, each read on demand."""

    where: Path

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in the files."""

    @property
    def stored_dtype(self) -> str:
        """Dtype of the matrices: float32, bfloat16 or float16; bfloat16 for quantised ones."""

    def read(self, name: str) -> StoredWeight:
        """Return a tensor on the CPU, as it is stored. Raises `ModelLoadError`."""

    def release(self) -> None:
        """Unmap the file pages that were read, which take memory in addition to the weights.

        A tensor that is still in use stays valid.
        """


def observed(read: Read, on_read: OnRead) -> Read:
    """Return a reader that calls ``on_read`` with each tensor."""
    return lambda name: on_read(name, read(name))


def check_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    *,
    ignored: Collection[str] = (),
) -> None:
    """Raise `ModelLoadError` if stored names and shapes differ from those that a decoder needs."""
    shapes = checkpoint.shapes
    found = {name for name in shapes if name not in ignored and not is_derived(name)}
    refuse_names(checkpoint, "lacks", set(expected) - found)
    refuse_names(checkpoint, "has unexpected", found - set(expected))
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise mismatch(checkpoint, name, shapes[name], shape)


def refuse_names(checkpoint: Checkpoint, verb: str, names: Iterable[str]) -> None:
    """Raise `ModelLoadError` if ``names`` is not empty."""
    found = sorted(names)
    if not found:
        return
    raise ModelLoadError(f"{checkpoint.where} {verb} tensors: {shown_names(found)}")


def mismatch(
    checkpoint: Checkpoint, name: str, stored: Sequence[int], expected: Sequence[int]
) -> ModelLoadError:
    """Return the error for a tensor whose shape differs from the shape that the config implies."""
    return ModelLoadError(
        f"{checkpoint.where}: {name} has shape {list(stored)}, but its config implies "
        f"{list(expected)}"
    )


_DERIVED = (
    ".rotary_emb.inv_freq",
    *(
        f".self_attn.{name}"
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    ),
)


def is_derived(name: str) -> bool:
    """Whether a tensor follows from the config, such as RoPE frequencies or fixed decays."""
    return name.endswith(_DERIVED)

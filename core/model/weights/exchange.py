"""Exchange of a decoder's weights: new tensors are copied into the memory of the old ones.

Everything that refers to the old tensors stays valid: structs of the native kernels, heads that
share the embedding, and layers shared with a draft model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import Structure
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...errors import ModelLoadError

Pairs: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""Old tensors with the new tensors that replace their content."""


def pair_tensors(old: object, new: object) -> Pairs:
    """Return each tensor of ``old`` weights with the tensor of ``new`` weights in its place.

    Both must have the same layout, for example as two loads of a checkpoint with equal options, and
    equal numbers outside tensors. Raises `ModelLoadError` if they do not.
    """
    return [(first, second) for _, first, second in named_pairs(old, new)]


def named_pairs(old: object, new: object) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield what `pair_tensors` returns, with the tensor's name in the packed weights.

    The name is a path of fields and of numbers in tuples, such as ``layers.3.mlp.down.weight``.
    """
    yield from _pairs(old, new, "")


@torch.inference_mode()
def copy_tensors(pairs: Pairs) -> None:
    """Copy each new tensor into the old one. No kernel may run meanwhile."""
    for old, new in pairs:
        old.copy_(new)


def _pairs(
    old: Any,  # noqa: ANN401 - any weights
    new: Any,  # noqa: ANN401
    where: str,
) -> Iterator[tuple[str, Tensor, Tensor]]:
    if type(old) is not type(new):
        raise _differs(where)
    if isinstance(old, Tensor):
        if old.shape != new.shape or old.dtype != new.dtype or old.layout != new.layout:
            raise _differs(where)
        yield where, old, new
    elif is_dataclass(old) and not isinstance(old, type):
        for each in fields(old):
            yield from _pairs(
                getattr(old, each.name), getattr(new, each.name), _in(where, each.name)
            )
    elif isinstance(old, tuple | list):
        if len(old) != len(new):
            raise _differs(where)
        for number, (first, second) in enumerate(zip(old, new, strict=True)):
            yield from _pairs(first, second, _in(where, number))
    elif not (callable(old) or isinstance(old, Structure)) and old != new:
        # Functions and structs refer to tensors that are paired elsewhere.
        raise _differs(where)


def _in(where: str, part: str | int) -> str:
    return f"{where}.{part}" if where else str(part)


def _differs(where: str) -> ModelLoadError:
    place = where or "weights"
    return ModelLoadError(
        f"the new weights differ in a layout or a number that cannot be replaced: {place}"
    )

"""The weights of a decoder in 4 bits, beside its own: the model drafts for itself (draft/models).

Norms, biases, the embedding and routers are those of the decoder: a rough copy of the matrices is
all that is added, one at a time, so that nothing else exists twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import TypeAlias, TypeVar

from ..ops.base import DecoderWeights, PackedLinear

_T = TypeVar("_T")
_Copy: TypeAlias = Callable[[PackedLinear], PackedLinear]
_KEPT = ("router", "shared_gate")  # are small, and choose


def rough_weights(weights: DecoderWeights, copy: _Copy) -> DecoderWeights:
    """The weights with ``copy`` of every matrix that may be quantised."""
    return _copied(weights, copy)


def _copied(value: _T, copy: _Copy) -> _T:
    if isinstance(value, PackedLinear):
        return copy(value)
    if type(value) is tuple:
        return tuple(_copied(each, copy) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    names = (field.name for field in fields(value) if field.name not in _KEPT)
    return replace(value, **{name: _copied(getattr(value, name), copy) for name in names})

"""A decoder in 4 bits beside the one of full precision: the model that drafts for itself.

Norms, biases, the embedding and routers are shared with the target. The copy of the matrices is
made from the packed ones, some panels at a time, so nothing else exists twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

from ..config import format_size
from ..errors import ModelLoadError
from ..ops.base import PackedLinear
from ..ops.device import free_memory
from ..ops.native.native_ops import NativeOps
from .decoder import Decoder, OwnDecoder

logger = logging.getLogger(__name__)
_Copy: TypeAlias = Callable[[PackedLinear], PackedLinear]
_KEPT = ("router", "shared_gate")  # are small, and choose
_INSTEAD = "leave out 'self': look-ups, a draft model or a trained head draft for it"
_SHARE = 0.36  # of the bytes of bfloat16 weights, at most: 5 bits a weight, and padding


def rough_decoder(target: Decoder) -> OwnDecoder:
    """Copy a decoder with matrices of 4 bits, for drafts on the same pages.

    Raises `ModelLoadError` where the target has no weights to round, or memory is too small.
    """
    kind = target.config.model_type
    if not isinstance(target, OwnDecoder):
        raise ModelLoadError(
            f"draft 'self' rounds the weights of foretoken's own decoder, and {kind} is computed "
            f"by transformers' modules: {_INSTEAD}"
        )
    ops = target.ops
    if not isinstance(ops, NativeOps):
        raise ModelLoadError(
            f"draft 'self' needs the native kernels on a CPU, and {type(ops).__name__} on "
            f"{target.device} computes: {_INSTEAD}"
        )
    num_bytes = sum(each.weight.nbytes for each in _matrices(target.weights))
    needed, free = int(_SHARE * num_bytes), free_memory(target.device)
    if needed > free:
        raise ModelLoadError(
            f"draft 'self' needs {format_size(needed)} for a copy of the weights in 4 bits, and "
            f"{format_size(free)} are free: {_INSTEAD}"
        )
    try:
        copy = OwnDecoder(target.config, _copied(target.weights, ops.rough_copy), ops)
    except ValueError:
        raise ModelLoadError(
            f"draft 'self' rounds weights of 16 or 32 bits, and those of {kind} are quantised "
            f"already: {_INSTEAD}"
        ) from None
    size = sum(each.weight.nbytes for each in _matrices(copy.weights))
    logger.info("draft 'self': a copy of the weights in 4 bits, %s", format_size(size))
    return copy


def _matrices(value: object) -> list[PackedLinear]:
    """Every matrix that is copied."""
    found: list[PackedLinear] = []

    def note(matrix: PackedLinear) -> PackedLinear:
        found.append(matrix)
        return matrix

    _copied(value, note)
    return found


def _copied(value: Any, copy: _Copy) -> Any:  # noqa: ANN401 - the same type
    """The value with ``copy`` of every matrix in it that may be quantised."""
    if isinstance(value, PackedLinear):
        return copy(value)
    if type(value) is tuple:
        return tuple(_copied(each, copy) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    names = (field.name for field in fields(value) if field.name not in _KEPT)
    return replace(value, **{name: _copied(getattr(value, name), copy) for name in names})

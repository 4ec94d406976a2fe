"""Rough copy: a copy of a decoder with 4-bit matrices, with which the model drafts for itself.

The model's own weights must have 8 bits or more. Norms, biases, the embedding and routers are
shared with the target. The packed matrices are copied a few panels at a time, so no other copy is
in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from ...config import format_size
from ...errors import ModelLoadError
from ...ops.base import RoughOps
from ...ops.machine.device import free_memory
from ...ops.weights import DecoderWeights, PackedLinear
from ..decoder import Decoder, OwnDecoder

logger = logging.getLogger(__name__)
_Copy: TypeAlias = Callable[[PackedLinear], PackedLinear]
_KEPT = ("router", "shared_gate", "gates")  # small matrices, for routing or decays, stay exact
ROUGH_BYTES = 0.625  # bytes per weight: 4 bits, and a 16-bit scale and minimum per 32 weights
_PADDED = 1.15  # factor on the size of a copy, for the padding of panels and groups


class NoRoughCopyError(ModelLoadError):
    """Error for a model of which no rough copy can be made.

    The message completes a sentence that begins with "draft 'self'".
    """


def rough_decoder(
    target: Decoder, *, least_item: int = 1, least_bytes: int = 0, memory_share: float = 1.0
) -> OwnDecoder:
    """Return a copy of a decoder with 4-bit matrices, for drafts on the same pages.

    Raises `NoRoughCopyError` if the target has no weights to round, if a matrix has fewer bytes per
    weight than ``least_item``, if all have fewer than ``least_bytes``, or if the copy would take
    more than ``memory_share`` of the free memory.
    """
    kind = target.config.model_type
    if not isinstance(target, OwnDecoder):
        raise NoRoughCopyError(
            f"rounds the weights of foretoken's own decoder, but {kind} is computed by "
            "transformers' modules"
        )
    if any(mixer.is_divided for layer in target.weights.layers for mixer in layer.mixers):
        raise NoRoughCopyError("cannot be combined with --tp")
    ops = target.ops
    if not isinstance(ops, RoughOps):
        raise NoRoughCopyError(
            "needs the native kernels on a CPU or Triton's on a GPU, not "
            f"{type(ops).__name__} on {target.device}"
        )
    matrices = rounded_matrices(target.weights)
    if any(each.weight.nbytes < least_item * each.num_weights for each in matrices):
        raise NoRoughCopyError(
            "is seldom faster for weights of fewer than 16 bits; --draft self enables it anyway"
        )
    num_bytes = sum(each.weight.nbytes for each in matrices)
    if num_bytes < least_bytes:
        raise NoRoughCopyError(
            f"saves no time: the weights have {format_size(num_bytes)} and fit into CPU caches"
        )
    needed, free = (
        int(_PADDED * ROUGH_BYTES * sum(each.num_weights for each in matrices)),
        free_memory(target.device),
    )
    if needed > memory_share * free:
        of_these = "" if memory_share == 1.0 else f", of which it may use {memory_share:.0%}"
        raise NoRoughCopyError(
            f"needs {format_size(needed)} for a 4-bit copy of the weights, but only "
            f"{format_size(free)} are free{of_these}"
        )
    copy_one = partial(ops.rough_copy, dtype=target.dtype)
    try:
        copy = OwnDecoder(target.config, _copied(target.weights, copy_one), ops)
    except ValueError:
        raise NoRoughCopyError(
            f"needs weights of 8 bits or more, but some of {kind} have fewer"
        ) from None
    size = sum(each.num_bytes for each in rounded_matrices(copy.weights))
    logger.info("draft 'self' uses a 4-bit copy of the weights: %s", format_size(size))
    return copy


def rounded_matrices(weights: DecoderWeights) -> list[PackedLinear]:
    """Return every matrix of a decoder that its rough copy rounds to 4 bits."""
    found: list[PackedLinear] = []

    def note(matrix: PackedLinear) -> PackedLinear:
        found.append(matrix)
        return matrix

    _copied(weights, note)
    return found


def _copied(value: Any, copy: _Copy) -> Any:  # noqa: ANN401 - the same type
    """Return ``value``, with ``copy`` of each matrix in it that may be quantised."""
    if isinstance(value, PackedLinear):
        return copy(value)
    if type(value) is tuple:
        return tuple(_copied(each, copy) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    names = (field.name for field in fields(value) if field.name not in _KEPT)
    return replace(value, **{name: _copied(getattr(value, name), copy) for name in names})

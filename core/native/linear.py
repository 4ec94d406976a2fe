"""NativeLinear: a weight in the layout that linear.c streams (linear.h has the layouts)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.base import PackedLinear
from ..quantize import INT4_GROUP, Quantize, quantize_int4, quantize_int8
from .library import NativeLibrary
from .memory import HugeArena

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_INT8, _INT4 = 2, 3
_ARENA = HugeArena()  # of all weights: small ones share a page


class LinearStruct(ctypes.Structure):
    """``ft_linear_weight`` of linear.h; lends the tensors' memory."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("out_features", ctypes.c_int32),
        ("in_features", ctypes.c_int32),
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, eq=False)
class NativeLinear(PackedLinear):
    """A packed weight; ``bias`` is float32 and, as ``scale``, padded to whole panels."""

    scale: Tensor | None
    out_features: int
    in_features: int
    struct: LinearStruct

    @property
    def num_bytes(self) -> int:
        """Bytes that one call reads of it."""
        tensors = (self.weight, self.bias, self.scale)
        return sum(t.nbytes for t in tensors if t is not None)


def pack_linear(
    library: NativeLibrary, weight: Tensor, bias: Tensor | None, quantize: Quantize = "none"
) -> NativeLinear:
    """Lay out ``[out_features, in_features]``; float32 or bfloat16 unless quantised."""
    lanes, scale = library.lanes, None
    if quantize == "int8":
        values, scale = quantize_int8(weight)
        kind, packed = _INT8, _panels(values.view(torch.uint8) ^ 128, 4, 2 * lanes, fill=128)
    elif quantize == "int4":
        kind, packed = _INT4, _int4_panels(*quantize_int4(weight), 2 * lanes)
    else:
        kind, per_step = _KINDS[weight.dtype], 4 // weight.itemsize
        packed = _panels(weight, per_step, 2 * lanes, fill=0)
    bias, scale = (_padded(t, 2 * lanes) for t in (bias, scale))
    pointers = [t.data_ptr() if t is not None else None for t in (packed, scale, bias)]
    out_features, in_features = weight.shape
    struct = LinearStruct(kind, out_features, in_features, *pointers)
    return NativeLinear(packed, bias, True, scale, out_features, in_features, struct)


def linear(
    library: NativeLibrary, x: Tensor, weight: NativeLinear, dtype: torch.dtype | None = None
) -> Tensor:
    """``[T, in_features] -> [T, out_features]`` in x's dtype, or in the one asked for."""
    x = x.contiguous()
    out = x.new_empty((len(x), weight.out_features), dtype=dtype)
    library.linear(weight.struct, x, out)
    return out


def _panels(weight: Tensor, per_step: int, width: int, *, fill: int) -> Tensor:
    """``[out, in]`` to ``[panels, steps, width, per_step]``."""
    out_features, in_features = weight.shape
    padding = (0, -in_features % per_step, 0, -out_features % width)
    padded = F.pad(weight, padding, value=fill) if any(padding) else weight
    panels = padded.contiguous().view(-1, width, padded.shape[1] // per_step, per_step)
    return _own(panels.transpose(1, 2))


def _int4_panels(values: Tensor, scale: Tensor, width: int) -> Tensor:
    """Nibbles ``[panels, groups, 4, width, 4]`` and scales ``[panels, groups, width]``, joined."""
    missing = -len(values) % width
    values, scale = F.pad(values + 8, (0, 0, 0, missing), value=8), F.pad(scale, (0, 0, 0, missing))
    halves = values.view(torch.uint8).view(-1, width, scale.shape[1], 2, INT4_GROUP // 2)
    nibbles = halves[:, :, :, 0] | halves[:, :, :, 1] << 4
    quads = nibbles.view(-1, width, scale.shape[1], 4, 4).permute(0, 2, 3, 1, 4)
    scales = scale.view(-1, width, scale.shape[1]).transpose(1, 2).contiguous()
    blocks = (-1, scale.shape[1], width * 16), (-1, scale.shape[1], width * 2)
    parts = quads.reshape(blocks[0]), scales.view(torch.uint8).view(blocks[1])
    return _own(torch.cat(parts, dim=2))


def _padded(values: Tensor | None, width: int) -> Tensor | None:
    return None if values is None else F.pad(values.float(), (0, -len(values) % width))


def _own(tensor: Tensor) -> Tensor:
    """A dense copy in huge pages."""
    return _ARENA.empty_like(tensor).copy_(tensor)

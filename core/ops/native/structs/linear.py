"""NativeLinear: a weight in the layout that linear.c streams (linear.h has the layouts)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quantize import (
    GROUP,
    SUPER,
    Quantize,
    QuantizedWeight,
    WeightKind,
    quantize_weight,
)
from ...weights import PackedLinear
from ..library import NativeLibrary
from ..memory import HugeArena

Products: TypeAlias = Literal["bfloat16", "float32"]
"""The instructions for bfloat16 weights: products of pairs, or of widened numbers."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_WIDE_KIND = 6  # of bfloat16 weights, multiplied as float32
_QUANTIZED_KINDS: dict[WeightKind, int] = {
    "int8": 2, "int4": 3, "int4_min": 4, "int8_group": 5, "int4_zero": 7, "int4_k": 8,
    "int5_k": 9, "int6_k": 10, "iq4_nl": 11, "mxfp4": 12, "iq4_xs": 13,
}  # fmt: skip
_ROUNDED_KINDS = (
    *_KINDS.values(),
    _WIDE_KIND,
    *(_QUANTIZED_KINDS[k] for k in ("int8", "int8_group")),
)
_OFFSETS: dict[WeightKind, int] = {
    "int8_group": 128,
    "int4": 8,
    "int6_k": 32,
}  # values are unsigned
_BYTES = ("int8_group", "int5_k", "int6_k")  # kinds whose values lie in bytes
_PER_SUPER = SUPER // GROUP
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
        ("is_rough", ctypes.c_int32),
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
    library: NativeLibrary,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    quantize: Quantize = "none",
    *,
    products: Products = "bfloat16",
) -> NativeLinear:
    """Lay out ``[out_features, in_features]``: float32 or bfloat16, rounded to ``quantize`` where
    that is asked for, or a quantised weight as it is. ``products`` is for bfloat16 weights.
    """
    width, in_features = 2 * library.lanes, _in_features(weight)
    if isinstance(weight, Tensor) and quantize != "none":
        weight = quantize_weight(weight, quantize)
    scale = None
    if isinstance(weight, Tensor):
        kind = _KINDS[weight.dtype]
        if weight.dtype == torch.bfloat16 and products == "float32":
            kind = _WIDE_KIND
        packed = _own(_panels(weight, 4 // weight.itemsize, width, fill=0))
    else:
        kind, packed = _QUANTIZED_KINDS[weight.kind], _own(_quantized_panels(weight, width))
        scale = weight.scale if weight.kind == "int8" else None
    bias, scale = (_padded(t, width) for t in (bias, scale))
    pointers = [t.data_ptr() if t is not None else None for t in (packed, scale, bias)]
    out_features = len(weight if isinstance(weight, Tensor) else weight.values)
    struct = LinearStruct(kind, out_features, in_features, *pointers)
    return NativeLinear(packed, bias, True, scale, out_features, in_features, struct)


def rough_copy(library: NativeLibrary, packed: NativeLinear) -> NativeLinear:
    """The same weight in 4 bits, for activations of 8 bits: for drafts, which need not be exact.

    Takes weights of 8 bits or more; the bias is shared. Raises ValueError for others.
    """
    if packed.struct.kind not in _ROUNDED_KINDS:
        raise ValueError("a weight of fewer than 8 bits has no rough copy")
    num_groups = -(-packed.in_features // GROUP)
    shape = (len(packed.weight), num_groups, 2 * library.lanes * (GROUP // 2 + 4))
    values = _ARENA.empty_like(torch.empty(shape, dtype=torch.uint8, device="meta"))
    library.c.ft_rough_copy(ctypes.byref(packed.struct), values.data_ptr())
    bias = None if packed.bias is None else packed.bias.data_ptr()
    kind = _QUANTIZED_KINDS["int4_min"]
    struct = LinearStruct(
        kind, packed.out_features, packed.in_features, values.data_ptr(), None, bias, is_rough=True
    )
    return NativeLinear(
        values, packed.bias, True, None, packed.out_features, packed.in_features, struct
    )


def _in_features(weight: Tensor | QuantizedWeight) -> int:
    return (weight if isinstance(weight, Tensor) else weight.values).shape[1]


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
    return panels.transpose(1, 2)


def _quantized_panels(weight: QuantizedWeight, width: int) -> Tensor:
    """The layouts of linear.h: values of a panel's group, then its scales, then its minima."""
    if weight.kind == "int8":
        return _panels(weight.values.view(torch.uint8) ^ 128, 4, width, fill=128)
    num_groups = weight.values.shape[1] // GROUP
    offset = _OFFSETS.get(weight.kind, 0)
    unsigned = weight.values.view(torch.uint8)
    unsigned = _rows(unsigned + offset if offset else unsigned, width, offset)
    if weight.kind in _BYTES:
        quads = unsigned.view(-1, width, num_groups, GROUP // 4, 4)
    else:
        halves = unsigned.view(-1, width, num_groups, 2, GROUP // 2)
        joined = halves[:, :, :, 0] | halves[:, :, :, 1] << 4
        quads = joined.view(-1, width, num_groups, GROUP // 8, 4)
    parts = [quads.permute(0, 2, 3, 1, 4).reshape(len(quads), num_groups, -1)]
    factors, numbers = weight.factors, [weight.scale, weight.minimum]
    if weight.kind == "iq4_xs":  # scales of 256 stand together: groups fill whole cache lines
        factors, numbers = (*factors, weight.scale), []
    parts += [_by_group(each, width, num_groups) for each in numbers if each is not None]
    groups = torch.cat(parts, dim=2)
    if not factors:
        return groups
    shared = [_by_group(each, width, num_groups // _PER_SUPER) for each in factors]
    supers = groups.view(len(groups), num_groups // _PER_SUPER, -1)
    return torch.cat((*shared, supers), dim=2)


def _by_group(numbers: Tensor, width: int, num_groups: int) -> Tensor:
    """``[out, groups * n]`` to the bytes of ``[panels, groups, n * width]``."""
    panels = _rows(numbers, width, 0).view(-1, width, num_groups, numbers.shape[1] // num_groups)
    return panels.permute(0, 2, 3, 1).flatten(2).contiguous().view(torch.uint8)


def _rows(values: Tensor, width: int, fill: int) -> Tensor:
    """``values`` [out, ...] with rows of ``fill`` up to whole panels."""
    missing = -len(values) % width
    return F.pad(values, (0, 0, 0, missing), value=fill) if missing else values


def _padded(values: Tensor | None, width: int) -> Tensor | None:
    return None if values is None else F.pad(values.float(), (0, -len(values) % width))


def _own(tensor: Tensor) -> Tensor:
    """A dense copy in huge pages."""
    return _ARENA.empty_like(tensor).copy_(tensor)

"""NativeLinear: a weight in the layout that linear.c streams (linear_weight.h has the layouts)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_void_p
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ...blocks import BlockWeight
from ...quantize import (
    Quantize,
    QuantizedWeight,
    StackedWeight,
    UnpackedWeight,
    WeightKind,
    quantize_weight,
)
from ...weights import PackedLinear
from ..declarations import STRUCTS
from ..library import DTYPES, NativeLibrary, address
from ..memory import HugeArena

Products: TypeAlias = Literal["bfloat16", "float32"]
"""The instructions for bfloat16 weights: products of bfloat16 pairs, or of widened numbers."""
Source: TypeAlias = Tensor | QuantizedWeight

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_WIDE_KIND = 6  # bfloat16 weights, multiplied as float32
_QUANTIZED_KINDS: dict[WeightKind, int] = {
    "int8": 2, "int4": 3, "int4_min": 4, "int8_group": 5, "int4_zero": 7, "int4_k": 8,
    "int5_k": 9, "int6_k": 10, "iq4_nl": 11, "mxfp4": 12, "iq4_xs": 13, "int4_group": 14,
    "int5_group": 15, "int5_min": 16,
}  # fmt: skip
_ROUNDED_KINDS = (
    *_KINDS.values(),
    _WIDE_KIND,
    *(_QUANTIZED_KINDS[k] for k in ("int8", "int8_group")),
)
_APART, _PLAIN = 64, 65  # forms of pack.c; the forms of blocks are ggml's numbers
_ARENA = HugeArena()  # one for all weights, so that small ones share a page


@dataclass(frozen=True, slots=True, eq=False)
class NativeLinear(PackedLinear):
    """A packed weight: ``weight`` is uint8 ``[panels, bytes of a panel]``.

    ``bias`` is float32; ``bias`` and ``scale`` are padded to whole panels. ``others``: rows of
    other kinds, whose outputs follow; ``out_features`` includes them.
    """

    scale: Tensor | None
    out_features: int
    in_features: int
    panel: int  # number of outputs in a panel
    struct: Structure
    others: NativeLinear | None = None

    @property
    def num_weights(self) -> int:
        """Number of weights, padding of panels included."""
        own = len(self.weight) * self.panel * self.in_features
        return own + (0 if self.others is None else self.others.num_weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight that one call reads."""
        tensors = (self.weight, self.bias, self.scale)
        own = sum(t.nbytes for t in tensors if t is not None)
        return own + (0 if self.others is None else self.others.num_bytes)


def pack_linear(
    library: NativeLibrary,
    weight: Source,
    bias: Tensor | None,
    quantize: Quantize = "none",
    *,
    products: Products = "bfloat16",
) -> NativeLinear:
    """Lay out a weight ``[out_features, in_features]``.

    A float32 or bfloat16 weight is rounded to ``quantize`` unless that is "none"; a quantised one
    stays unchanged. ``products`` is for bfloat16 weights.
    """
    in_features = weight.shape[1]
    if isinstance(weight, Tensor) and quantize != "none":
        weight = quantize_weight(weight, quantize)
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    of_kinds = [
        (kind, list(run)) for kind, run in groupby(parts, lambda part: _kind(part, products))
    ]
    packed: NativeLinear | None = None
    stop = weight.shape[0]
    for kind, pieces in reversed(of_kinds):
        num_own = sum(piece.shape[0] for piece in pieces)
        start = stop - num_own
        own_bias = None if bias is None else bias[start:stop]
        packed = _packed(library, kind, pieces, own_bias, in_features, packed)
        stop = start
    assert packed is not None, "the weight has no rows"
    return packed


def _kind(weight: Source, products: Products) -> int:
    if isinstance(weight, QuantizedWeight):
        (kind,) = weight.kinds
        return _QUANTIZED_KINDS[kind]
    is_wide = weight.dtype == torch.bfloat16 and products == "float32"
    return _WIDE_KIND if is_wide else _KINDS[weight.dtype]


def _packed(
    library: NativeLibrary,
    kind: int,
    pieces: Sequence[Source],
    bias: Tensor | None,
    in_features: int,
    others: NativeLinear | None,
) -> NativeLinear:
    """Pack the rows of weights of one kind, followed by ``others``."""
    panel, num_own = 2 * library.lanes, sum(piece.shape[0] for piece in pieces)
    shape = (-(-num_own // panel), library.c.ft_panel_bytes(kind, in_features))
    values = _ARENA.zeros(shape)
    at = 0
    for piece in pieces:
        source, _kept_alive = _source(piece)
        library.c.ft_pack(
            kind, ctypes.byref(source), piece.shape[0], at, in_features, values.data_ptr()
        )
        at += piece.shape[0]
    scale = pieces[0].scale if isinstance(pieces[0], UnpackedWeight) and kind == 2 else None
    bias, scale = (_padded(t, panel) for t in (bias, scale))
    return _linear(kind, values, scale, bias, num_own, in_features, panel, others)


def _linear(
    kind: int,
    values: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    num_own: int,
    in_features: int,
    panel: int,
    others: NativeLinear | None = None,
    *,
    is_rough: bool = False,
) -> NativeLinear:
    out_features = num_own + (0 if others is None else others.out_features)
    struct = STRUCTS.ft_linear_weight(
        kind=kind,
        out_features=out_features,
        in_features=in_features,
        weight=values.data_ptr(),
        scale=address(scale),
        bias=address(bias),
        is_rough=is_rough,
        num_own=num_own,
        others=linear_pointer(others),
    )
    return NativeLinear(values, bias, True, scale, out_features, in_features, panel, struct, others)


def native(weight: PackedLinear) -> NativeLinear:
    """Return ``weight`` typed as a `NativeLinear`."""
    assert isinstance(weight, NativeLinear)
    return weight


def linear_pointer(weight: PackedLinear | None) -> ctypes._Pointer[Structure] | None:
    """Return a pointer to the ``ft_linear_weight`` of a packed weight, or None without one."""
    return None if weight is None else ctypes.pointer(native(weight).struct)


def _source(weight: Source) -> tuple[Structure, object]:
    """Return the ``ft_source`` of a weight, and an object to keep alive while C reads it."""
    if isinstance(weight, BlockWeight):
        rows = weight.addresses
        at = rows.ctypes.data_as(POINTER(c_void_p))
        return STRUCTS.ft_source(form=weight.type.number, rows=at), (rows, weight)
    if isinstance(weight, Tensor):
        values, form, numbers = weight.contiguous(), _PLAIN, {}
    else:
        assert isinstance(weight, UnpackedWeight)
        values, form = weight.values.contiguous(), _PLAIN if weight.kind == "int8" else _APART
        numbers = {} if form == _PLAIN else _numbers(weight)
    source = STRUCTS.ft_source(
        form=form,
        data=values.data_ptr(),
        row_bytes=values.stride(0) * values.itemsize,
        **{name: each.data_ptr() for name, each in numbers.items()},
    )
    return source, (values, numbers)


def _numbers(weight: UnpackedWeight) -> dict[str, Tensor]:
    """Return a weight's scales, minima and factors by their names in ``ft_source``."""
    numbers = (weight.scale, weight.minimum, *weight.factors)
    named = zip(("scale", "minimum", "factor", "min_factor"), numbers, strict=False)
    return {name: each.contiguous() for name, each in named if each is not None}


def rough_copy(library: NativeLibrary, packed: NativeLinear) -> NativeLinear:
    """Return a weight in 4 bits, multiplied by 8-bit activations, for drafts.

    The bias is shared. Raises ValueError for weights of fewer than 8 bits.
    """
    if packed.struct.kind not in _ROUNDED_KINDS:
        raise ValueError("a weight of fewer than 8 bits has no rough copy")
    others = None if packed.others is None else rough_copy(library, packed.others)
    kind = _QUANTIZED_KINDS["int4_min"]
    shape = (len(packed.weight), library.c.ft_panel_bytes(kind, packed.in_features))
    values = _ARENA.zeros(shape)
    library.c.ft_rough_copy(ctypes.byref(packed.struct), values.data_ptr())
    return _linear(
        kind,
        values,
        None,
        packed.bias,
        packed.struct.num_own,
        packed.in_features,
        packed.panel,
        others,
        is_rough=True,
    )


def linear(
    library: NativeLibrary, x: Tensor, weight: NativeLinear, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute ``[T, in_features] -> [T, out_features]`` in ``dtype`` or, if None, x's dtype."""
    x = x.contiguous()
    out = x.new_empty((len(x), weight.out_features), dtype=dtype)
    library.linear(weight.struct, x, out)
    return out


def unpack_rows(
    library: NativeLibrary, weight: NativeLinear, rows: Tensor, out: Tensor, factor: float
) -> None:
    """Unpack the rows ``rows`` [..] of a weight of one grouped kind to ``out`` [.., in_features].

    A row is rounded to the dtype of ``out``, multiplied by ``factor`` and rounded again.
    """
    library.c.ft_unpack_rows(
        ctypes.byref(weight.struct), rows.data_ptr(), rows.numel(), factor, out.data_ptr(),
        DTYPES[out.dtype],
    )  # fmt: skip


def _padded(values: Tensor | None, width: int) -> Tensor | None:
    return None if values is None else F.pad(values.float(), (0, -len(values) % width))

"""Weights as small integers with scales: our own rounding, and what quantised files hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Quantize: TypeAlias = Literal["none", "int8", "int4"]
WeightKind: TypeAlias = Literal[
    "int8", "int4", "int8_group", "int4_min", "int4_zero", "int4_k", "int5_k", "int6_k",
    "iq4_nl", "iq4_xs", "mxfp4",
]  # fmt: skip

GROUP = 32  # neighbours along in_features that share a scale
SUPER = 256  # those whose scales share a factor, where scales are bytes
# Twice the values of E2M1: sign, two bits of exponent, one of mantissa.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_TABLES: dict[WeightKind, tuple[int, ...]] = {
    "iq4_nl": _IQ4,
    "iq4_xs": _IQ4,
    "mxfp4": _E2M1,
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight ``[out_features, in_features]`` of integers and scales, whose value is
    ``values * scale``, plus ``minimum`` where there is one.

    ==============  ===============  ===============================  =======================
    kind            values           scale, minimum                   who makes it
    ==============  ===============  ===============================  =======================
    ``int8``        int8             float32 ``[out]``                ``quantize``, W8A8
    ``int4``        int8 -8..7       float16 ``[out, in / 32]``       ``quantize``
    ``int4_min``    int8 0..15       float16 both, ``[out, in / 32]`` GGUF Q4_0, Q4_1
    ``int8_group``  int8             float16 ``[out, in / 32]``       GGUF Q8_0
    ``int4_zero``   int8 0..15       as ``int4_min``: a zero, which   AWQ, GPTQ, W4A16
                                     is taken from the values
    ``int4_k``      int8 0..15       uint8 both, ``[out, in / 32]``   GGUF Q4_K
    ``int5_k``      int8 0..31       as ``int4_k``                    GGUF Q5_K
    ``int6_k``      int8 -32..31     int8 ``[out, in / 16]``, none    GGUF Q6_K
    ``iq4_nl``      int8 0..15       float16 ``[out, in / 32]``       GGUF IQ4_NL
    ``mxfp4``       int8 0..15       bfloat16 ``[out, in / 32]``      MXFP4
    ``iq4_xs``      int8 0..15       int8 ``[out, in / 32]``          GGUF IQ4_XS
    ==============  ===============  ===============================  =======================

    ``factors``: of those whose scales are bytes, float16 ``[out, in / 256]``: one multiplies the
    scales, and one that multiplies the minima, which are taken from the products. The last three
    are numbers in a table of 16 values: GGUF's, or twice those of E2M1. The native kernels round
    activations to int8 for the first two, to 16 bits for the others. ``in_features`` of an ``int4``
    weight's values is padded to whole groups.
    """

    kind: WeightKind
    values: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    factors: tuple[Tensor, ...] = ()

    def dequantize(self) -> Tensor:
        """The values as float32 ``[out_features, padded in_features]``: one product, one sum."""
        if self.kind == "int8":
            return self.values.float() * self.scale.unsqueeze(1)
        scale, minimum = self._scales()
        table = _TABLES.get(self.kind)
        values = self.values if table is None else torch.tensor(table)[self.values.long()]
        groups = values.float().view(*scale.shape, -1)
        if self.kind == "int4_zero" and minimum is not None:
            groups -= minimum.unsqueeze(2)
            minimum = None
        wide = groups.mul_(scale.unsqueeze(2))
        if minimum is not None:
            wide += minimum.unsqueeze(2)
        return wide.view(len(self.values), -1)

    def _scales(self) -> tuple[Tensor, Tensor | None]:
        """One for each group, and what is added, in float32."""
        scale = self.scale.float()
        minimum = None if self.minimum is None else self.minimum.float()
        if self.factors:
            scale *= _spread(self.factors[0], scale)
            if minimum is not None:
                minimum *= -_spread(self.factors[1], minimum)
        return scale, minimum

    def rows(self, order: Tensor) -> QuantizedWeight:
        """Select the rows ``order`` [num_rows], in that order."""
        minimum = None if self.minimum is None else self.minimum[order]
        factors = tuple(each[order] for each in self.factors)
        return QuantizedWeight(self.kind, self.values[order], self.scale[order], minimum, factors)

    def columns(self, start: int, stop: int) -> QuantizedWeight:
        """Select the columns from ``start`` to ``stop``.

        Raises ValueError where these are not the ends of groups with a scale of their own.
        """
        width = self.values.shape[1]

        def cut(numbers: Tensor) -> Tensor:
            size = width // numbers.shape[1]  # columns that share one of them
            if start % size or stop % size:
                raise ValueError(f"columns {start} to {stop} do not end at groups of {size}")
            return numbers[:, start // size : stop // size].contiguous()

        minimum = None if self.minimum is None else cut(self.minimum)
        scale = self.scale if self.kind == "int8" else cut(self.scale)
        factors = tuple(cut(each) for each in self.factors)
        return QuantizedWeight(self.kind, cut(self.values), scale, minimum, factors)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedStack:
    """Matrices of several experts in one tensor, ``[experts, in_features, out_features]``.

    ``one`` makes that of an expert, ``[out_features, in_features]``: a layer's are gigabytes while
    each value is a byte.
    """

    count: int
    one: Callable[[int], QuantizedWeight]

    def dequantize(self) -> Tensor:
        """Dequantise the weights to float32."""
        return torch.stack([self.one(index).dequantize().T for index in range(self.count)])


StoredWeight: TypeAlias = Tensor | QuantizedWeight | QuantizedStack
"""A tensor of a checkpoint: quantised ones may be as they are stored."""


def _spread(factors: Tensor, numbers: Tensor) -> Tensor:
    """A factor of many groups for each of them."""
    return factors.float().repeat_interleave(numbers.shape[1] // factors.shape[1], dim=1)


def stack(weights: list[QuantizedWeight]) -> QuantizedWeight | None:
    """Rows of several weights of one kind, one below the other; None where kinds differ.

    Q4_K's beside Q5_K's, as files have them in one layer, are of the latter: the same numbers.
    """
    kinds = {each.kind for each in weights}
    if kinds == {"int4_k", "int5_k"}:
        kinds = {"int5_k"}
    if len(kinds) > 1:
        return None
    minima = [each.minimum for each in weights if each.minimum is not None]
    return QuantizedWeight(
        kinds.pop(),
        torch.cat([each.values for each in weights]),
        torch.cat([each.scale for each in weights]),
        torch.cat(minima) if minima else None,
        tuple(torch.cat(parts) for parts in zip(*(each.factors for each in weights), strict=True)),
    )


def quantize_weight(weight: Tensor, kind: Literal["int8", "int4"]) -> QuantizedWeight:
    """Round ``[out_features, in_features]`` to the nearest of int8 by row or int4 by group."""
    return _to_int8(weight.float()) if kind == "int8" else _to_int4(weight.float())


def _to_int8(wide: Tensor) -> QuantizedWeight:
    scale = wide.abs().amax(dim=1) / 127
    values = (wide / _nonzero(scale).unsqueeze(1)).round_()
    return QuantizedWeight("int8", values.to(torch.int8), scale)


def _to_int4(wide: Tensor) -> QuantizedWeight:
    """The value furthest from zero becomes -8, whatever its sign: all 16 levels are used."""
    out_features, in_features = wide.shape
    padded = torch.nn.functional.pad(wide, (0, -in_features % GROUP))
    groups = padded.view(out_features, -1, GROUP)
    furthest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    scale = (furthest / -8).half()
    values = (groups / _nonzero(scale.float()).unsqueeze(2)).round_().clamp_(-8, 7)
    return QuantizedWeight("int4", values.to(torch.int8).view(out_features, -1), scale)


def round_to_levels(wide: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Round float32 ``[out_features, groups * GROUP]`` to 16 levels from a group's least to its
    greatest value: ``int4_min``, with scales and minima of ``dtype``.

    These are rounded before the values, which make up for that.
    """
    groups = wide.view(len(wide), -1, GROUP)
    low, high = groups.aminmax(dim=2)
    minimum = low.to(dtype)
    scale = ((high - minimum.float()) / 15).to(dtype)
    steps = (groups - minimum.float().unsqueeze(2)) / _nonzero(scale.float()).unsqueeze(2)
    values = steps.round_().clamp_(0, 15).to(torch.int8).view(len(wide), -1)
    return QuantizedWeight("int4_min", values, scale, minimum)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)

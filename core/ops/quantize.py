"""Weights as small integers with scales: our own rounding, and the formats of quantised files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

Quantize: TypeAlias = Literal["none", "int8", "int4"]
WeightKind: TypeAlias = Literal[
    "int8", "int4", "int8_group", "int4_group", "int5_group", "int4_min", "int5_min", "int4_zero",
    "int4_k", "int5_k", "int6_k", "iq4_nl", "iq4_xs", "mxfp4",
]  # fmt: skip

GROUP = 32  # neighbours along in_features that share a scale
SUPER = 256  # neighbours whose scales share a factor, if scales are bytes

# Twice the values of E2M1, which has a sign, two bits of exponent and one of mantissa.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_TABLES: dict[WeightKind, tuple[int, ...]] = {
    "iq4_nl": _IQ4,
    "iq4_xs": _IQ4,
    "mxfp4": _E2M1,
}


class QuantizedWeight(ABC):
    """A weight ``[out_features, in_features]`` of small integers with scales."""

    __slots__ = ()

    @property
    @abstractmethod
    def kinds(self) -> frozenset[WeightKind]:
        """Every `WeightKind` among the rows."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """``(out_features, in_features)``, the latter padded to whole groups."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Return the values as float32 ``[out_features, padded in_features]``."""

    @abstractmethod
    def rows(self, order: Tensor) -> QuantizedWeight:
        """Select the rows ``order`` [num_rows], in that order."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> QuantizedWeight:
        """Select the columns from ``start`` to ``stop``.

        Raises ValueError if ``start`` or ``stop`` is inside a group that shares a scale.
        """

    @abstractmethod
    def arrays(self) -> Iterator[Tensor]:
        """Yield the arrays of the weight, for a digest."""

    def above(self, below: QuantizedWeight) -> QuantizedWeight | None:  # noqa: ARG002
        """Return this weight's rows, then the rows of ``below``, as one weight.

        Returns None if the two are stored in different ways.
        """
        return None


@dataclass(frozen=True, slots=True, eq=False)
class UnpackedWeight(QuantizedWeight):
    """Values and scales in separate arrays. A weight is ``values * scale``, plus ``minimum`` if
    there is one.

    ==============  ===============  ===============================  =======================
    kind            values           scale, minimum                   who makes it
    ==============  ===============  ===============================  =======================
    ``int8``        int8             float32 ``[out]``                ``quantize``, W8A8
    ``int4``        int8 -8..7       float16 ``[out, in / 32]``       ``quantize``
    ``int4_group``  int8 -8..7       float16 ``[out, in / 32]``       GGUF Q4_0
    ``int5_group``  int8 -16..15     float16 ``[out, in / 32]``       GGUF Q5_0
    ``int8_group``  int8             float16 ``[out, in / 32]``       GGUF Q8_0
    ``int4_min``    int8 0..15       float16 both, ``[out, in / 32]`` GGUF Q4_1, W4A16
    ``int5_min``    int8 0..31       as ``int4_min``                  GGUF Q5_1
    ``int4_zero``   int8 0..15       as ``int4_min``: a zero, which   AWQ, GPTQ, W4A16
                                     is taken from the values
    ``int4_k``      int8 0..15       uint8 both, ``[out, in / 32]``   GGUF Q4_K
    ``int5_k``      int8 0..31       as ``int4_k``                    GGUF Q5_K
    ``int6_k``      int8 -32..31     int8 ``[out, in / 16]``, none    GGUF Q6_K
    ``iq4_nl``      int8 0..15       float16 ``[out, in / 32]``       GGUF IQ4_NL
    ``mxfp4``       int8 0..15       bfloat16 ``[out, in / 32]``      MXFP4
    ``iq4_xs``      int8 0..15       int8 ``[out, in / 32]``          GGUF IQ4_XS
    ==============  ===============  ===============================  =======================

    ``factors``: float16 ``[out, in / 256]``, for kinds whose scales are bytes: the first multiplies
    the scales, the second the minima, which are then subtracted. Values of the last three kinds
    index a table of 16 numbers: GGUF's, or twice E2M1's. The native kernels round activations to
    int8 for the first two kinds, to 16 bits for the others. ``in_features`` of an ``int4`` weight's
    values is padded to whole groups.
    """

    kind: WeightKind
    values: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    factors: tuple[Tensor, ...] = ()

    @property
    @override
    def kinds(self) -> frozenset[WeightKind]:
        return frozenset((self.kind,))

    @property
    @override
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def dequantize(self) -> Tensor:
        """Return float32 weights ``[out_features, padded in_features]``.

        A weight is computed by one multiplication and at most one addition or subtraction.
        """
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
        """Return each group's scale, and the minimum to add or None, in float32."""
        scale = self.scale.float()
        minimum = None if self.minimum is None else self.minimum.float()
        if self.factors:
            scale *= _spread(self.factors[0], scale)
            if minimum is not None:
                minimum *= -_spread(self.factors[1], minimum)
        return scale, minimum

    @override
    def rows(self, order: Tensor) -> UnpackedWeight:
        minimum = None if self.minimum is None else self.minimum[order]
        factors = tuple(each[order] for each in self.factors)
        return UnpackedWeight(self.kind, self.values[order], self.scale[order], minimum, factors)

    @override
    def columns(self, start: int, stop: int) -> UnpackedWeight:
        width = self.values.shape[1]

        def cut(numbers: Tensor) -> Tensor:
            size = width // numbers.shape[1]  # columns that share a number
            check_columns(start, stop, size)
            return numbers[:, start // size : stop // size].contiguous()

        minimum = None if self.minimum is None else cut(self.minimum)
        scale = self.scale if self.kind == "int8" else cut(self.scale)
        factors = tuple(cut(each) for each in self.factors)
        return UnpackedWeight(self.kind, cut(self.values), scale, minimum, factors)

    @override
    def arrays(self) -> Iterator[Tensor]:
        parts = (self.values, self.scale, self.minimum, *self.factors)
        return (each for each in parts if each is not None)

    @override
    def above(self, below: QuantizedWeight) -> UnpackedWeight | None:
        if not isinstance(below, UnpackedWeight) or below.kind != self.kind:
            return None
        minima = [each for each in (self.minimum, below.minimum) if each is not None]
        return UnpackedWeight(
            self.kind,
            torch.cat((self.values, below.values)),
            torch.cat((self.scale, below.scale)),
            torch.cat(minima) if minima else None,
            tuple(torch.cat(pair) for pair in zip(self.factors, below.factors, strict=True)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight(QuantizedWeight):
    """Rows of several weights, stacked. Adjacent parts are stored in different ways."""

    parts: tuple[QuantizedWeight, ...]

    @property
    @override
    def kinds(self) -> frozenset[WeightKind]:
        return frozenset().union(*(each.kinds for each in self.parts))

    @property
    @override
    def shape(self) -> tuple[int, int]:
        return sum(each.shape[0] for each in self.parts), self.parts[0].shape[1]

    @override
    def dequantize(self) -> Tensor:
        return torch.cat([each.dequantize() for each in self.parts])

    def rows(self, order: Tensor) -> QuantizedWeight:
        """Select the rows ``order`` [num_rows]; each run of rows from one part becomes a part."""
        counts = torch.tensor([each.shape[0] for each in self.parts])
        ends = counts.cumsum(0)
        places = torch.searchsorted(ends, order, right=True)
        within = order - (ends - counts)[places]
        found, at = [], 0
        for place, run in groupby(places.tolist()):
            size = sum(1 for _ in run)
            found.append(self.parts[place].rows(within[at : at + size]))
            at += size
        return stack(found)

    @override
    def columns(self, start: int, stop: int) -> StackedWeight:
        return StackedWeight(tuple(each.columns(start, stop) for each in self.parts))

    @override
    def arrays(self) -> Iterator[Tensor]:
        return (array for each in self.parts for array in each.arrays())


def check_columns(start: int, stop: int, size: int) -> None:
    """Raise ValueError unless ``start`` and ``stop`` are multiples of ``size``."""
    if start % size or stop % size:
        raise ValueError(f"columns {start} to {stop} must start and end at multiples of {size}")


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedStack:
    """Matrices of several experts as one tensor, ``[experts, in_features, out_features]``.

    ``one`` returns the matrix of one expert, ``[out_features, in_features]``. Experts are unpacked
    one at a time: with a byte per value, all experts of a layer would take gigabytes.
    """

    count: int
    one: Callable[[int], QuantizedWeight]

    def dequantize(self) -> Tensor:
        """Return all matrices in float32, ``[experts, in_features, out_features]``."""
        return torch.stack([self.one(index).dequantize().T for index in range(self.count)])


StoredWeight: TypeAlias = Tensor | QuantizedWeight | QuantizedStack
"""A tensor of a checkpoint, quantised or plain."""


def _spread(factors: Tensor, numbers: Tensor) -> Tensor:
    """Return ``factors`` repeated along the columns to the shape of ``numbers``, in float32."""
    return factors.float().repeat_interleave(numbers.shape[1] // factors.shape[1], dim=1)


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return the rows of several weights of the same width as one weight."""
    parts: list[QuantizedWeight] = []
    for weight in weights:
        for part in weight.parts if isinstance(weight, StackedWeight) else (weight,):
            joined = parts[-1].above(part) if parts else None
            parts[-1:] = [*parts[-1:], part] if joined is None else [joined]
    return parts[0] if len(parts) == 1 else StackedWeight(tuple(parts))


def quantize_weight(weight: Tensor, kind: Literal["int8", "int4"]) -> UnpackedWeight:
    """Round ``[out_features, in_features]`` to int8 with a scale per row, or int4 per group."""
    return _to_int8(weight.float()) if kind == "int8" else _to_int4(weight.float())


def _to_int8(wide: Tensor) -> UnpackedWeight:
    scale = wide.abs().amax(dim=1) / 127
    values = (wide / _nonzero(scale).unsqueeze(1)).round_()
    return UnpackedWeight("int8", values.to(torch.int8), scale)


def _to_int4(wide: Tensor) -> UnpackedWeight:
    """Round to int4; a group's value furthest from zero becomes -8, so all 16 levels are used."""
    out_features, in_features = wide.shape
    padded = torch.nn.functional.pad(wide, (0, -in_features % GROUP))
    groups = padded.view(out_features, -1, GROUP)
    furthest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    scale = (furthest / -8).half()
    values = (groups / _nonzero(scale.float()).unsqueeze(2)).round_().clamp_(-8, 7)
    return UnpackedWeight("int4", values.to(torch.int8).view(out_features, -1), scale)


def round_to_levels(wide: Tensor, dtype: torch.dtype) -> UnpackedWeight:
    """Round float32 ``[out_features, groups * GROUP]`` to ``int4_min`` with scales of ``dtype``.

    The 16 levels of a group go from its least to its greatest value. Scales and minima are rounded
    first; the values are then chosen for the rounded ones.
    """
    groups = wide.view(len(wide), -1, GROUP)
    low, high = groups.aminmax(dim=2)
    minimum = low.to(dtype)
    scale = ((high - minimum.float()) / 15).to(dtype)
    steps = (groups - minimum.float().unsqueeze(2)) / _nonzero(scale.float()).unsqueeze(2)
    values = steps.round_().clamp_(0, 15).to(torch.int8).view(len(wide), -1)
    return UnpackedWeight("int4_min", values, scale, minimum)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)

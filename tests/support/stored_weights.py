"""Random weights of every kind that a file holds quantised in groups."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.core.ops.quantize import QuantizedWeight, UnpackedWeight, WeightKind


def stored(kind: WeightKind, shape: tuple[int, int]) -> QuantizedWeight:
    """A weight of this shape, of whole groups."""
    generator = torch.Generator().manual_seed(sum(shape))
    low, high = RANGES[kind]
    values = torch.randint(low, high, shape, generator=generator).to(torch.int8)
    if kind in SUPERS:
        return stored_k(kind, values, generator)
    groups = (shape[0], shape[1] // 32)
    scale = torch.randn(groups, generator=generator).half()
    has_minimum = kind in ("int4_min", "int5_min")
    minimum = torch.randn(groups, generator=generator).half() if has_minimum else None
    if kind == "int4_zero":
        minimum = torch.randint(0, 17, groups, generator=generator).half()
    if kind == "mxfp4":
        scale = torch.exp2(torch.randint(-9, 9, groups, generator=generator)).bfloat16()
    return UnpackedWeight(kind, values, scale, minimum)


def stored_k(kind: WeightKind, values: Tensor, draw: torch.Generator) -> QuantizedWeight:
    """Scales in bytes, and what eight groups share."""
    out, columns = values.shape
    factors = torch.randn(2, out, columns // 256, generator=draw).half()
    if kind == "int6_k":
        scale = torch.randint(-128, 128, (out, columns // 16), generator=draw).to(torch.int8)
        return UnpackedWeight(kind, values, scale, None, (factors[0],))
    if kind == "iq4_xs":
        scale = torch.randint(-32, 32, (out, columns // 32), generator=draw).to(torch.int8)
        return UnpackedWeight(kind, values, scale, None, (factors[0],))
    scale, minimum = torch.randint(0, 64, (2, out, columns // 32), generator=draw).to(torch.uint8)
    return UnpackedWeight(kind, values, scale, minimum, (factors[0], factors[1]))


RANGES: dict[WeightKind, tuple[int, int]] = {
    "int4": (-8, 8),
    "int4_group": (-8, 8),
    "int4_min": (0, 16),
    "int5_group": (-16, 16),
    "int5_min": (0, 32),
    "int8_group": (-128, 128),
    "int4_zero": (0, 16),
    "int4_k": (0, 16),
    "int5_k": (0, 32),
    "int6_k": (-32, 32),
    "iq4_nl": (0, 16),
    "mxfp4": (0, 16),
    "iq4_xs": (0, 16),
}
SUPERS = ("int4_k", "int5_k", "int6_k", "iq4_xs")
GROUPED: tuple[WeightKind, ...] = tuple(RANGES)


def fitting(kind: WeightKind, shape: tuple[int, int]) -> tuple[int, int]:
    """The shape, or one of 512 or 256 columns for the kinds that take whole super-groups."""
    return (shape[0], 512 if shape[1] > 64 else 256) if kind in SUPERS else shape

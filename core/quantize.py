"""Weights as int8 or int4 with scales, symmetric, rounded to nearest."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Quantize: TypeAlias = Literal["none", "int8", "int4"]

INT4_GROUP = 32  # neighbours along in_features that share a scale


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[out, in]`` to int8 ``[out, in]`` and float32 scales ``[out]``, one per output channel."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1) / 127
    values = (wide / _nonzero(scale).unsqueeze(1)).round_()
    return values.to(torch.int8), scale


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[out, in]`` to int8 of -8 to 7, ``in`` padded to groups, and float16 ``[out, groups]``.

    The value furthest from zero becomes -8, whatever its sign, so that all 16 levels are used.
    """
    out_features, in_features = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -in_features % INT4_GROUP))
    groups = padded.view(out_features, -1, INT4_GROUP)
    furthest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    scale = (furthest / -8).half()
    values = (groups / _nonzero(scale.float()).unsqueeze(2)).round_().clamp_(-8, 7)
    return values.to(torch.int8).view(out_features, -1), scale


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)

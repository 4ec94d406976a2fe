"""TiledLinear: a weight for `linear_kernel`, plain or as int8, and its call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources as OutOfResources  # to whoever tries launches

from ...base import PackedLinear
from ...quantize import quantize_weight
from ..chain import chained
from .linear import linear_kernel
from .tiles import FEW_COLUMNS, LinearLaunch, LinearTiles, linear_launch, linear_tiles


@dataclass(frozen=True, slots=True, eq=False)
class TiledLinear(PackedLinear):
    """``weight`` [out_features, in_features] of the activations' dtype, or int8 in pairs.

    A pair is an int16 with an input of a step's first half below and of its second half above, so
    that a tensor core takes both halves as they come: [out_features, steps * inner / 2].
    """

    scale: Tensor | None  # [out_features] float32
    tiles: LinearTiles
    arrived: Tensor  # pieces per tile of the output: zeros but within a call, one call at a time


def pack_tiled(weight: Tensor, bias: Tensor | None, *, is_int8: bool = False) -> TiledLinear:
    """Lay out ``[out_features, in_features]``, quantised per output if asked."""
    out_features, in_features = weight.shape
    tiles = linear_tiles(out_features, in_features, weight.dtype, is_int8=is_int8)
    items, scale = weight.contiguous(), None
    if is_int8:
        quantized = quantize_weight(weight, "int8")
        items, scale = _pairs(quantized.values, tiles.inner), quantized.scale
    num_counts = -(-out_features // FEW_COLUMNS)
    arrived = torch.zeros(num_counts, dtype=torch.int32, device=weight.device)
    return TiledLinear(items, bias, True, scale, tiles, arrived)


def tiled_linear(
    x: Tensor,
    weight: TiledLinear,
    dtype: torch.dtype | None = None,
    launch: LinearLaunch | None = None,
) -> Tensor:
    """``[T, in_features] -> [T, out_features]`` in x's dtype, or in the one asked for.

    A row's bits are the same in any place beside any number of others, however it is launched.
    """
    (num_rows, in_features), out_features, tiles = x.shape, len(weight.weight), weight.tiles
    launch = launch or linear_launch(tiles, out_features, num_rows)
    out = x.new_empty((num_rows, out_features), dtype=dtype)
    parts = out
    if launch.is_apart:
        parts = x.new_empty((tiles.pieces, num_rows, out_features), dtype=torch.float32)
    linear_kernel[launch.grid](
        x, weight.weight, x if weight.scale is None else weight.scale,
        x if weight.bias is None else weight.bias, out, parts, weight.arrived,
        num_rows, tiles.pieces, in_features, out_features,
        **linear_constants(tiles, launch, in_features, has_bias=weight.bias is not None),
        **linear_options(launch), **chained(num_rows, x.device),
    )  # fmt: skip
    return out


def _pairs(values: Tensor, inner: int) -> Tensor:
    """int8 ``[out, in]`` to int16 ``[out, steps * inner / 2]``, zeros behind the last input."""
    padded = F.pad(values, (0, -values.shape[1] % inner))
    halves = padded.view(len(values), -1, 2, inner // 2).transpose(2, 3).contiguous()
    return halves.view(torch.int16).view(len(values), -1)


def linear_constants(
    tiles: LinearTiles, launch: LinearLaunch, in_features: int, *, has_bias: bool
) -> dict[str, int | str]:
    """Constants that `linear_kernel` is compiled with."""
    return {
        "TILE_ROWS": launch.rows,
        "TILE_OUT": launch.columns,
        "TILE_IN": tiles.inner,
        "IS_CUT": tiles.pieces > 1,
        "IS_APART": launch.is_apart,
        "NEIGHBOURS": launch.neighbours,
        "IS_EVEN": in_features % tiles.inner == 0,
        "IS_INT8": tiles.is_int8,
        "HAS_BIAS": has_bias,
        "POLICY": launch.policy,
    }


def linear_options(launch: LinearLaunch) -> dict[str, int]:
    """Options to compile `linear_kernel` with: fused additions, as tensor cores add float32."""
    return {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": True,
    }

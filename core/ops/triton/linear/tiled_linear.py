"""TiledLinear: a weight for `linear_kernel`, plain, as int8 or in 4 bits, and its call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources as OutOfResources  # for benchmarks of launches
from typing_extensions import override

from ...quantize import GROUP, quantize_weight, round_to_levels
from ...weights import PackedLinear
from ..chain import chained
from .linear import linear_kernel
from .tiles import (
    FEW_COLUMNS,
    ROUGH_STEP,
    LinearLaunch,
    LinearTiles,
    linear_launch,
    linear_tiles,
)

ROUNDED_AT_ONCE = 2**24  # numbers of a weight, to limit a rough copy's temporary memory


@dataclass(frozen=True, slots=True, eq=False)
class TiledLinear(PackedLinear):
    """``weight`` [out_features, in_features] in the activations' dtype, or quantised.

    A quantised weight is int16 ``[out_features, steps * inner * bits / 16]``. With int8 a word has
    an input from a step's first half in its low byte and one from the second half in its high byte,
    so that tensor cores need no reordering. With 4 bits a word has one input from each quarter of a
    step; a quarter is a group.
    """

    # [out_features] float32; with 4 bits [steps, 4, out_features] words, one per group, with its
    # scale in the low half and its minimum in the high half, in the activations' dtype.
    scale: Tensor | None
    tiles: LinearTiles
    arrived: Tensor  # arrived pieces per output tile; zeros outside of a call, one call at a time

    @property
    @override
    def num_weights(self) -> int:
        words = self.weight.numel()
        return words * 16 // self.tiles.bits if self.tiles.bits else words

    @property
    @override
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.scale is None else self.scale.nbytes)


def pack_tiled(weight: Tensor, bias: Tensor | None, *, is_int8: bool = False) -> TiledLinear:
    """Lay out ``[out_features, in_features]``; with ``is_int8`` quantised per output."""
    out_features, in_features = weight.shape
    tiles = linear_tiles(out_features, in_features, weight.dtype, bits=8 if is_int8 else 0)
    items, scale = weight.contiguous(), None
    if is_int8:
        quantized = quantize_weight(weight, "int8")
        items, scale = _pairs(quantized.values, tiles.inner), quantized.scale
    return TiledLinear(items, bias, True, scale, tiles, _no_arrivals(items))


def rough_copy(packed: PackedLinear, dtype: torch.dtype) -> TiledLinear:
    """Return a weight in 4 bits, for drafts with activations of ``dtype``; the bias is shared.

    Raises ValueError for weights of fewer than 8 bits.
    """
    rows = max(1, ROUNDED_AT_ONCE * len(packed.weight) // packed.num_weights)
    parts = [_rounded(part, dtype) for part in _plain_parts(packed, rows)]
    words = torch.cat([each for each, _ in parts])
    numbers = torch.cat([each for _, each in parts], dim=2)
    in_features = ROUGH_STEP * len(numbers)
    tiles = linear_tiles(len(words), in_features, dtype, bits=4)
    return TiledLinear(words, packed.bias, True, numbers, tiles, _no_arrivals(words))


def _plain_parts(packed: PackedLinear, num_rows: int) -> Iterator[Tensor]:
    """Yield the weight in float32, ``num_rows`` rows at a time. Raises ValueError for 4 bits."""
    bits = packed.tiles.bits if isinstance(packed, TiledLinear) else 0
    if bits == 4:
        raise ValueError("a weight of fewer than 8 bits has no rough copy")
    for start in range(0, len(packed.weight), num_rows):
        rows = slice(start, start + num_rows)
        part = packed.weight[rows]
        if isinstance(packed, TiledLinear) and packed.scale is not None:
            yield _from_pairs(part, packed.tiles.inner) * packed.scale[rows].unsqueeze(1)
        else:
            yield part.float()


def _rounded(wide: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise float32 ``[n, in_features]`` to 4 bits: `TiledLinear`'s weight and scale."""
    wide = F.pad(wide, (0, -wide.shape[1] % ROUGH_STEP))
    rounded = round_to_levels(wide, dtype)
    assert rounded.minimum is not None
    quarters = rounded.values.to(torch.int16).view(len(wide), -1, 4, GROUP)
    shifts = torch.arange(0, 16, 4, dtype=torch.int16, device=wide.device).view(4, 1)
    words = (quarters << shifts).sum(2, dtype=torch.int16).flatten(1)
    pairs = torch.stack((rounded.scale, rounded.minimum), dim=-1).to(dtype)  # [n, groups, 2]
    word = torch.int64 if dtype.itemsize == 4 else torch.int32
    numbers = pairs.view(word).view(len(wide), -1, 4).permute(1, 2, 0)
    return words, numbers.contiguous()


def _no_arrivals(items: Tensor) -> Tensor:
    num_counts = -(-len(items) // FEW_COLUMNS)
    return torch.zeros(num_counts, dtype=torch.int32, device=items.device)


def tiled_linear(
    x: Tensor,
    weight: TiledLinear,
    dtype: torch.dtype | None = None,
    launch: LinearLaunch | None = None,
) -> Tensor:
    """Compute ``[T, in_features] -> [T, out_features]`` in ``dtype`` or, if None, x's dtype.

    A row's bits do not depend on its index, on the number of rows or on the launch.
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
    """Pack int8 ``[out, in]`` into int16 ``[out, steps * inner / 2]``, padded with zeros."""
    padded = F.pad(values, (0, -values.shape[1] % inner))
    halves = padded.view(len(values), -1, 2, inner // 2).transpose(2, 3).contiguous()
    return halves.view(torch.int16).view(len(values), -1)


def _from_pairs(words: Tensor, inner: int) -> Tensor:
    """Unpack pairs of int8 to float32 ``[out, steps * inner]``."""
    halves = words.contiguous().view(torch.int8).view(len(words), -1, inner // 2, 2)
    return halves.transpose(2, 3).flatten(1).float()


def linear_constants(
    tiles: LinearTiles, launch: LinearLaunch, in_features: int, *, has_bias: bool
) -> dict[str, int | str]:
    """Return the constants that `linear_kernel` is compiled with."""
    return {
        "TILE_ROWS": launch.rows,
        "TILE_OUT": launch.columns,
        "TILE_IN": tiles.inner,
        "IS_CUT": tiles.pieces > 1,
        "IS_APART": launch.is_apart,
        "NEIGHBOURS": launch.neighbours,
        "IS_EVEN": in_features % tiles.inner == 0,
        "BITS": tiles.bits,
        "HAS_BIAS": has_bias,
        "POLICY": launch.policy,
    }


def linear_options(launch: LinearLaunch) -> dict[str, int]:
    """Return the compiler options of `linear_kernel`; additions are fused, as in tensor cores."""
    return {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": True,
    }

"""Storing and loading vectors of keys and values in the pool.

``CODEC`` is the name of a `KvCodec`.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to integers, ties to even
EXPONENT = tl.constexpr(0x7F800000)  # exponent bits of a float32; alone they are a power of two


@triton.jit
def to_numbers(x, CODEC: tl.constexpr):
    """Return a float32 row as the codec's numbers, in float32, and its scale; see `kv_pool.encode`.

    The numbers are rounded here, so that the conversion is exact: the interpreter's conversion does
    not round ties to even.
    """
    TOP: tl.constexpr = 448.0 if CODEC == "fp8" else 127.0
    # A GPU's maximum ignores NaN; as infinity, NaN makes the row's scale infinite.
    scale = tl.div_rn(tl.max(tl.where(x == x, tl.abs(x), float("inf")), 0), TOP)
    items = tl.div_rn(x, tl.where(scale > 0.0, scale, float("inf")))
    items = tl.where(items == items, items, 0.0)
    items = tl.minimum(tl.maximum(items, -TOP), TOP)
    rounder = ROUNDER
    if CODEC == "fp8":  # step: 1/8 of the number's power of two, at least 2**-9
        power = (items.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
        rounder = tl.maximum(power, 0.015625) * (ROUNDER / 8)
    return (items + rounder) - rounder, scale


@triton.jit
def store_vector(
    x, kv_ptr, scales_ptr, block, offset,
    HEAD_DIM: tl.constexpr, NUM_ITEMS: tl.constexpr, SCALES_AT: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """Store a head's key or value, float32 [HEAD_DIM], as vector ``offset`` of a block."""
    items_at = block * NUM_ITEMS + offset * HEAD_DIM + tl.arange(0, HEAD_DIM)
    if CODEC != "auto":
        x, scale = to_numbers(x, CODEC)
        tl.store(scales_ptr + (block * NUM_ITEMS + SCALES_AT) // 4 + offset, scale)
    tl.store(kv_ptr + items_at, x.to(kv_ptr.dtype.element_ty))


@triton.jit
def load_tile(
    kv_ptr, scales_ptr,
    blocks,  # [TILE] index of each position's block in the pool
    offsets,  # [TILE] offset in the page
    mask,
    NUM_ITEMS: tl.constexpr, SCALES_AT: tl.constexpr, CODEC: tl.constexpr, HEAD_DIM: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Return keys or values of positions, [TILE, HEAD_DIM], in the queries' dtype."""
    dims = tl.arange(0, HEAD_DIM)
    at = blocks * NUM_ITEMS + offsets * HEAD_DIM
    tile = tl.load(kv_ptr + at[:, None] + dims[None, :], mask=mask[:, None], other=0.0)
    if CODEC != "auto":
        scales_at = (blocks * NUM_ITEMS + SCALES_AT) // 4 + offsets
        scales = tl.load(scales_ptr + scales_at, mask=mask, other=0.0)
        tile = (tile.to(tl.float32) * scales[:, None]).to(dtype)
    return tile

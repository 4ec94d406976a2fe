"""Linear layers for few rows: a row's bits do not depend on how many others there are.

A library picks another kernel for one row than for five, which would make a verified token differ
from a decoded one. Here every tile has 16 rows, there or not, and adds up in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linear_kernel(
    x_ptr,  # [num_rows, IN]
    weight_ptr,  # [OUT, IN], or of int8
    scale_ptr,  # [OUT] float32, for int8
    bias_ptr,  # [OUT], read where HAS_BIAS
    out_ptr,  # [num_rows, OUT]
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One tile of the output."""
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    is_row, is_column = row < num_rows, column < OUT
    x_at = x_ptr + row.to(tl.int64)[:, None] * IN
    weight_at = weight_ptr + column.to(tl.int64)[:, None] * IN
    total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    for lo in range(0, IN, TILE_IN):
        inner = lo + tl.arange(0, TILE_IN)
        is_inner = inner < IN
        x = tl.load(x_at + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
        weight = tl.load(
            weight_at + inner[None, :], mask=is_column[:, None] & is_inner[None, :], other=0
        )
        total += tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision="ieee")
    if IS_INT8:
        total *= tl.load(scale_ptr + column, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])

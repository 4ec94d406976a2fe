"""A linear layer in tiles: a row's bits do not depend on the number of rows.

A library chooses different kernels for one row, five rows and five hundred, so that a verified
token could differ from a decoded one. tiles.py explains the division of a weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..chain import PREFETCHED, begin, prefetch


@triton.jit
def halves_of(words, dtype: tl.constexpr):
    """Return the lower and the upper int8 of int16 ``words``, both in ``dtype``."""
    if dtype == tl.bfloat16:
        # Two numbers at a time in a register: 128 plus the lower seven bits, minus 128, or minus
        # 256 if the sign bit is set. Converting each number alone would take longer than loading
        # it.
        low = tl.inline_asm_elementwise(
            """{
                .reg .b32 bits, less, one;
                mov.b32 one, 0x3F803F80;
                lop3.b32 bits, $1, 0x007F007F, 0x43004300, 0xEA;
                lop3.b32 less, $1, 0x00800080, 0xC300C300, 0xEA;
                fma.rn.bf16x2 $0, bits, one, less;
            }""",
            "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
        high = tl.inline_asm_elementwise(
            """{
                .reg .b32 upper, bits, less, one;
                mov.b32 one, 0x3F803F80;
                shr.u32 upper, $1, 8;
                lop3.b32 bits, upper, 0x007F007F, 0x43004300, 0xEA;
                lop3.b32 less, upper, 0x00800080, 0xC300C300, 0xEA;
                fma.rn.bf16x2 $0, bits, one, less;
            }""",
            "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:  # not after a return: the compiler would check both branches, whose types differ
        low, high = ((words << 8) >> 8).to(dtype), (words >> 8).to(dtype)
    return low, high


@triton.jit
def levels_of(words, dtype: tl.constexpr):
    """Return the four levels, 0 to 15, of int16 ``words``, lowest bits first, in ``dtype``."""
    if dtype == tl.bfloat16:
        # Two numbers at a time in a register: 128 plus four bits of its fraction, minus 128.
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
                .reg .b32 bits, one, less;
                mov.b32 one, 0x3F803F80;
                mov.b32 less, 0xC300C300;
                lop3.b32 bits, $4, 0x000F000F, 0x43004300, 0xEA;
                fma.rn.bf16x2 $0, bits, one, less;
                shr.u32 bits, $4, 4;
                lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
                fma.rn.bf16x2 $1, bits, one, less;
                shr.u32 bits, $4, 8;
                lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
                fma.rn.bf16x2 $2, bits, one, less;
                shr.u32 bits, $4, 12;
                lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
                fma.rn.bf16x2 $3, bits, one, less;
            }""",
            "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first, second = (words & 15).to(dtype), ((words >> 4) & 15).to(dtype)
        third, fourth = ((words >> 8) & 15).to(dtype), ((words >> 12) & 15).to(dtype)
    return first, second, third, fourth


@triton.jit
def x_tile(x_at, is_row, inner, num_inner, IS_EVEN: tl.constexpr):
    """Return a tile of x; zeros for missing rows and inputs."""
    if IS_EVEN:
        return tl.load(x_at, mask=is_row[:, None], other=0.0)
    return tl.load(x_at, mask=is_row[:, None] & (inner < num_inner)[None, :], other=0.0)


@triton.jit
def spread_levels(levels, numbers):
    """Return ``levels`` [OUT, WIDTH] times each output's scale plus its minimum.

    ``numbers`` [OUT, 1]: words with the scale in the lower half and the minimum in the upper.
    """
    dtype: tl.constexpr = levels.dtype
    if dtype == tl.bfloat16:  # two at a time, which the compiler does not do
        weight = tl.inline_asm_elementwise(
            """{
                .reg .b32 scale, minimum;
                prmt.b32 scale, $2, $2, 0x1010;
                prmt.b32 minimum, $2, $2, 0x3232;
                fma.rn.bf16x2 $0, $1, scale, minimum;
            }""",
            "=r,r,r,r", [levels, numbers], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = dtype.primitive_bitwidth
        kind: tl.constexpr = tl.int32 if HALF == 32 else tl.int16
        scale = numbers.to(kind).to(dtype, bitcast=True)
        minimum = (numbers >> HALF).to(kind).to(dtype, bitcast=True)
        weight = levels * scale + minimum
    return weight


@triton.jit
def add_group(
    total, levels, numbers_at, x_at, is_row, inner, num_inner, OUT,
    group: tl.constexpr, IS_EVEN: tl.constexpr, WIDTH: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Return ``total`` plus the products of a step's inputs in ``group``, 0 to 3."""
    x = x_tile(x_at + group * WIDTH, is_row, inner, num_inner - group * WIDTH, IS_EVEN)
    numbers = tl.load(numbers_at + group * OUT, eviction_policy=POLICY)
    return tl.dot(spread_levels(levels, numbers), tl.trans(x), total, input_precision="ieee")


@triton.jit
def add_rough_products(
    total, x_at, weight_at, numbers_at, step, is_row, inner, IN, OUT,
    TILE_IN: tl.constexpr, IS_EVEN: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Return ``total`` plus a step's products with 4-bit levels, four to a word, in groups."""
    WIDTH: tl.constexpr = TILE_IN // 4
    at, rest = x_at + step * TILE_IN, IN - step * TILE_IN
    numbers = numbers_at + step * 4 * OUT
    words = tl.load(weight_at + step * WIDTH, eviction_policy=POLICY)
    levels = levels_of(words, x_at.dtype.element_ty)
    for group in tl.static_range(4):
        total = add_group(
            total, levels[group], numbers, at, is_row, inner, rest, OUT,
            group, IS_EVEN, WIDTH, POLICY,
        )  # fmt: skip
    return total


@triton.jit
def add_products(
    total, x_at, weight_at, numbers_at, step, is_row, inner, IN, OUT,
    TILE_IN: tl.constexpr, IS_EVEN: tl.constexpr, BITS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Return ``total``, transposed if the weight is quantised, plus one step's products."""
    if BITS == 4:
        total = add_rough_products(
            total, x_at, weight_at, numbers_at, step, is_row, inner, IN, OUT,
            TILE_IN, IS_EVEN, POLICY,
        )  # fmt: skip
    else:
        total = add_exact_products(
            total, x_at, weight_at, step, is_row, inner, IN, TILE_IN, IS_EVEN, BITS, POLICY
        )
    return total


@triton.jit
def add_exact_products(
    total, x_at, weight_at, step, is_row, inner, IN,
    TILE_IN: tl.constexpr, IS_EVEN: tl.constexpr, BITS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Return ``total`` plus a step's products with plain weights, or with int8, two to a word."""
    WIDTH: tl.constexpr = TILE_IN // 2 if BITS == 8 else TILE_IN
    lo = step * TILE_IN
    x = x_tile(x_at + lo, is_row, inner, IN - lo, IS_EVEN)
    if IS_EVEN or BITS == 8:
        weight = tl.load(weight_at + step * WIDTH, eviction_policy=POLICY)
    else:
        is_inner = (inner < IN - lo)[None, :]
        weight = tl.load(weight_at + lo, mask=is_inner, other=0.0, eviction_policy=POLICY)
    if BITS == 8:
        x_high = x_tile(x_at + lo + WIDTH, is_row, inner, IN - lo - WIDTH, IS_EVEN)
        low, high = halves_of(weight, x.dtype)
        total = tl.dot(low, tl.trans(x), total, input_precision="ieee")
        total = tl.dot(high, tl.trans(x_high), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    return total


@triton.jit
def scaled_and_biased(
    total, scale_ptr, bias_ptr, column, is_column,
    TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr, BITS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Return outputs from sums [TILE_ROWS, TILE_OUT]: scaled if int8, with the bias."""
    bias = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if BITS == 8:
        scale = tl.load(scale_ptr + column, mask=is_column, other=0.0)[None, :]
        # An explicit fma rounds once, whatever the compiler fuses.
        total = tl.fma(total, tl.broadcast_to(scale, [TILE_ROWS, TILE_OUT]), bias)
    else:
        total += bias
    return total


@triton.jit(do_not_specialize=["num_rows", "pieces"])
def linear_kernel(
    x_ptr,  # [num_rows, IN]
    weight_ptr,  # [OUT, IN]; with BITS int16 words [OUT, steps * TILE_IN * BITS / 16]
    scale_ptr,  # BITS 8: [OUT] float32; BITS 4: [steps, 4, OUT] words for `spread_levels`
    bias_ptr,  # [OUT], read where HAS_BIAS
    out_ptr,  # [num_rows, OUT]
    parts_ptr,  # [pieces, num_rows, OUT] float32, used where IS_APART
    arrived_ptr,  # [tiles] int32, zeros before and after, used where IS_APART
    num_rows,
    pieces,
    IN,
    OUT,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    IS_CUT: tl.constexpr,  # whether there is more than one piece
    IS_APART: tl.constexpr,  # whether each piece has its own program
    NEIGHBOURS: tl.constexpr,  # neighbouring tiles of rows that share reads of a weight
    IS_EVEN: tl.constexpr,  # whether TILE_IN divides IN
    BITS: tl.constexpr,  # bits of a weight, 8 or 4; 0: unquantised
    HAS_BIAS: tl.constexpr,
    POLICY: tl.constexpr,  # cache eviction policy for the weight
    IS_CHAINED: tl.constexpr,
):
    """Compute one tile of the output, or one piece of it; the last piece adds up all pieces."""
    row_tile = tl.program_id(2) * NEIGHBOURS + tl.program_id(0)
    if row_tile * TILE_ROWS >= num_rows:
        return
    column_tile = tl.program_id(1) // pieces if IS_APART else tl.program_id(1)
    piece = tl.program_id(1) % pieces if IS_APART else 0
    num_steps = tl.cdiv(IN, TILE_IN)
    WIDTH: tl.constexpr = TILE_IN * BITS // 16 if BITS else TILE_IN
    row = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = column_tile * TILE_OUT + tl.arange(0, TILE_OUT)
    inner = tl.arange(0, WIDTH)
    is_row, is_column = row < num_rows, column < OUT
    x_at = x_ptr + row.to(tl.int64)[:, None] * IN + inner[None, :]
    stride = num_steps * WIDTH if BITS else IN
    # Columns beyond the last one read the last column's weights, and are not stored.
    from_column = tl.minimum(column, OUT - 1).to(tl.int64)
    weight_at = weight_ptr + from_column[:, None] * stride + inner[None, :]
    numbers_at = scale_ptr + from_column[:, None]  # used where BITS is 4

    steps = tl.cdiv(num_steps, pieces)  # steps of a piece; the last may have fewer
    if IS_CHAINED:
        ahead = tl.minimum(piece * steps + tl.arange(0, PREFETCHED), num_steps - 1) * WIDTH
        prefetch(weight_ptr + from_column[:, None] * stride + ahead[None, :])
        begin(IS_CHAINED)
    stop = tl.minimum((piece + 1) * steps, num_steps) if IS_APART else num_steps
    if BITS:
        total = tl.zeros([TILE_OUT, TILE_ROWS], tl.float32)
    else:
        total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    part = tl.zeros_like(total)
    end = steps  # end of the piece that is being added up
    for step in range(piece * steps, stop):
        part = add_products(
            part, x_at, weight_at, numbers_at, step, is_row, inner, IN, OUT,
            TILE_IN, IS_EVEN, BITS, POLICY,
        )  # fmt: skip
        # An outer loop over pieces would wait for the first bytes of every piece.
        if IS_CUT and not IS_APART:  # noqa: SIM102  (constant, unlike the inner condition)
            if step + 1 == end:
                total += part
                part = tl.zeros_like(part)
                end += steps
    total += part
    if BITS:
        total = tl.trans(total)

    is_out = is_row[:, None] & is_column[None, :]
    at = row.to(tl.int64)[:, None] * OUT + column[None, :]
    if IS_APART:
        part_size = num_rows.to(tl.int64) * OUT
        tl.store(parts_ptr + piece * part_size + at, total, mask=is_out)
        tl.debug_barrier()  # the whole part is written before its arrival is counted
        tile_at = arrived_ptr + column_tile * tl.cdiv(num_rows, TILE_ROWS) + row_tile
        if tl.atomic_add(tile_at, 1, sem="acq_rel") < pieces - 1:
            return
        tl.store(tile_at, 0)  # so that the next call finds zeros
        total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
        for each in range(pieces):
            part_at = parts_ptr + each * part_size + at
            total += tl.load(part_at, mask=is_out, other=0.0, cache_modifier=".cg")
    total = scaled_and_biased(
        total, scale_ptr, bias_ptr, column, is_column, TILE_ROWS, TILE_OUT, BITS, HAS_BIAS
    )
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=is_out)

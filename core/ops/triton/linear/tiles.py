"""LinearTiles: the division of a weight's products, which depends only on its shape and dtype.

A matrix instruction may add up in its own order, so it must not depend on the rows of a call. Rows
only determine the programs: the rows and columns of a tile are a number of equal instructions, for
which an H100 was measured to give equal bits, and a sum over the inputs consists of pieces at fixed
places, added in order, whether each piece has its own program or one program has all. This holds on
Hopper and, according to their instructions, on Ampere and Ada; the large Blackwell has another
instruction for 128 rows, whose order was not compared.

A tile always computes 64 rows, the fewest of Hopper's wgmma, some of them perhaps empty. For 1 to
64 rows a weight costs 128 operations, 0.16 ps at the 790 TFLOP/s measured on an H200, and its two
bytes 0.42 ps at 4.8 TB/s (one byte 0.21): reading takes longer than arithmetic on empty rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

Bits: TypeAlias = Literal[0, 4, 8]  # bits of a weight; 0: unquantised
ROUGH_STEP = 128  # inputs of a step with 4 bits: four groups, one in each quarter of a word
FILL = 192  # programs that keep an H100's 132 multiprocessors reading
BUSY = 128  # programs that keep an H100's multiprocessors computing
FEW_ROWS = 64
# A tile of a 4-bit weight for few rows, whose sums need no fixed order. It is small and uses the
# older instructions, because wgmma, for four warps together, would wait for each instruction.
ROUGH_ROWS, ROUGH_WARPS = 16, 2
MANY_ROWS = 128
FEW_COLUMNS = 64
_WIDE = 4096  # outputs from which a tile of a quantised weight has 128 columns
_MIN_STEPS = 6  # least steps of a piece; shorter ones would mostly wait for their first bytes
_NEIGHBOURS = 1024  # rows whose x stays in the L2 cache while the weight is read

# Rows and columns of a tile for many rows. The largest tiles read each number least often, and are
# used if there are enough of them. The widest tile has registers for one sum, but not for the sum
# of a piece as well.
_WIDEST = (128, 256)
_SHAPES = (_WIDEST, (128, 128), (64, 128), (64, 64))


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """Each output is a sum of ``pieces`` parts, each of whole steps of ``inner`` inputs."""

    inner: int
    pieces: int
    bits: Bits


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """The programs of one call, which do not affect the bits of its result."""

    rows: int  # rows of a tile
    columns: int  # outputs of a tile
    is_apart: bool  # whether each piece has its own program
    num_warps: int
    num_stages: int  # steps in shared memory; all but one are being loaded
    neighbours: int  # consecutive programs that share a tile of the weight, not rows
    policy: str  # cache policy for the weight, which is read once or by every tile of rows
    grid: tuple[int, int, int]


def step_inputs(dtype: torch.dtype, bits: Bits) -> int:
    """Return the number of inputs of a step; ``dtype`` is the activations'."""
    if bits == 4:
        return ROUGH_STEP
    return 32 if dtype == torch.float32 else 128 if bits else 64


def linear_tiles(
    out_features: int, in_features: int, dtype: torch.dtype, *, bits: Bits = 0
) -> LinearTiles:
    """Return the tiles of a weight; ``dtype`` is the activations'.

    A step reads 128 bytes of each of the weight's rows, a cache line. A weight of few outputs is
    divided into pieces, a power of two, until a single row makes `FILL` programs.
    """
    inner = step_inputs(dtype, bits)
    columns = 128 if bits == 8 and out_features >= _WIDE else FEW_COLUMNS
    most = max(1, -(-in_features // inner) // _MIN_STEPS)
    pieces = 1
    while pieces * 2 <= most and -(-out_features // columns) * pieces < FILL:
        pieces *= 2
    return LinearTiles(inner, pieces, bits)


def linear_launch(
    tiles: LinearTiles,
    out_features: int,
    num_rows: int,
    *,
    shape: tuple[int, int] | None = None,
) -> LinearLaunch:
    """Return the programs for ``num_rows`` rows.

    ``shape``: rows and columns of a tile; None: the usual ones. Pieces have their own programs if
    one tile has all rows: with more rows, writing and reading their sums takes longer than more
    programs save. A quantised weight is the left operand of the matrix instruction, which may come
    from registers, where it is widened. The rows of ``x`` are then the instruction's width, so a
    tile always has 64, except for a rough copy, whose bits may depend on the number of rows.
    """
    rows, columns = shape or _shape(tiles, out_features, num_rows)
    row_tiles, column_tiles = -(-num_rows // rows), -(-out_features // columns)
    neighbours = _NEIGHBOURS // rows
    is_apart = tiles.pieces > 1 and row_tiles == 1
    return LinearLaunch(
        rows=rows,
        columns=columns,
        is_apart=is_apart,
        num_warps=_num_warps(tiles, rows, columns),
        num_stages=3 if (rows, columns) == _WIDEST else 4,
        neighbours=neighbours,
        policy="evict_first" if num_rows <= FEW_ROWS else "",
        grid=(
            min(row_tiles, neighbours),
            column_tiles * (tiles.pieces if is_apart else 1),
            -(-row_tiles // neighbours),
        ),
    )


def _num_warps(tiles: LinearTiles, rows: int, columns: int) -> int:
    if tiles.bits == 4 and rows == ROUGH_ROWS:
        return ROUGH_WARPS
    return (columns if tiles.bits else rows) // 16


def _shape(tiles: LinearTiles, out_features: int, num_rows: int) -> tuple[int, int]:
    """Return the rows and columns of a tile."""
    if tiles.bits == 4 and num_rows <= ROUGH_ROWS:
        return ROUGH_ROWS, FEW_COLUMNS
    if tiles.bits:
        return FEW_ROWS, 128 if out_features >= _WIDE else FEW_COLUMNS
    if num_rows <= FEW_ROWS:
        return FEW_ROWS, 128 if out_features >= 128 * BUSY else FEW_COLUMNS
    programs = {shape: _programs(out_features, num_rows, *shape) for shape in _SHAPES}
    if tiles.pieces == 1 and tiles.inner == 64 and programs[_WIDEST] >= 4 * BUSY:
        return _WIDEST
    return next((shape for shape in _SHAPES[1:] if programs[shape] >= BUSY), _SHAPES[-1])


def _programs(out_features: int, num_rows: int, rows: int, columns: int) -> int:
    return -(-num_rows // rows) * -(-out_features // columns)

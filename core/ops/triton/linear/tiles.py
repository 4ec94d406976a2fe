"""LinearTiles: how the products of a weight are cut up, by its shape and dtype alone.

A matrix instruction may add up in an order of its own, so the rows of a call must not choose it.
Here they choose only which programs do the work: how many rows and columns a tile has, as so many
times the same instructions, which an H100 was seen to compute to the same bits; and a sum over the
inputs is made of pieces at fixed places, added in order, whether each has a program of its own or
one has them all. So it is on Hopper, and by their instructions on Ampere and Ada; the large
Blackwell has another instruction for 128 rows, whose order was not compared.

A tile computes 64 rows, there or not: the fewest of Hopper's wgmma. For one row or 64 a weight
costs 128 operations, 0.16 ps at the 790 TFLOP/s that an H200 was seen to reach, and its two bytes
0.42 ps at 4.8 TB/s (one byte 0.21): arithmetic on rows that are not there hides behind the reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

Bits: TypeAlias = Literal[0, 4, 8]  # of a weight; 0: it is plain
ROUGH_STEP = 128  # inputs of a step of a weight in 4 bits: four groups, one in each part of a word
FILL = 192  # programs that keep an H100's 132 multiprocessors reading
BUSY = 128  # programs that keep them busy
FEW_ROWS = 64
# A tile of a weight in 4 bits for few rows, whose sums need no fixed order. It is small, and of the
# older instructions: those of four warps together are waited for one by one.
ROUGH_ROWS, ROUGH_WARPS = 16, 2
MANY_ROWS = 128
FEW_COLUMNS = 64
_WIDE = 4096  # outputs from which a tile of few bits has 128 of them
_MIN_STEPS = 6  # of a piece: fewer would only wait for their first bytes
_NEIGHBOURS = 1024  # rows whose x stays in the L2 cache while the weight goes by
# Rows and columns of a tile for many rows: the largest read each number least often, and are used
# where there are enough of them. The widest has room for one sum alone, not for a piece's besides.
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
    """The programs of one call. Changes no bit."""

    rows: int  # of a tile
    columns: int  # outputs of a tile
    is_apart: bool  # whether each piece has a program of its own
    num_warps: int
    num_stages: int  # steps that are in shared memory, all but one on their way there
    neighbours: int  # tiles of rows that are computed beside each other for one tile of the weight
    policy: str  # of the cache for the weight, which is read once, or by every tile of rows
    grid: tuple[int, int, int]


def step_inputs(dtype: torch.dtype, bits: Bits) -> int:
    """Inputs of a step of a weight whose activations have ``dtype``."""
    if bits == 4:
        return ROUGH_STEP
    return 32 if dtype == torch.float32 else 128 if bits else 64


def linear_tiles(
    out_features: int, in_features: int, dtype: torch.dtype, *, bits: Bits = 0
) -> LinearTiles:
    """The tiles of a weight whose activations have ``dtype``.

    A step reads 128 bytes of each of the weight's rows: a line of the cache. A weight of few
    outputs is cut into pieces, a power of two, until one row alone makes `FILL` programs.
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
    """The programs for ``num_rows`` rows; ``shape``: rows and columns of a tile, to try others.

    Pieces are apart where one tile has all rows: beyond, their sums take longer to write and to
    read than programs gain. A weight of few bits is the left side of the product, as that may come
    from registers, where it is widened; rows are the instruction's width then and so always 64, but
    for a rough copy's, whose bits may depend on their number.
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
    """Rows and columns of a tile."""
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

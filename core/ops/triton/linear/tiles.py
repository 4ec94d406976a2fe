"""LinearTiles: how the products of a weight are cut up, by its shape and dtype alone.

A matrix instruction may add up in an order of its own, so the rows of a call must not choose it.
Here they choose only which programs do the work: a tile has 64 rows or, as two times the same
instructions, 128; and a sum over the inputs is made of pieces at fixed places, added in order,
whether each has a program of its own or one has them all. So it is on Ampere, Ada and Hopper; the
large Blackwell has another instruction for 128 rows, whose order was not compared.

A tile computes 64 rows, there or not: the fewest of Hopper's wgmma. For one row or 64 a weight
costs 128 operations, 0.16 ps at the 790 TFLOP/s that an H200 was seen to reach, and its two bytes
0.42 ps at 4.8 TB/s (one byte 0.21): arithmetic on rows that are not there hides behind the reading.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FILL = 128  # programs that keep an H200's 132 multiprocessors busy
FEW_ROWS = 64
MANY_ROWS = 128
_WIDE = 4096  # outputs from which a tile has 128 of them: half as many reads of x
_MIN_STEPS = 4  # of a piece: fewer would only wait for their first bytes
_NEIGHBOURS = 1024  # rows whose x stays in the L2 cache while the weight goes by


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """Each output is a sum of ``pieces`` parts, each of whole steps of ``inner`` inputs."""

    columns: int  # outputs of a tile
    inner: int
    pieces: int
    is_int8: bool


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """The programs of one call. Changes no bit."""

    rows: int  # of a tile
    is_apart: bool  # whether each piece has a program of its own
    num_warps: int
    num_stages: int  # steps that are in shared memory, all but one on their way there
    neighbours: int  # tiles of rows that are computed beside each other for one tile of the weight
    policy: str  # of the cache for the weight, which is read once, or by every tile of rows
    grid: tuple[int, int, int]


def linear_tiles(
    out_features: int, in_features: int, dtype: torch.dtype, *, is_int8: bool = False
) -> LinearTiles:
    """The tiles of a weight whose activations have ``dtype``.

    A step reads 128 bytes of each of the weight's rows: a line of the cache. A weight of few
    outputs is cut into pieces, a power of two, until one row alone makes `FILL` programs.
    """
    columns = 128 if out_features >= _WIDE else 64
    inner = 32 if dtype == torch.float32 else 128 if is_int8 else 64
    most = max(1, -(-in_features // inner) // _MIN_STEPS)
    pieces = 1
    while pieces * 2 <= most and -(-out_features // columns) * pieces < FILL:
        pieces *= 2
    return LinearTiles(columns, inner, pieces, is_int8)


def linear_launch(
    tiles: LinearTiles, out_features: int, num_rows: int, *, rows: int | None = None
) -> LinearLaunch:
    """The programs for ``num_rows`` rows; ``rows`` is a tile's, to try others than are in use.

    For int8 the weight is the left side of the product, as that may come from registers, where it
    is widened; rows are the instruction's width then and so always 64.
    """
    if rows is None:
        rows = FEW_ROWS if tiles.is_int8 or num_rows <= FEW_ROWS else MANY_ROWS
    row_tiles, column_tiles = -(-num_rows // rows), -(-out_features // tiles.columns)
    is_apart = tiles.pieces > 1 and row_tiles * column_tiles < FILL
    neighbours = _NEIGHBOURS // rows
    return LinearLaunch(
        rows=rows,
        is_apart=is_apart,
        num_warps=(tiles.columns if tiles.is_int8 else rows) // 16,
        num_stages=4 if rows == FEW_ROWS or tiles.pieces > 1 else 3,
        neighbours=neighbours,
        policy="evict_first" if num_rows <= FEW_ROWS else "",
        grid=(
            min(row_tiles, neighbours),
            column_tiles * (tiles.pieces if is_apart else 1),
            -(-row_tiles // neighbours),
        ),
    )

"""Updates of adapters: each row of a pass has an adapter's number, and kernels find its address.

Grids are large enough for any adapters of a pass, and programs without rows return. So a graph
serves other adapters if their addresses are written to its inputs. A program computes rows of one
adapter only, in tiles and an order that depend only on the linear's inputs: a row's bits do not
depend on other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

LINEAR_WORDS = tl.constexpr(4)  # address of A, its ranks, first block, number of blocks
BLOCK_WORDS = tl.constexpr(5)  # first output, output after the last, first rank, ranks, address


@triton.jit
def table_of(tables_ptr, adapter):
    """Return the pointer to an adapter's table."""
    return tl.load(tables_ptr + adapter).to(tables_ptr.dtype)


@triton.jit(do_not_specialize=["num_rows", "linear", "pieces"])
def lora_a_kernel(
    x_ptr,  # [num_rows, IN]
    adapted_ptr,  # [num_rows] int32: number of the row's adapter, from 1; 0: no adapter
    tables_ptr,  # [num_adapters] int64: addresses of tables
    hidden_ptr,  # [pieces, num_rows, RANKS] float32
    num_rows,
    linear,  # the linear's number in the tables
    pieces,
    IN,
    RANKS,
    TILE_ROWS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """Multiply some rows by some ranks of A, over one piece of the inputs."""
    adapter = tl.program_id(2)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    number = tl.load(adapted_ptr + row, mask=row < num_rows, other=0)
    is_row = number == adapter + 1
    if tl.max(is_row.to(tl.int32), 0) == 0:
        return
    entry = table_of(tables_ptr, adapter) + linear * LINEAR_WORDS
    num_ranks = tl.load(entry + 1)
    piece = tl.program_id(1) % pieces
    first = (tl.program_id(1) // pieces) * TILE_RANKS
    if first >= num_ranks:
        return
    a_ptr = tl.multiple_of(tl.load(entry).to(hidden_ptr.dtype), 16)
    rank = first + tl.arange(0, TILE_RANKS)
    is_rank = rank < num_ranks
    inner = tl.arange(0, TILE_IN)
    x_at = x_ptr + row.to(tl.int64)[:, None] * IN + inner[None, :]
    a_at = a_ptr + rank.to(tl.int64)[:, None] * IN + inner[None, :]
    num_steps = tl.cdiv(IN, TILE_IN)
    steps = tl.cdiv(num_steps, pieces)
    total = tl.zeros([TILE_ROWS, TILE_RANKS], tl.float32)
    for step in range(piece * steps, tl.minimum((piece + 1) * steps, num_steps)):
        at = step * TILE_IN
        is_inner = (inner < IN - at)[None, :]
        x = tl.load(x_at + at, mask=is_row[:, None] & is_inner, other=0.0).to(tl.float32)
        a = tl.load(a_at + at, mask=is_rank[:, None] & is_inner, other=0.0)
        total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
    to = hidden_ptr + (piece * num_rows + row).to(tl.int64)[:, None] * RANKS + rank[None, :]
    tl.store(to, total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def hidden_tile(
    hidden_ptr, row, rank, is_there, num_rows, pieces, RANKS,
    TILE_ROWS: tl.constexpr, TILE_RANKS: tl.constexpr,
):  # fmt: skip
    """Return some of A's outputs, whose pieces are added in order."""
    hidden = tl.zeros([TILE_ROWS, TILE_RANKS], tl.float32)
    for piece in range(pieces):
        at = (piece * num_rows + row).to(tl.int64)[:, None] * RANKS + rank[None, :]
        hidden += tl.load(hidden_ptr + at, mask=is_there, other=0.0)
    return hidden


@triton.jit(do_not_specialize=["num_rows", "linear", "pieces"])
def lora_b_kernel(
    hidden_ptr,  # [pieces, num_rows, RANKS] float32, written by `lora_a_kernel`
    adapted_ptr,  # [num_rows] int32: number of the row's adapter, from 1; 0: no adapter
    tables_ptr,  # [num_adapters] int64
    out_ptr,  # [num_rows, OUT]
    num_rows,
    linear,
    pieces,
    RANKS,
    OUT,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_RANKS: tl.constexpr,
):
    """Add the update to some outputs of some rows, one block of B after another."""
    adapter = tl.program_id(2)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    number = tl.load(adapted_ptr + row, mask=row < num_rows, other=0)
    is_row = number == adapter + 1
    if tl.max(is_row.to(tl.int32), 0) == 0:
        return
    table = table_of(tables_ptr, adapter)
    entry = table + linear * LINEAR_WORDS
    block_at = table + tl.load(entry + 2)
    first_out = tl.program_id(1) * TILE_OUT
    column = first_out + tl.arange(0, TILE_OUT)
    out_at = out_ptr + row.to(tl.int64)[:, None] * OUT + column[None, :]
    for _ in range(tl.load(entry + 3)):
        start, stop = tl.load(block_at), tl.load(block_at + 1)
        if (start < first_out + TILE_OUT) & (stop > first_out):
            first_rank, num_ranks = tl.load(block_at + 2), tl.load(block_at + 3)
            b_ptr = tl.load(block_at + 4).to(hidden_ptr.dtype)
            is_column = (column >= start) & (column < stop)
            b_at = b_ptr + (column - start)[:, None] * num_ranks
            total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
            for done in range(0, num_ranks, TILE_RANKS):
                rank = done + tl.arange(0, TILE_RANKS)
                is_rank = (rank < num_ranks)[None, :]
                hidden = hidden_tile(
                    hidden_ptr, row, first_rank + rank, is_row[:, None] & is_rank,
                    num_rows, pieces, RANKS, TILE_ROWS, TILE_RANKS,
                )  # fmt: skip
                b = tl.load(b_at + rank[None, :], mask=is_column[:, None] & is_rank, other=0.0)
                total = tl.dot(hidden, tl.trans(b), total, input_precision="ieee")
            is_out = is_row[:, None] & is_column[None, :]
            total += tl.load(out_at, mask=is_out, other=0.0).to(tl.float32)
            tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_out)
        block_at += BLOCK_WORDS

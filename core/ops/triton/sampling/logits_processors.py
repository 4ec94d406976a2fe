"""Edits of a row's logits before the temperature.

The row is copied, with -inf for tokens that are not allowed, and the copy is edited token by token.
A ban is final whatever edits come before or after it, so only the steps of `edit_kernel` must have
the order of core/sampling/logits_processors.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import row_edits
from .gumbel_argmax_kernels import NUM_COLUMNS, ROW, rank_of

# Each step edits a token of a row at most once, except BAN, which may ban it twice.
REPEAT, BAN = tl.constexpr(row_edits.REPEAT), tl.constexpr(row_edits.BAN)
NUM_STEPS = tl.constexpr(len(row_edits.STEPS))


@triton.jit
def copy_kernel(
    logits_ptr,  # [num_rows, VOCAB]
    logits_stride,
    values_ptr,  # [num_edited, VOCAB] float32, out
    controls_ptr,  # [num_draws, NUM_COLUMNS] int64
    edited_ptr,  # [num_edited] int32: indices of the draws
    mask_of_ptr,  # [num_edited] int32: index of the row's mask, or -1
    masks_ptr,  # [num_masks, MASK_WORDS] int32: a bit for each token, set if it is allowed
    raw_ranks_ptr,  # [num_edited, NUM_TILES] int32, out: greatest ranks before all edits
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    MASK_WORDS: tl.constexpr,
):
    """Copy one tile of one edited row, with -inf for tokens that its mask does not allow."""
    edited, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < VOCAB
    control_ptr = controls_ptr + tl.load(edited_ptr + edited) * NUM_COLUMNS
    row_ptr = logits_ptr + tl.load(control_ptr + ROW) * logits_stride
    values = tl.load(row_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
    tl.store(raw_ranks_ptr + edited * NUM_TILES + tile, tl.max(rank_of(values), 0))
    mask = tl.load(mask_of_ptr + edited)
    if mask >= 0:
        words = tl.load(masks_ptr + mask * MASK_WORDS + (ids >> 5), mask=inside, other=0)
        values = tl.where((words >> (ids & 31)) & 1 != 0, values, -float("inf"))
    tl.store(values_ptr + edited * VOCAB + ids, values, mask=inside)


@triton.jit
def edit_kernel(
    values_ptr,  # [num_edited, VOCAB] float32, in and out
    bounds_ptr,  # [num_edited, NUM_STEPS + 1] int32: start and end of each step's edits
    ids_ptr,  # [num_edits] int32
    amounts_ptr,  # [num_edits] float32
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,  # edits applied together
):
    """Apply all edits of single tokens to one row, step by step."""
    edited = tl.program_id(0).to(tl.int64)
    values_ptr += edited * VOCAB
    bounds_ptr += edited * (NUM_STEPS + 1)
    for step in tl.static_range(NUM_STEPS):
        end = tl.load(bounds_ptr + step + 1)
        for at in range(tl.load(bounds_ptr + step), end, TILE):
            index = at + tl.arange(0, TILE)
            inside = index < end
            ids = tl.load(ids_ptr + index, mask=inside, other=0)
            amounts = tl.load(amounts_ptr + index, mask=inside, other=1.0)
            values = tl.load(values_ptr + ids, mask=inside, other=0.0)
            if step == REPEAT:
                values = tl.where(values > 0, tl.div_rn(values, amounts), values * amounts)
            else:
                values += amounts
            if step == BAN:
                values = tl.full([TILE], -float("inf"), tl.float32)
            tl.store(values_ptr + ids, values, mask=inside)
        tl.debug_barrier()  # another thread may next edit a value that this one has written

"""Ragged paged attention: one kernel for decode, verify and prefill rows, and one that merges.

Online softmax (arXiv 1805.02867) inside a split; splits are merged in order of position, by the
same arithmetic in both kernels, so narrow and wide items differ by their tiles alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1e30)  # finite: a split that a row cannot see at all must not yield NaN


@triton.jit
def load_tile(
    kv_ptr,
    scales_ptr,
    blocks,
    offsets,
    mask,
    NUM_ITEMS: tl.constexpr,
    SCALES_AT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    dtype: tl.constexpr,
):
    """Keys or values of some positions, [TILE, HEAD_DIM] in the dtype of the queries.

    ``blocks`` [TILE]: index of each position's block in the pool; ``offsets``: place in its page.
    """
    dims = tl.arange(0, HEAD_DIM)
    at = blocks * NUM_ITEMS + offsets * HEAD_DIM
    tile = tl.load(kv_ptr + at[:, None] + dims[None, :], mask=mask[:, None], other=0)
    if SCALES_AT > 0:
        scales_at = (blocks * NUM_ITEMS + SCALES_AT) // 4 + offsets
        scales = tl.load(scales_ptr + scales_at, mask=mask, other=0.0)
        tile = (tile.to(tl.float32) * scales[:, None]).to(dtype)
    return tile


@triton.jit
def merge_state(top, total, out, new_top, new_total, new_out):
    """One more split behind those merged so far."""
    higher = tl.maximum(top, new_top)
    keep, add = tl.exp(top - higher), tl.exp(new_top - higher)
    return higher, total * keep + new_total * add, out * keep[:, None] + new_out * add[:, None]


@triton.jit
def attend_kernel(
    q_ptr,  # [T, NUM_HEADS * HEAD_DIM], scaled
    out_ptr,  # the same
    kv_ptr,  # the pool's blocks
    scales_ptr,  # the pool's memory as float32, for int8
    sums_ptr,  # [num_places, NUM_HEADS, HEAD_DIM] float32
    tops_ptr,  # [num_places, NUM_HEADS] float32: maxima
    totals_ptr,  # [num_places, NUM_HEADS] float32
    positions_ptr,  # [T]
    bases_ptr,  # [T]
    tables_ptr,  # [num_segments, table_stride] page ids
    rows_ptr,
    first_rows_ptr,
    num_rows_ptr,
    item_tables_ptr,  # -1: no work, padding of a graph
    first_splits_ptr,
    last_splits_ptr,
    table_stride,
    layer_block,  # index of the layer's first block in page 0
    page_blocks,  # blocks of one page
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_ITEMS: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # queries of a tile: rows times heads of a group, 16 at least
    WINDOW: tl.constexpr,  # 0: none
    IS_NARROW: tl.constexpr,
):
    """One item, one KV head. Narrow items leave their sums; wide ones the output itself."""
    item, kv_head = tl.program_id(0), tl.program_id(1)
    table = tl.load(item_tables_ptr + item)
    if table < 0:
        return
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    lanes, dims = tl.arange(0, TILE_ROWS), tl.arange(0, HEAD_DIM)
    index = lanes // GROUP
    is_row = index < tl.load(num_rows_ptr + item)
    row = tl.load(rows_ptr + tl.load(first_rows_ptr + item) + index, mask=is_row, other=0)
    head = kv_head * GROUP + lanes % GROUP
    position = tl.load(positions_ptr + row, mask=is_row, other=-1)
    stop = tl.max(position, 0) + 1
    q_at = row[:, None] * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=is_row[:, None], other=0.0)

    top = tl.full([TILE_ROWS], HIDDEN, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    out = tl.zeros([TILE_ROWS, HEAD_DIM], tl.float32)
    for split in range(tl.load(first_splits_ptr + item), tl.load(last_splits_ptr + item) + 1):
        split_top = tl.full([TILE_ROWS], HIDDEN, tl.float32)
        split_total = tl.zeros([TILE_ROWS], tl.float32)
        split_out = tl.zeros([TILE_ROWS, HEAD_DIM], tl.float32)
        for lo in range(split * SPLIT, tl.minimum(stop, (split + 1) * SPLIT), TILE):
            key = lo + tl.arange(0, TILE)
            is_key = key < stop
            page = tl.load(
                tables_ptr + table * table_stride + key // PAGE_SIZE, mask=is_key, other=0
            )
            block = page.to(tl.int64) * page_blocks + layer_block + kv_head
            k = load_tile(kv_ptr, scales_ptr, block, key % PAGE_SIZE, is_key,
                          NUM_ITEMS, SCALES_AT, HEAD_DIM, q.dtype)  # fmt: skip
            v = load_tile(kv_ptr, scales_ptr, block + NUM_KV_HEADS, key % PAGE_SIZE, is_key,
                          NUM_ITEMS, SCALES_AT, HEAD_DIM, q.dtype)  # fmt: skip
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, HIDDEN)
            higher = tl.maximum(split_top, tl.max(scores, 1))
            weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
            keep = tl.exp(split_top - higher)
            split_total = split_total * keep + tl.sum(weights, 1)
            split_out = split_out * keep[:, None]
            split_out += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            split_top = higher
        if IS_NARROW:
            place = (tl.load(bases_ptr + row, mask=is_row, other=0) + split) * NUM_HEADS + head
            sums_at = place.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(sums_ptr + sums_at, split_out, mask=is_row[:, None])
            tl.store(tops_ptr + place, split_top, mask=is_row)
            tl.store(totals_ptr + place, split_total, mask=is_row)
        else:
            top, total, out = merge_state(top, total, out, split_top, split_total, split_out)
    if not IS_NARROW:
        result = (out / total[:, None]).to(q.dtype)
        tl.store(out_ptr + q_at, result, mask=is_row[:, None])


@triton.jit
def merge_kernel(
    out_ptr,
    sums_ptr,
    tops_ptr,
    totals_ptr,
    merged_rows_ptr,  # -1: no work
    bases_ptr,
    first_splits_ptr,
    last_splits_ptr,
    NUM_HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,  # NUM_HEADS, to the next power of two
    HEAD_DIM: tl.constexpr,
):
    """The output of one narrow row, from its splits in order."""
    row = tl.load(merged_rows_ptr + tl.program_id(0))
    if row < 0:
        return
    head, dims = tl.arange(0, HEADS_TILE), tl.arange(0, HEAD_DIM)
    is_head = head < NUM_HEADS
    top = tl.full([HEADS_TILE], HIDDEN, tl.float32)
    total = tl.zeros([HEADS_TILE], tl.float32)
    out = tl.zeros([HEADS_TILE, HEAD_DIM], tl.float32)
    base = tl.load(bases_ptr + row)
    for split in range(tl.load(first_splits_ptr + row), tl.load(last_splits_ptr + row) + 1):
        place = (base + split) * NUM_HEADS + head
        sums_at = place.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        split_out = tl.load(sums_ptr + sums_at, mask=is_head[:, None], other=0.0)
        split_top = tl.load(tops_ptr + place, mask=is_head, other=0.0)
        split_total = tl.load(totals_ptr + place, mask=is_head, other=1.0)
        top, total, out = merge_state(top, total, out, split_top, split_total, split_out)
    at = row * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dims[None, :]
    result = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, result, mask=is_head[:, None])

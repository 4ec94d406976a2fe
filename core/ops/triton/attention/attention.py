"""Ragged paged attention: one kernel for decode, verify and prefill rows, and one that merges.

Online softmax (arXiv 1805.02867) inside a split; the splits of a stretch are merged in order of
position, and so are the stretches, by the same arithmetic in both kernels: narrow and wide items
differ by their tiles alone. Merging one state into nothing changes none of its bits.
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
    tile = tl.load(kv_ptr + at[:, None] + dims[None, :], mask=mask[:, None], other=0.0)
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
def first_split(position, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """The first split that a row at ``position`` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // SPLIT
    return first


@triton.jit
def add_sinks(top, total, out, sinks):
    """A score without a value for each query, behind all keys."""
    higher = tl.maximum(top, sinks)
    keep = tl.exp(top - higher)
    return total * keep + tl.exp(sinks - higher), out * keep[:, None]


@triton.jit
def attend_tile(
    q,
    position,  # [TILE_ROWS] of the queries
    key,  # [TILE] positions
    k,
    v,
    top,
    total,
    out,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """Add a tile of keys to the running (top, total, out) of the queries: online softmax."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAP > 0:  # CAP * tanh(scores / CAP)
        scores = CAP * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / CAP))))
    seen = key[None, :] <= position[:, None]
    if WINDOW > 0:
        seen = seen & (key[None, :] > position[:, None] - WINDOW)
    scores = tl.where(seen, scores, HIDDEN)
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
    keep = tl.exp(top - higher)
    total = total * keep + tl.sum(weights, 1)
    out = out * keep[:, None]
    out += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, out


@triton.jit
def attend_split(
    q,
    position,
    split,
    stop,  # first position that no query sees
    pages_ptr,
    tail_from,  # first position whose slot is in the tail
    tail_ptr,
    kv_ptr,
    scales_ptr,
    layer_block,
    page_blocks,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_ITEMS: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """Highest score, sum of weights and weighted values of one split, unscaled."""
    top = tl.full([TILE_ROWS], HIDDEN, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    out = tl.zeros([TILE_ROWS, HEAD_DIM], tl.float32)
    for lo in range(split * SPLIT, tl.minimum(stop, (split + 1) * SPLIT), TILE):
        key = lo + tl.arange(0, TILE)
        is_key = key < stop
        in_tail = key >= tail_from
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=is_key & (key < tail_from), other=0)
        slot = tl.load(tail_ptr + key - tail_from, mask=is_key & in_tail, other=0)
        page = tl.where(in_tail, slot // PAGE_SIZE, page)
        place = tl.where(in_tail, slot, key) % PAGE_SIZE
        block = page.to(tl.int64) * page_blocks + layer_block
        k = load_tile(kv_ptr, scales_ptr, block, place, is_key,
                      NUM_ITEMS, SCALES_AT, HEAD_DIM, q.dtype)  # fmt: skip
        v = load_tile(kv_ptr, scales_ptr, block + NUM_KV_HEADS, place, is_key,
                      NUM_ITEMS, SCALES_AT, HEAD_DIM, q.dtype)  # fmt: skip
        top, total, out = attend_tile(q, position, key, k, v, top, total, out, WINDOW, CAP)
    return top, total, out


@triton.jit
def keep_sums(sums_ptr, tops_ptr, totals_ptr, at, mask, top, total, out, HEAD_DIM: tl.constexpr):
    """Leave for `merge_kernel` what was found for the queries; ``at`` [TILE_ROWS]: where."""
    sums_at = at.to(tl.int64)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(sums_ptr + sums_at, out, mask=mask[:, None])
    tl.store(tops_ptr + at, top, mask=mask)
    tl.store(totals_ptr + at, total, mask=mask)


@triton.jit
def attend_kernel(
    q_ptr,  # [T, NUM_HEADS * HEAD_DIM], scaled
    out_ptr,  # the same
    kv_ptr,  # the pool's blocks
    scales_ptr,  # the pool's memory as float32, where vectors are scaled
    sums_ptr,  # [num_places, NUM_HEADS, HEAD_DIM] float32
    tops_ptr,  # [num_places, NUM_HEADS] float32: maxima
    totals_ptr,  # [num_places, NUM_HEADS] float32
    positions_ptr,  # [T]
    places_ptr,  # [T] where a row's sums begin, or its tile's; -1: a tile of one stretch has none
    counts_ptr,  # [4] where in words the narrow items begin, and how many; the same of wide ones
    sinks_ptr,  # [NUM_HEADS] float32, read where HAS_SINKS
    words_ptr,  # items of ITEM_WORDS numbers, and the rows, page ids and slots that they speak of
    layer_block,  # index of the layer's first block in page 0
    page_blocks,  # blocks of one page
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_ITEMS: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SPLIT: tl.constexpr,
    KV_SPLIT_GROUP: tl.constexpr,  # splits
    TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # queries of a tile: rows times heads of a group, 16 at least
    WINDOW: tl.constexpr,  # 0: none
    CAP: tl.constexpr,  # of the scores; 0: none
    HAS_SINKS: tl.constexpr,
    IS_NARROW: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
):
    """Every so manieth item, one KV head. They leave their sums, or the output if they know all.

    How many programs there are does not depend on how many items: so a graph may launch them.
    """
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    lanes, dims = tl.arange(0, TILE_ROWS), tl.arange(0, HEAD_DIM)
    index, head = lanes // GROUP, kv_head * GROUP + lanes % GROUP
    KIND: tl.constexpr = 0 if IS_NARROW else 2
    items_at, num_items = tl.load(counts_ptr + KIND), tl.load(counts_ptr + KIND + 1)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), disable_licm=True):
        words = words_ptr + items_at + item * ITEM_WORDS
        is_row = index < tl.load(words + 1)
        row = tl.load(words_ptr + tl.load(words) + index, mask=is_row, other=0)
        pages_ptr = words_ptr + tl.load(words + 2)
        position = tl.load(positions_ptr + row, mask=is_row, other=-1)
        stop = tl.max(position, 0) + 1
        q_at = row[:, None] * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=is_row[:, None], other=0.0)

        first, last = tl.load(words + 3), tl.load(words + 4)
        tail_from, tail_ptr = tl.load(words + 5), words_ptr + tl.load(words + 6)
        if IS_NARROW:
            top, total, out = attend_split(
                q, position, first, stop, pages_ptr, tail_from, tail_ptr, kv_ptr, scales_ptr,
                layer_block + kv_head, page_blocks,
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_ITEMS, SCALES_AT,
                SPLIT, TILE, TILE_ROWS, WINDOW, CAP,
            )  # fmt: skip
            place = tl.load(places_ptr + row, mask=is_row, other=0)
            place += first - first_split(position, SPLIT, WINDOW)
            keep_sums(sums_ptr, tops_ptr, totals_ptr, place * NUM_HEADS + head, is_row,
                      top, total, out, HEAD_DIM)  # fmt: skip
        else:
            top = tl.full([TILE_ROWS], HIDDEN, tl.float32)
            total = tl.zeros([TILE_ROWS], tl.float32)
            out = tl.zeros([TILE_ROWS, HEAD_DIM], tl.float32)
            for split in range(first, last + 1):
                split_top, split_total, split_out = attend_split(
                    q, position, split, stop, pages_ptr, tail_from, tail_ptr, kv_ptr, scales_ptr,
                    layer_block + kv_head, page_blocks,
                    NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_ITEMS, SCALES_AT,
                    SPLIT, TILE, TILE_ROWS, WINDOW, CAP,
                )  # fmt: skip
                top, total, out = merge_state(top, total, out, split_top, split_total, split_out)
            # A tile of several stretches leaves all of each, whether a row sees it or not.
            first_row = tl.load(words_ptr + tl.load(words))
            place = tl.load(places_ptr + first_row)
            if place >= 0:
                seen_from = first_split(tl.load(positions_ptr + first_row), SPLIT, WINDOW)
                place += (first // KV_SPLIT_GROUP - seen_from // KV_SPLIT_GROUP) * tl.cdiv(
                    TILE_ROWS, GROUP
                )
                at = place * NUM_HEADS + kv_head * TILE_ROWS + lanes
                keep_sums(sums_ptr, tops_ptr, totals_ptr, at, lanes >= 0,
                          top, total, out, HEAD_DIM)  # fmt: skip
            else:
                if HAS_SINKS:
                    total, out = add_sinks(top, total, out, tl.load(sinks_ptr + head))
                result = (out / total[:, None]).to(q.dtype)
                tl.store(out_ptr + q_at, result, mask=is_row[:, None])


@triton.jit
def merge_kernel(
    out_ptr,  # [T, NUM_HEADS * HEAD_DIM]
    sums_ptr,
    tops_ptr,
    totals_ptr,
    positions_ptr,
    places_ptr,  # -1: nothing to merge
    sinks_ptr,  # [NUM_HEADS] float32, read where HAS_SINKS
    lanes_ptr,  # [T] which row of its wide tile; -1: a narrow row
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of a program, a power of two
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    KV_SPLIT_GROUP: tl.constexpr,
    WIDE_TILE: tl.constexpr,  # queries
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """The output of one row and some heads, from what was left for them."""
    row, dims = tl.program_id(0), tl.arange(0, HEAD_DIM)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    place = tl.load(places_ptr + row)
    if place < 0:
        return
    position, lane = tl.load(positions_ptr + row), tl.load(lanes_ptr + row)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    in_tile = head // GROUP * WIDE_TILE + lane * GROUP + head % GROUP
    at = place * NUM_HEADS + tl.where(lane < 0, head, in_tile)
    step = tl.where(lane < 0, 1, tl.cdiv(WIDE_TILE, GROUP)) * NUM_HEADS
    first, last = first_split(position, SPLIT, WINDOW), position // SPLIT
    top = tl.full([HEADS], HIDDEN, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, HEAD_DIM], tl.float32)
    for kv_split_group in range(first // KV_SPLIT_GROUP, last // KV_SPLIT_GROUP + 1):
        lo = tl.maximum(first, kv_split_group * KV_SPLIT_GROUP)
        hi = tl.minimum(last + 1, (kv_split_group + 1) * KV_SPLIT_GROUP)
        num_sums = tl.where(lane < 0, hi - lo, 1)
        sum_top = tl.full([HEADS], HIDDEN, tl.float32)
        sum_total = tl.zeros([HEADS], tl.float32)
        sum_out = tl.zeros([HEADS, HEAD_DIM], tl.float32)
        for index in tl.range(num_sums, num_stages=4):  # loads that wait for no other
            here = at + index * step
            sums_at = here.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
            new_out = tl.load(sums_ptr + sums_at)
            new_top, new_total = tl.load(tops_ptr + here), tl.load(totals_ptr + here)
            sum_top, sum_total, sum_out = merge_state(
                sum_top, sum_total, sum_out, new_top, new_total, new_out
            )
        top, total, out = merge_state(top, total, out, sum_top, sum_total, sum_out)
        at += num_sums * step
    if HAS_SINKS:
        total, out = add_sinks(top, total, out, tl.load(sinks_ptr + head))
    out_at = row.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dims[None, :]
    result = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, result)

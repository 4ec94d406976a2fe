"""Ragged paged attention: one kernel for decode, verify and prefill rows, and a merging kernel.

tile_schedule.py divides the positions into splits, splits into stretches, and the work into narrow
and wide items. Inside a split, softmax is computed online (arXiv 1805.02867). The splits of a
stretch and then the stretches are merged in order of position, with the same arithmetic in both
kernels: narrow and wide items differ only in their tiles. Merging a state into an empty one changes
none of its bits.

A state of queries is ``max_score``, the highest score so far, ``exp_sum``, the sum of exp(score -
max_score), and ``acc``, the values weighted by these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..chain import begin
from ..kv_codec import load_tile

HIDDEN = tl.constexpr(-1e30)  # finite, so that a split that a row does not see yields no NaN


@triton.jit
def merge_state(max_score, exp_sum, acc, new_max, new_sum, new_acc):
    """Merge the state of one more split after the earlier ones."""
    higher = tl.maximum(max_score, new_max)
    keep, add = tl.exp(max_score - higher), tl.exp(new_max - higher)
    return higher, exp_sum * keep + new_sum * add, acc * keep[:, None] + new_acc * add[:, None]


@triton.jit
def first_split(position, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first split that a row at ``position`` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // SPLIT
    return first


@triton.jit
def add_sinks(max_score, exp_sum, acc, sinks):
    """Add a score without a value for each query, after all keys."""
    higher = tl.maximum(max_score, sinks)
    keep = tl.exp(max_score - higher)
    return exp_sum * keep + tl.exp(sinks - higher), acc * keep[:, None]


@triton.jit
def attend_tile(
    q,
    position,  # [TILE_ROWS] last positions that the queries see
    key,  # [TILE] positions
    k,
    v,
    max_score,
    exp_sum,
    acc,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """Add a tile of keys to the queries' running state by online softmax."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAP > 0:  # CAP * tanh(scores / CAP)
        scores = CAP * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / CAP))))
    seen = key[None, :] <= position[:, None]
    if WINDOW > 0:
        seen = seen & (key[None, :] > position[:, None] - WINDOW)
    scores = tl.where(seen, scores, HIDDEN)
    higher = tl.maximum(max_score, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
    keep = tl.exp(max_score - higher)
    exp_sum = exp_sum * keep + tl.sum(weights, 1)
    acc = acc * keep[:, None]
    acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, exp_sum, acc


@triton.jit
def attend_span(
    q,
    position,
    first,  # first position of the span
    stop,  # position after the span
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
    CODEC: tl.constexpr,
    TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """Return the queries' state (max_score, exp_sum, acc) over the positions of a span."""
    max_score = tl.full([TILE_ROWS], HIDDEN, tl.float32)
    exp_sum = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, HEAD_DIM], tl.float32)
    for lo in range(first, stop, TILE):
        key = lo + tl.arange(0, TILE)
        is_key = key < stop
        in_tail = key >= tail_from
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=is_key & (key < tail_from), other=0)
        slot = tl.load(tail_ptr + key - tail_from, mask=is_key & in_tail, other=0)
        page = tl.where(in_tail, slot // PAGE_SIZE, page)
        offset = tl.where(in_tail, slot, key) % PAGE_SIZE
        block = page.to(tl.int64) * page_blocks + layer_block
        k = load_tile(kv_ptr, scales_ptr, block, offset, is_key,
                      NUM_ITEMS, SCALES_AT, CODEC, HEAD_DIM, q.dtype)  # fmt: skip
        v = load_tile(kv_ptr, scales_ptr, block + NUM_KV_HEADS, offset, is_key,
                      NUM_ITEMS, SCALES_AT, CODEC, HEAD_DIM, q.dtype)  # fmt: skip
        max_score, exp_sum, acc = attend_tile(
            q, position, key, k, v, max_score, exp_sum, acc, WINDOW, CAP
        )
    return max_score, exp_sum, acc


@triton.jit
def store_partial(
    acc_ptr, max_score_ptr, exp_sum_ptr, at, mask, max_score, exp_sum, acc, HEAD_DIM: tl.constexpr
):
    """Store the queries' state for `merge_kernel`, at the indices ``at`` [TILE_ROWS]."""
    acc_at = at.to(tl.int64)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(acc_ptr + acc_at, acc, mask=mask[:, None])
    tl.store(max_score_ptr + at, max_score, mask=mask)
    tl.store(exp_sum_ptr + at, exp_sum, mask=mask)


@triton.jit
def attend_kernel(
    q_ptr,  # [T, NUM_HEADS * HEAD_DIM], scaled
    out_ptr,  # [T, NUM_HEADS * HEAD_DIM]
    kv_ptr,  # the pool's blocks
    scales_ptr,  # the pool's memory as float32, if vectors are scaled
    acc_ptr,  # [num_partials, NUM_HEADS, HEAD_DIM] float32
    max_score_ptr,  # [num_partials, NUM_HEADS] float32
    exp_sum_ptr,  # [num_partials, NUM_HEADS] float32
    positions_ptr,  # [T] last position that a row sees
    partials_ptr,  # [T] index of a row's first partial, or of its tile's; -1: none
    counts_ptr,  # [4] (index in words, number) of the narrow items, then of the wide ones
    sinks_ptr,  # [NUM_HEADS] float32, read where HAS_SINKS
    words_ptr,  # items of ITEM_WORDS numbers, and the rows, page ids and slots that they refer to
    layer_block,  # index of the layer's first block in page 0
    page_blocks,  # blocks of one page
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_ITEMS: tl.constexpr,
    SCALES_AT: tl.constexpr,
    CODEC: tl.constexpr,
    SPLIT: tl.constexpr,
    KV_SPLIT_GROUP: tl.constexpr,  # splits that make a stretch
    TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # queries of a tile: rows times heads of a group, at least 16
    WINDOW: tl.constexpr,  # positions that a row sees; 0: no window
    CAP: tl.constexpr,  # limit of the scores; 0: no limit
    HAS_SINKS: tl.constexpr,
    IS_NARROW: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # whether a wide item's splits are summed without merging
    ITEM_WORDS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """Compute every ``num_programs``-th item for one KV head.

    An item stores partial sums, or the output if it has all keys of its rows. The number of
    programs does not depend on the number of items, so that a graph can launch them.
    """
    begin(IS_CHAINED)
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    queries, dims = tl.arange(0, TILE_ROWS), tl.arange(0, HEAD_DIM)
    index, head = queries // GROUP, kv_head * GROUP + queries % GROUP
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
            max_score, exp_sum, acc = attend_span(
                q, position, first * SPLIT, tl.minimum(stop, (first + 1) * SPLIT),
                pages_ptr, tail_from, tail_ptr, kv_ptr, scales_ptr,
                layer_block + kv_head, page_blocks,
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_ITEMS, SCALES_AT, CODEC,
                TILE, TILE_ROWS, WINDOW, CAP,
            )  # fmt: skip
            partial = tl.load(partials_ptr + row, mask=is_row, other=0)
            partial += first - first_split(position, SPLIT, WINDOW)
            store_partial(
                acc_ptr, max_score_ptr, exp_sum_ptr, partial * NUM_HEADS + head, is_row,
                max_score, exp_sum, acc, HEAD_DIM,
            )  # fmt: skip
        else:
            if IS_WHOLE:
                max_score, exp_sum, acc = attend_span(
                    q, position, first * SPLIT, tl.minimum(stop, (last + 1) * SPLIT),
                    pages_ptr, tail_from, tail_ptr, kv_ptr, scales_ptr,
                    layer_block + kv_head, page_blocks,
                    NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_ITEMS, SCALES_AT, CODEC,
                    TILE, TILE_ROWS, WINDOW, CAP,
                )  # fmt: skip
            else:
                max_score = tl.full([TILE_ROWS], HIDDEN, tl.float32)
                exp_sum = tl.zeros([TILE_ROWS], tl.float32)
                acc = tl.zeros([TILE_ROWS, HEAD_DIM], tl.float32)
                for split in range(first, last + 1):
                    split_max, split_sum, split_acc = attend_span(
                        q, position, split * SPLIT, tl.minimum(stop, (split + 1) * SPLIT),
                        pages_ptr, tail_from, tail_ptr, kv_ptr, scales_ptr,
                        layer_block + kv_head, page_blocks,
                        NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_ITEMS, SCALES_AT, CODEC,
                        TILE, TILE_ROWS, WINDOW, CAP,
                    )  # fmt: skip
                    max_score, exp_sum, acc = merge_state(
                        max_score, exp_sum, acc, split_max, split_sum, split_acc
                    )
            # A tile of several stretches stores the sums of all rows, also of rows that see none.
            first_row = tl.load(words_ptr + tl.load(words))
            partial = tl.load(partials_ptr + first_row)
            if partial >= 0:
                seen_from = first_split(tl.load(positions_ptr + first_row), SPLIT, WINDOW)
                partial += (first // KV_SPLIT_GROUP - seen_from // KV_SPLIT_GROUP) * tl.cdiv(
                    TILE_ROWS, GROUP
                )
                at = partial * NUM_HEADS + kv_head * TILE_ROWS + queries
                store_partial(
                    acc_ptr, max_score_ptr, exp_sum_ptr, at, queries >= 0,
                    max_score, exp_sum, acc, HEAD_DIM,
                )  # fmt: skip
            else:
                if HAS_SINKS:
                    exp_sum, acc = add_sinks(max_score, exp_sum, acc, tl.load(sinks_ptr + head))
                result = (acc / exp_sum[:, None]).to(q.dtype)
                tl.store(out_ptr + q_at, result, mask=is_row[:, None])


@triton.jit
def merge_kernel(
    out_ptr,  # [T, NUM_HEADS * HEAD_DIM]
    acc_ptr,
    max_score_ptr,
    exp_sum_ptr,
    positions_ptr,
    partials_ptr,  # -1: nothing to merge
    sinks_ptr,  # [NUM_HEADS] float32, read where HAS_SINKS
    rows_in_tile_ptr,  # [T] index of the row in its wide tile; -1: a narrow row
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a program, a power of two
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    KV_SPLIT_GROUP: tl.constexpr,
    WIDE_TILE: tl.constexpr,  # queries of a wide tile
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """Merge the partial sums of one row and some heads into its output."""
    begin(IS_CHAINED)
    row, dims = tl.program_id(0), tl.arange(0, HEAD_DIM)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    partial = tl.load(partials_ptr + row)
    if partial < 0:
        return
    position, row_in_tile = tl.load(positions_ptr + row), tl.load(rows_in_tile_ptr + row)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    in_tile = head // GROUP * WIDE_TILE + row_in_tile * GROUP + head % GROUP
    at = partial * NUM_HEADS + tl.where(row_in_tile < 0, head, in_tile)
    step = tl.where(row_in_tile < 0, 1, tl.cdiv(WIDE_TILE, GROUP)) * NUM_HEADS
    first, last = first_split(position, SPLIT, WINDOW), position // SPLIT
    max_score = tl.full([HEADS], HIDDEN, tl.float32)
    exp_sum = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, HEAD_DIM], tl.float32)
    for kv_split_group in range(first // KV_SPLIT_GROUP, last // KV_SPLIT_GROUP + 1):
        lo = tl.maximum(first, kv_split_group * KV_SPLIT_GROUP)
        hi = tl.minimum(last + 1, (kv_split_group + 1) * KV_SPLIT_GROUP)
        num_sums = tl.where(row_in_tile < 0, hi - lo, 1)
        group_max = tl.full([HEADS], HIDDEN, tl.float32)
        group_sum = tl.zeros([HEADS], tl.float32)
        group_acc = tl.zeros([HEADS, HEAD_DIM], tl.float32)
        for index in tl.range(num_sums, num_stages=4):  # pipelined: the loads are independent
            here = at + index * step
            acc_at = here.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
            new_acc = tl.load(acc_ptr + acc_at)
            new_max, new_sum = tl.load(max_score_ptr + here), tl.load(exp_sum_ptr + here)
            group_max, group_sum, group_acc = merge_state(
                group_max, group_sum, group_acc, new_max, new_sum, new_acc
            )
        max_score, exp_sum, acc = merge_state(
            max_score, exp_sum, acc, group_max, group_sum, group_acc
        )
        at += num_sums * step
    if HAS_SINKS:
        exp_sum, acc = add_sinks(max_score, exp_sum, acc, tl.load(sinks_ptr + head))
    out_at = row.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dims[None, :]
    result = (acc / exp_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, result)

"""Experts: rows choose them and are sorted by them; a program computes rows of one expert only.

Launches do not depend on the choice: grids are large enough for any choice, and programs without
work return. A *pair* is a row and one of its slots, numbered row by row, best slot first. Outputs
of experts are stored by pair, so that a row's result does not depend on the sorting.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .linear import add_products, scaled_and_biased


@triton.jit
def best_of(values, is_open, number, NUMBERS: tl.constexpr):
    """Return the ``number`` of the highest value where ``is_open``, the first of equal ones."""
    top = tl.max(tl.where(is_open, values, float("-inf")), 0)
    return tl.min(tl.where(is_open & (values == top), number, NUMBERS), 0)


@triton.jit
def scores_of(logits, is_there, IS_SIGMOID: tl.constexpr):
    """Return the sigmoid of each logit, or the softmax over the logits where ``is_there``."""
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(tl.where(is_there, logits, float("-inf")), 0))
        scores = powers / tl.sum(tl.where(is_there, powers, 0.0), 0)
    return scores


@triton.jit
def kept_groups(
    choice, is_there, number, TILE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr, SIZE: tl.constexpr, BY_TWO: tl.constexpr,
):  # fmt: skip
    """Return a mask of the experts in the best groups.

    A group's score is its best expert's value or, with BY_TWO, the sum of its two best experts'
    values.
    """
    group = number // SIZE
    judged = tl.zeros([TILE], tl.float32)
    for each in range(NUM_GROUPS):
        is_own = is_there & (group == each)
        first = best_of(choice, is_own, number, TILE)
        value = tl.max(tl.where(is_own, choice, float("-inf")), 0)
        if BY_TWO and SIZE > 1:
            value += tl.max(tl.where(is_own & (number != first), choice, float("-inf")), 0)
        judged = tl.where(is_own, value, judged)
    is_kept = number < 0
    for _ in range(KEPT_GROUPS):
        best = best_of(judged, is_there & ~is_kept, group, TILE)
        is_kept = is_kept | (group == best)
    return is_there & is_kept


@triton.jit
def route_kernel(
    logits_ptr,  # [T, NUM_EXPERTS] float32
    bias_ptr,  # [NUM_EXPERTS] float32, read where HAS_BIAS
    slots_ptr,  # [T], read where HAS_SLOTS; -1: an empty row
    weights_ptr,  # [T, TOP_K] float32
    chosen_ptr,  # [T, TOP_K] int32, best first; NUM_EXPERTS for an empty row
    least,
    factor,
    NUM_EXPERTS: tl.constexpr,
    TILE: tl.constexpr,  # NUM_EXPERTS, rounded up to a power of two
    TOP_K: tl.constexpr,
    TOP_TILE: tl.constexpr,  # TOP_K, rounded up to a power of two
    IS_SIGMOID: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr,
    RENORMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    """Choose the experts of one row and their weights, which `Routing` defines."""
    row = tl.program_id(0).to(tl.int64)
    number, slot = tl.arange(0, TILE), tl.arange(0, TOP_TILE)
    is_slot = slot < TOP_K
    at = row * TOP_K + slot
    if HAS_SLOTS:  # noqa: SIM102  (constant at compile time, unlike the inner condition)
        if tl.load(slots_ptr + row) < 0:
            tl.store(weights_ptr + at, tl.zeros([TOP_TILE], tl.float32), mask=is_slot)
            tl.store(chosen_ptr + at, tl.full([TOP_TILE], NUM_EXPERTS, tl.int32), mask=is_slot)
            return
    is_open = number < NUM_EXPERTS
    scores = tl.load(logits_ptr + row * NUM_EXPERTS + number, mask=is_open, other=0.0)
    if not OF_CHOSEN:
        scores = scores_of(scores, is_open, IS_SIGMOID)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + number, mask=is_open, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))  # NaN would choose invalid experts
    if NUM_GROUPS > 1:
        is_open = kept_groups(
            choice, is_open, number, TILE, NUM_GROUPS, KEPT_GROUPS, NUM_EXPERTS // NUM_GROUPS,
            BY_TWO,
        )  # fmt: skip
    weights, chosen = tl.zeros([TOP_TILE], tl.float32), tl.zeros([TOP_TILE], tl.int32)
    for each in range(TOP_K):
        best = best_of(choice, is_open, number, TILE)
        is_open = is_open & (number != best)
        chosen = tl.where(slot == each, best, chosen)
        weights = tl.where(slot == each, tl.sum(tl.where(number == best, scores, 0.0), 0), weights)
    if OF_CHOSEN:
        weights = scores_of(weights, is_slot, IS_SIGMOID)
    if RENORMS:
        weights = weights / (tl.sum(tl.where(is_slot, weights, 0.0), 0) + least)
    tl.store(weights_ptr + at, weights * factor, mask=is_slot)
    tl.store(chosen_ptr + at, chosen, mask=is_slot)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_kernel(
    chosen_ptr,  # [num_pairs]; NUM_EXPERTS: a pair of an empty row
    order_ptr,  # [num_pairs] int32: pairs by expert
    tiles_ptr,  # [num_tiles, 3] int32: expert, start and end of its pairs in the order
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    IS_FEW: tl.constexpr,  # whether there is a tile per pair, else one per expert and full tile
    CHUNK: tl.constexpr,
):
    """Write the pairs of one expert, in order, and the tiles into which they are divided.

    A tile's number follows from the number of pairs of earlier experts, not from their tiles, so
    that no program waits for another. Unused tiles have expert -1.
    """
    expert = tl.program_id(0)
    place = tl.arange(0, CHUNK)
    num_before, num_own = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        is_pair = start + place < num_pairs
        number = tl.load(chosen_ptr + start + place, mask=is_pair, other=NUM_EXPERTS)
        num_before += (number < expert).to(tl.int32)
        num_own += (number == expert).to(tl.int32)
    begin = tl.sum(num_before, 0)
    end = begin + tl.sum(num_own, 0)

    at = begin
    for start in range(0, num_pairs, CHUNK):
        is_pair = start + place < num_pairs
        number = tl.load(chosen_ptr + start + place, mask=is_pair, other=NUM_EXPERTS)
        is_own = (number == expert).to(tl.int32)
        tl.store(order_ptr + at + tl.cumsum(is_own, 0) - 1, start + place, mask=is_own > 0)
        at += tl.sum(is_own, 0)

    if IS_FEW:
        first, stop = begin, end
    else:
        first, stop = begin // TILE_ROWS + expert, end // TILE_ROWS + expert + 1
    if expert == NUM_EXPERTS - 1:
        stop = num_tiles  # the last expert also marks unused tiles
    for tile in range(first, stop):
        tile_begin = begin + (tile - first) * TILE_ROWS
        tl.store(tiles_ptr + 3 * tile, tl.where(tile_begin < end, expert, -1))
        tl.store(tiles_ptr + 3 * tile + 1, tile_begin)
        tl.store(tiles_ptr + 3 * tile + 2, end)


@triton.jit
def address_of(addresses_ptr, expert, like_ptr):
    """Return the pointer to an expert's tensor, of the type of ``like_ptr``."""
    return tl.multiple_of(tl.load(addresses_ptr + expert).to(like_ptr.dtype), 16)


@triton.jit(do_not_specialize=["num_tiles"])
def expert_linear_kernel(
    x_ptr,  # [num_pairs / SHARERS, IN]
    order_ptr,  # [num_pairs]
    tiles_ptr,  # [num_tiles, 3], written by `sort_kernel`
    weights_ptr,  # [num_experts] int64: addresses of weights in the layout of `linear_kernel`
    scales_ptr,  # [num_experts] int64: addresses of scales, read where BITS
    biases_ptr,  # [num_experts] int64: addresses of biases [OUT], read where HAS_BIAS
    items_ptr,  # any tensor of the weights' dtype: gives the pointers' type
    floats_ptr,  # any tensor of the scales' dtype: gives the pointers' type
    out_ptr,  # [num_pairs, OUT]
    num_tiles,
    IN,
    OUT,
    SHARERS: tl.constexpr,  # pairs that have the same row of x
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,  # neighbouring tiles that share reads of a weight
    IS_EVEN: tl.constexpr,  # whether TILE_IN divides IN
    BITS: tl.constexpr,  # bits of a weight, 8 or 4; 0: unquantised
    HAS_BIAS: tl.constexpr,
):
    """Compute some outputs of one expert's rows; one program adds up each sum, in a fixed order."""
    tile = tl.program_id(2) * NEIGHBOURS + tl.program_id(0)
    if tile >= num_tiles:
        return
    expert = tl.load(tiles_ptr + 3 * tile)
    if expert < 0:
        return
    place = tl.load(tiles_ptr + 3 * tile + 1) + tl.arange(0, TILE_ROWS)
    is_row = place < tl.load(tiles_ptr + 3 * tile + 2)
    pair = tl.load(order_ptr + place, mask=is_row, other=0).to(tl.int64)

    num_steps = tl.cdiv(IN, TILE_IN)
    WIDTH: tl.constexpr = TILE_IN * BITS // 16 if BITS else TILE_IN
    column = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    inner = tl.arange(0, WIDTH)
    is_column = column < OUT
    x_at = x_ptr + (pair // SHARERS)[:, None] * IN + inner[None, :]
    stride = num_steps * WIDTH if BITS else IN
    from_column = tl.minimum(column, OUT - 1).to(tl.int64)
    weight_ptr = address_of(weights_ptr, expert, items_ptr)
    weight_at = weight_ptr + from_column[:, None] * stride + inner[None, :]
    if BITS:
        total = tl.zeros([TILE_OUT, TILE_ROWS], tl.float32)
    else:
        total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    scale_ptr = address_of(scales_ptr, expert, floats_ptr) if BITS else floats_ptr
    numbers_at = scale_ptr + from_column[:, None]  # used where BITS is 4
    for step in range(num_steps):
        total = add_products(
            total, x_at, weight_at, numbers_at, step, is_row, inner, IN, OUT,
            TILE_IN, IS_EVEN, BITS, "",
        )  # fmt: skip
    if BITS:
        total = tl.trans(total)

    bias_ptr = address_of(biases_ptr, expert, x_ptr) if HAS_BIAS else x_ptr
    total = scaled_and_biased(
        total, scale_ptr, bias_ptr, column, is_column, TILE_ROWS, TILE_OUT, BITS, HAS_BIAS
    )
    at = pair[:, None] * OUT + column[None, :]
    is_out = is_row[:, None] & is_column[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def add_up_kernel(
    y_ptr,  # [T, TOP_K, WIDTH]: the outputs of each row's experts
    weights_ptr,  # [T, TOP_K] float32
    chosen_ptr,  # [T, TOP_K]
    shared_ptr,  # [T, WIDTH], read where HAS_SHARED
    gate_ptr,  # [T] float32, read where HAS_GATE
    out_ptr,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """Add up the outputs of a row's experts, slot by slot, then the shared expert's."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < WIDTH
    total = tl.zeros([TILE], tl.float32)
    for slot in range(TOP_K):
        pair = row * TOP_K + slot
        is_there = tl.full([TILE], tl.load(chosen_ptr + pair), tl.int32) < NUM_EXPERTS
        y = tl.load(y_ptr + pair * WIDTH + column, mask=mask & is_there, other=0.0)
        total += y.to(tl.float32) * tl.load(weights_ptr + pair)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            shared *= 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + row)))
        total += shared
    tl.store(out_ptr + row * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=mask)

"""top-k, min-p and top-p without a sort: the last key that stays, and the last id that has it.

A key is the magnitude of a scaled value; better tokens have smaller keys. Tokens stay, best first,
while the weight of better ones is below a limit; each weighs 1 (top-k) or its integer mass (top-p).
So the last key is the greatest one before which the weight is below the limit, and its bits are
found four at a time, by weighing the tokens before each of 16 keys. Sums are of integers, so that
core/sampling/top_k_top_p.py, which sorts, has equal results.

One program processes a whole row. First it lists the values that may stay. They are few if the
greatest values of the tiles bound the k-th best value, or the total mass bounds the mass of a token
of top-p. Tiles without such values are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gumbel_argmax_kernels import (
    INF_RANK,
    MIN_P_LOGIT,
    NUM_COLUMNS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    is_sound,
    key_of,
    number,
    scaled_of,
    top_rank,
    value_of,
    values_at,
)

NO_KEY = tl.constexpr(0x7F800000)  # key of -inf, the greatest one
LONG = tl.constexpr(4)  # tiles of a list above which it is faster to shorten the list first


@triton.jit
def mass_of(scaled, MASS_SCALE: tl.constexpr):
    """Return ``exp(scaled)`` as an integer, equal to `core.sampling.top_k_top_p.masses`."""
    return (tl.exp(scaled) * MASS_SCALE).to(tl.int64)


@triton.jit
def weights_before(
    keys, list_ptr, count, WEIGHS: tl.constexpr, MASS_SCALE: tl.constexpr, TILE: tl.constexpr
):
    """Return the weight of the listed values whose key is below each of ``keys`` [16], int64."""
    weights = tl.zeros([16], tl.int64)
    for at in range(0, count, TILE):
        index = at + tl.arange(0, TILE)
        scaled = tl.load(list_ptr + index, mask=index < count, other=-float("inf"))
        weight = (index < count).to(tl.int64)
        if WEIGHS:
            weight = mass_of(scaled, MASS_SCALE)
        is_before = key_of(scaled).to(tl.uint32)[:, None] < keys[None, :]
        weights += tl.sum(tl.where(is_before, weight[:, None], 0), 0)
    return weights


@triton.jit
def last_key(
    list_ptr, count, limit, WEIGHS: tl.constexpr, MASS_SCALE: tl.constexpr, TILE: tl.constexpr
):
    """Return the greatest key below which listed values weigh less than ``limit``, and the weight.

    The key is greater than the key of -inf if all values together weigh less.
    """
    steps = tl.arange(0, 16).to(tl.uint32)
    key, before = tl.full([], 0, tl.uint32), tl.full([], 0, tl.int64)
    unit = tl.full([], 1 << 28, tl.uint32)  # value of the present digit
    for _ in range(8):
        weights = weights_before(key + steps * unit, list_ptr, count, WEIGHS, MASS_SCALE, TILE)
        fits = weights < limit
        key += (tl.sum(fits.to(tl.int32), 0) - 1).to(tl.uint32) * unit
        before = tl.max(tl.where(fits, weights, 0), 0)
        unit = unit >> 4
    return tl.minimum(key, 0x7FFFFFFF).to(tl.int32), before


@triton.jit
def narrowed(
    list_ptr, count, low, limit, WEIGHS: tl.constexpr, MASS_SCALE: tl.constexpr, TILE: tl.constexpr
):
    """Remove values from a long list that are certainly beyond ``limit``; return the new length.

    The order stays. The bound is the best of 16 evenly spaced values down to ``low`` before which
    the listed values weigh ``limit`` or more.
    """
    if (count > LONG * TILE) & (low > -float("inf")):
        steps = (tl.arange(0, 16) + 1).to(tl.float32)
        keys = key_of(low * (steps / 16)).to(tl.uint32)
        weights = weights_before(keys, list_ptr, count, WEIGHS, MASS_SCALE, TILE)
        fence = tl.min(tl.where(weights >= limit, keys, 0x7FFFFFFF), 0).to(tl.int32)
        left = 0
        for at in range(0, count, TILE):
            index = at + tl.arange(0, TILE)
            scaled = tl.load(list_ptr + index, mask=index < count, other=-float("inf"))
            stays = ((key_of(scaled) < fence) & (index < count)).to(tl.int32)
            tl.debug_barrier()  # all threads have read values that may be overwritten
            tl.store(list_ptr + left + tl.cumsum(stays, 0) - 1, scaled, mask=stays != 0)
            left += tl.sum(stays, 0)
        tl.debug_barrier()
        count = left
    return count


@triton.jit
def limit_of(total, top_p):
    """Return the mass of top-p: ``total * top_p``, rounded up."""
    return tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)


@triton.jit
def list_mass(list_ptr, count, key, ties, MASS_SCALE: tl.constexpr, TILE: tl.constexpr):
    """Return the mass of listed values with keys below ``key``.

    The mass of at most ``ties`` values with ``key`` itself is added.
    """
    total, num_ties = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for at in range(0, count, TILE):
        index = at + tl.arange(0, TILE)
        scaled = tl.load(list_ptr + index, mask=index < count, other=-float("inf"))
        its_key = key_of(scaled)
        total += tl.sum(tl.where(its_key < key, mass_of(scaled, MASS_SCALE), 0), 0)
        num_ties += tl.sum(((its_key == key) & (index < count)).to(tl.int64), 0)
    return total + tl.minimum(num_ties, ties) * mass_at(key, MASS_SCALE)


@triton.jit
def mass_at(key, MASS_SCALE: tl.constexpr):
    """Return the mass of a token with ``key``."""
    return mass_of(-key.to(tl.float32, bitcast=True), MASS_SCALE)


@triton.jit
def worst_tile(ranks_ptr, NUM_TILES: tl.constexpr, TILES: tl.constexpr):
    """Return the least of the tiles' greatest ranks."""
    tiles = tl.arange(0, TILES)
    return tl.min(tl.load(ranks_ptr + tiles, mask=tiles < NUM_TILES, other=INF_RANK), 0)


@triton.jit
def row_tile(
    tile, logits_ptr, logits_stride, values_ptr, control_ptr, top, temperature,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the ids of a tile and their scaled values; -inf beyond the vocabulary."""
    ids = tile * TILE + tl.arange(0, TILE)
    values = values_at(logits_ptr, logits_stride, values_ptr, control_ptr, ids, ids < VOCAB, VOCAB)
    return ids, scaled_of(values, top, temperature)


@triton.jit
def row_mass(
    logits_ptr, logits_stride, values_ptr, control_ptr, top, temperature,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, MASS_SCALE: tl.constexpr,
):  # fmt: skip
    """Return the mass of a whole row."""
    total = tl.full([], 0, tl.int64)
    for tile in range(NUM_TILES):
        _, scaled = row_tile(
            tile, logits_ptr, logits_stride, values_ptr, control_ptr, top, temperature, VOCAB, TILE
        )
        total += tl.sum(mass_of(scaled, MASS_SCALE), 0)
    return total


@triton.jit
def list_row(
    list_ptr, bound, ranks_ptr,
    logits_ptr, logits_stride, values_ptr, control_ptr, top, temperature,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """List a row's scaled values up to the key ``bound``, in the order of ids; return the count."""
    count = 0
    for tile in range(NUM_TILES):
        best = value_of(tl.load(ranks_ptr + tile))
        if key_of(scaled_of(best, top, temperature)) <= bound:
            ids, scaled = row_tile(
                tile, logits_ptr, logits_stride, values_ptr, control_ptr, top, temperature,
                VOCAB, TILE,
            )  # fmt: skip
            is_listed = ((key_of(scaled) <= bound) & (ids < VOCAB)).to(tl.int32)
            at = count + tl.cumsum(is_listed, 0) - 1
            tl.store(list_ptr + at, scaled, mask=is_listed != 0)
            count += tl.sum(is_listed, 0)
    tl.debug_barrier()
    return count


@triton.jit
def last_tie(
    key, ties, ranks_ptr,
    logits_ptr, logits_stride, values_ptr, control_ptr, top, temperature,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """Return the id of the last of the first ``ties`` tokens that have ``key``."""
    last_id, seen = 0, tl.full([], 0, tl.int64)
    for tile in range(NUM_TILES):
        best = value_of(tl.load(ranks_ptr + tile))
        if (key_of(scaled_of(best, top, temperature)) <= key) & (seen < ties):
            ids, scaled = row_tile(
                tile, logits_ptr, logits_stride, values_ptr, control_ptr, top, temperature,
                VOCAB, TILE,
            )  # fmt: skip
            is_tie = ((key_of(scaled) == key) & (ids < VOCAB)).to(tl.int64)
            stays = (is_tie != 0) & (seen + tl.cumsum(is_tie, 0) <= ties)
            last_id = tl.maximum(last_id, tl.max(tl.where(stays, ids, 0), 0))
            seen += tl.sum(is_tie, 0)
    return last_id


@triton.jit
def kth_tile(
    list_ptr, k, ranks_ptr, top, temperature,
    NUM_TILES: tl.constexpr, TILES: tl.constexpr, LIST_TILE: tl.constexpr,
):  # fmt: skip
    """Return the key of the k-th best of the tiles' greatest values; a row's k-th is no worse.

    Uses the list's memory as working space.
    """
    tiles = tl.arange(0, TILES)
    inside = tiles < NUM_TILES
    tops = value_of(tl.load(ranks_ptr + tiles, mask=inside, other=0))
    tl.store(list_ptr + tiles, scaled_of(tops, top, temperature), mask=inside)
    tl.debug_barrier()
    key, _ = last_key(list_ptr, NUM_TILES, k, False, 1.0, LIST_TILE)
    tl.debug_barrier()
    return key


@triton.jit
def bound_of(
    list_ptr, ranks_ptr, min_p_key, top_k, top_p,
    logits_ptr, logits_stride, values_ptr, control_ptr, top, temperature,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr,
    MASS_SCALE: tl.constexpr, LIST_TILE: tl.constexpr,
):  # fmt: skip
    """Return a key beyond which no token of a row stays, and the row's mass, or -1 if not needed.

    Uses the list's memory as working space.
    """
    bound, total = min_p_key, tl.full([], -1, tl.int64)
    if (top_k > 0) & (top_k <= NUM_TILES):
        kth = kth_tile(list_ptr, top_k, ranks_ptr, top, temperature, NUM_TILES, TILES, LIST_TILE)
        bound = tl.minimum(bound, kth)
    if (top_k == 0) & (min_p_key == NO_KEY):
        total = row_mass(
            logits_ptr, logits_stride, values_ptr, control_ptr, top, temperature,
            VOCAB, TILE, NUM_TILES, MASS_SCALE,
        )  # fmt: skip
        # A token lighter than an equal share of the mass outside top-p cannot be inside.
        left_out = total - limit_of(total, top_p)
        share = tl.maximum(left_out, 1).to(tl.float32) / (VOCAB * MASS_SCALE)
        if left_out > 0:
            bound = key_of(tl.log(share) - 1e-5)
    return bound, total


@triton.jit
def last_of_list(
    list_ptr, count, low, min_p_key, top_k, top_p, total,
    VOCAB: tl.constexpr, MASS_SCALE: tl.constexpr, LIST_TILE: tl.constexpr,
):  # fmt: skip
    """Return the last key after min-p, top-k and top-p, and how many tokens with it stay."""
    last, ties = min_p_key, tl.full([], VOCAB, tl.int64)
    if top_k > 0:
        count = narrowed(list_ptr, count, low, top_k, False, MASS_SCALE, LIST_TILE)
        key, before = last_key(list_ptr, count, top_k, False, MASS_SCALE, LIST_TILE)
        if key <= last:
            last, ties = key, top_k - before
    if top_p < 1.0:
        if total < 0:
            total = list_mass(list_ptr, count, last, ties, MASS_SCALE, LIST_TILE)
        limit = limit_of(total, top_p)
        count = narrowed(list_ptr, count, low, limit, True, MASS_SCALE, LIST_TILE)
        key, before = last_key(list_ptr, count, limit, True, MASS_SCALE, LIST_TILE)
        if key <= last:
            each = tl.maximum(mass_at(key, MASS_SCALE), 1)
            last, ties = key, (limit - before + each - 1) // each
    return last, ties


@triton.jit
def cut_kernel(
    logits_ptr,  # [num_rows, VOCAB]
    logits_stride,
    values_ptr,  # [num_edited, VOCAB] float32
    controls_ptr,  # [num_draws, NUM_COLUMNS] int64
    cuts_ptr,  # [num_cuts] int32: indices of the draws; -1: unused
    ranks_ptr,  # [num_draws, NUM_TILES] int32
    list_ptr,  # [num_cuts, VOCAB] float32: working space
    kept_ptr,  # [num_draws, 2] int32, out: last key and last id
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES: tl.constexpr,
    MASS_SCALE: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    """Cut one draw's row by top-k, min-p and top-p; write the last key and id that stay."""
    draw = tl.load(cuts_ptr + tl.program_id(0)).to(tl.int64)
    if draw < 0:
        return
    list_ptr += tl.program_id(0).to(tl.int64) * VOCAB
    control_ptr = controls_ptr + draw * NUM_COLUMNS
    ranks_ptr += draw * NUM_TILES
    rank = top_rank(ranks_ptr, NUM_TILES, TILES)
    if not is_sound(rank):
        return
    top, temperature = value_of(rank), number(control_ptr + TEMPERATURE).to(tl.float32)
    top_k, top_p = tl.load(control_ptr + TOP_K), number(control_ptr + TOP_P)
    min_p_key = key_of(number(control_ptr + MIN_P_LOGIT).to(tl.float32))

    bound, total = bound_of(
        list_ptr, ranks_ptr, min_p_key, top_k, top_p,
        logits_ptr, logits_stride, values_ptr, control_ptr, top, temperature,
        VOCAB, TILE, NUM_TILES, TILES, MASS_SCALE, LIST_TILE,
    )  # fmt: skip
    count = list_row(
        list_ptr, bound, ranks_ptr,
        logits_ptr, logits_stride, values_ptr, control_ptr, top, temperature,
        VOCAB, TILE, NUM_TILES,
    )  # fmt: skip
    low = -bound.to(tl.float32, bitcast=True)
    if bound == NO_KEY:
        low = scaled_of(value_of(worst_tile(ranks_ptr, NUM_TILES, TILES)), top, temperature)

    last, ties = last_of_list(
        list_ptr, count, low, min_p_key, top_k, top_p, total, VOCAB, MASS_SCALE, LIST_TILE
    )
    last_id = VOCAB
    if ties < VOCAB:  # the lowest ids with the last key stay
        last_id = last_tie(
            last, ties, ranks_ptr,
            logits_ptr, logits_stride, values_ptr, control_ptr, top, temperature,
            VOCAB, TILE, NUM_TILES,
        )  # fmt: skip
    tl.store(kept_ptr + draw * 2, last)
    tl.store(kept_ptr + draw * 2 + 1, last_id)

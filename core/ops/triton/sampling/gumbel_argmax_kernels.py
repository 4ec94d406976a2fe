"""The Gumbel argmax of a row's tokens, by tiles of the vocabulary: greatest values, then winners.

Values are compared as integers in the order of the floats, so that the order of comparisons does
not matter, and NaN, infinities and zeros of either sign are ordered, too. A winner is one word,
with the rank above the id: the greatest word is the best token, the lowest id in a tie, and an
atomic maximum combines the tiles. If several tokens are wanted, each tile keeps its own best, and
one program per draw merges them. core/sampling/verifier.py, core/sampling/logits_processors.py and
core/sampling/gumbel.py define the results.

Multiplications and additions must not be fused (``enable_fp_fusion=False``): every kernel that
computes a value must round it in the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....sampling import encoded
from .sampling_inputs import COLUMNS

KEY = tl.constexpr(COLUMNS.index("noise_start"))
KIND = tl.constexpr(COLUMNS.index("kind"))
TEMPERATURE = tl.constexpr(COLUMNS.index("temperature"))
MIN_P_LOGIT = tl.constexpr(COLUMNS.index("min_p_logit"))
TOP_K, TOP_P = tl.constexpr(COLUMNS.index("top_k")), tl.constexpr(COLUMNS.index("top_p"))
ROW, EDITED = tl.constexpr(COLUMNS.index("row")), tl.constexpr(COLUMNS.index("edited"))
NUM_COLUMNS = tl.constexpr(len(COLUMNS))
GREEDY, CUT = tl.constexpr(encoded.GREEDY), tl.constexpr(encoded.CUT)

INF_RANK = tl.constexpr(0x7F800000)  # rank of +inf; -inf has -INF_RANK - 1
NAN_RANK = tl.constexpr(0x7FFFFFFF)
LAST_ID = tl.constexpr(0x7FFFFFFF)
# Words that report an error instead of a winner.
NOT_FINITE, ALL_BANNED = tl.constexpr((0x7FFFFFFF << 32) + 1), tl.constexpr((0x7FFFFFFF << 32) + 2)
NO_WINNER = tl.constexpr(-(2**63))

ODD_1, ODD_2 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64), tl.constexpr(0x94D049BB133111EB - 2**64)
LOW_WORD = tl.constexpr(0xFFFFFFFF)
COMPLEMENT_UNIT = tl.constexpr(2.0**-63)
COMPLEMENT_MAX = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def rank_of(values):
    """Return integers in the order of float32 ``values``; zeros are equal, NaN is the greatest."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(values == values, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_RANK)


@triton.jit
def value_of(rank):
    """Return the float32 of a rank."""
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_sound(rank):
    """Whether a row's greatest value, with this rank, is finite."""
    return (rank < INF_RANK) & (rank > -INF_RANK - 1)


@triton.jit
def key_of(scaled):
    """Return the bits of the magnitude of scaled values, which are at most 0, as int32.

    The best value has the least key.
    """
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scaled_of(values, top, temperature):
    """Return ``(values - top) / temperature``; the row's best value, ``top``, becomes 0."""
    return tl.div_rn(values - top, temperature)


@triton.jit
def number(column_ptr):
    """Load a float64 number from a column of the controls."""
    return tl.load(column_ptr).to(tl.float64, bitcast=True)


@triton.jit
def values_at(logits_ptr, logits_stride, values_ptr, control_ptr, ids, mask, VOCAB: tl.constexpr):
    """Return the values of ``ids`` in a draw's row, float32; -inf outside of ``mask``."""
    edited = tl.load(control_ptr + EDITED)
    if edited >= 0:
        values = tl.load(values_ptr + edited * VOCAB + ids, mask=mask, other=-float("inf"))
    else:
        row_ptr = logits_ptr + tl.load(control_ptr + ROW) * logits_stride
        values = tl.load(row_ptr + ids, mask=mask, other=-float("inf")).to(tl.float32)
    return values


@triton.jit
def top_rank(ranks_ptr, NUM_TILES: tl.constexpr, TILES: tl.constexpr):
    """Return a row's greatest rank, from the greatest ranks of its tiles."""
    tiles = tl.arange(0, TILES)
    ranks = tl.load(ranks_ptr + tiles, mask=tiles < NUM_TILES, other=-INF_RANK - 1)
    return tl.max(ranks, 0)


@triton.jit
def gumbel(hashes, key):
    """Return -log(-log(u)) of the noise words, which `core.sampling.gumbel` defines."""
    words = (hashes ^ key) * ODD_1
    words = (words ^ ((words >> 32) & LOW_WORD)) * ODD_2
    complement = tl.abs(words.to(tl.float32)) * COMPLEMENT_UNIT  # 1 - u
    complement = tl.minimum(tl.maximum(complement, COMPLEMENT_UNIT), COMPLEMENT_MAX)
    # -log1p(-complement), which Triton lacks: the logarithm of the rounded 1 - complement is
    # corrected by the ratio of complement to its rounded value (Kahan).
    rounded = 1.0 - complement
    is_tiny = rounded == 1.0
    taken = tl.where(is_tiny, -1.0, rounded - 1.0)
    exponential = tl.where(is_tiny, complement, tl.log(rounded) * (complement / taken))
    return -tl.log(exponential)


@triton.jit
def store_best(words, best_ptr, NUM_BEST: tl.constexpr):
    """Store the ``NUM_BEST`` greatest of ``words``, descending; no two tokens have equal words."""
    for rank in tl.static_range(NUM_BEST):
        best = tl.max(words, 0)
        tl.store(best_ptr + rank, best)
        words = tl.where(words == best, NO_WINNER, words)


@triton.jit
def rank_kernel(
    logits_ptr,  # [num_rows, VOCAB]
    logits_stride,
    values_ptr,  # [num_edited, VOCAB] float32
    controls_ptr,  # [num_draws, NUM_COLUMNS] int64
    ranks_ptr,  # [num_draws, NUM_TILES] int32, out: greatest rank of each tile
    winners_ptr,  # [num_draws] int64, out: NO_WINNER
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """Write the greatest rank in one tile of one draw's row."""
    draw, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    control_ptr = controls_ptr + draw * NUM_COLUMNS
    if tl.load(control_ptr + ROW) < 0:
        return  # an unused draw
    values = values_at(logits_ptr, logits_stride, values_ptr, control_ptr, ids, ids < VOCAB, VOCAB)
    tl.store(ranks_ptr + draw * NUM_TILES + tile, tl.max(rank_of(values), 0))
    if tile == 0:
        tl.store(winners_ptr + draw, NO_WINNER)


@triton.jit
def gumbel_argmax_kernel(
    logits_ptr,  # [num_rows, VOCAB]
    logits_stride,
    values_ptr,  # [num_edited, VOCAB] float32
    controls_ptr,  # [num_draws, NUM_COLUMNS] int64
    ranks_ptr,  # [num_draws, NUM_TILES] int32
    raw_ranks_ptr,  # [num_edited, NUM_TILES] int32: greatest ranks before the edits
    kept_ptr,  # [num_draws, 2] int32: last key and id after the cuts, if KIND is CUT
    hashes_ptr,  # [VOCAB] int64: the part of the noise that depends only on the id
    tile_best_ptr,  # [num_draws, NUM_TILES, NUM_BEST] int64, out: only if NUM_BEST is above 1
    winners_ptr,  # [num_draws] int64, in and out; if NUM_BEST is above 1, only for errors
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES: tl.constexpr,
    NUM_BEST: tl.constexpr,
):
    """Choose the best token, or the ``NUM_BEST`` best, in one tile of one draw's row."""
    draw, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    control_ptr = controls_ptr + draw * NUM_COLUMNS
    if tl.load(control_ptr + ROW) < 0:
        return  # an unused draw
    ranks_ptr += draw * NUM_TILES
    top = top_rank(ranks_ptr, NUM_TILES, TILES)
    raw, edited = top, tl.load(control_ptr + EDITED)
    if edited >= 0:
        raw = top_rank(raw_ranks_ptr + edited * NUM_TILES, NUM_TILES, TILES)
    if not is_sound(raw):
        tl.store(winners_ptr + draw, NOT_FINITE)
        return
    if not is_sound(top):
        tl.store(winners_ptr + draw, ALL_BANNED)
        return
    kind = tl.load(control_ptr + KIND)
    top, temperature = value_of(top), number(control_ptr + TEMPERATURE).to(tl.float32)
    last_key, last_id = key_of(number(control_ptr + MIN_P_LOGIT).to(tl.float32)), VOCAB
    if kind == CUT:
        last_key, last_id = tl.load(kept_ptr + draw * 2), tl.load(kept_ptr + draw * 2 + 1)
    best = value_of(tl.load(ranks_ptr + tile))
    tile_best_ptr += (draw * NUM_TILES + tile) * NUM_BEST
    if (kind != GREEDY) & (key_of(scaled_of(best, top, temperature)) > last_key):
        if NUM_BEST > 1:
            for rank in tl.static_range(NUM_BEST):
                tl.store(tile_best_ptr + rank, NO_WINNER)
        return  # the cuts left no token of this tile
    ids = tile * TILE + tl.arange(0, TILE)
    mask = ids < VOCAB
    values = values_at(logits_ptr, logits_stride, values_ptr, control_ptr, ids, mask, VOCAB)
    if kind != GREEDY:
        scaled = scaled_of(values, top, temperature)
        key = key_of(scaled)
        is_kept = (key < last_key) | ((key == last_key) & (ids <= last_id))
        noise = gumbel(tl.load(hashes_ptr + ids, mask=mask, other=0), tl.load(control_ptr + KEY))
        values = tl.where(is_kept, noise + scaled, -float("inf"))
    winners = (rank_of(values).to(tl.int64) << 32) | (LAST_ID - ids)
    if NUM_BEST > 1:
        store_best(winners, tile_best_ptr, NUM_BEST)
    else:
        tl.atomic_max(winners_ptr + draw, tl.max(winners, 0), sem="relaxed")


@triton.jit
def merge_best_kernel(
    tile_best_ptr,  # [num_draws, NUM_TILES, NUM_BEST] int64, from `gumbel_argmax_kernel`
    winners_ptr,  # [num_draws] int64: an error, or `NO_WINNER`
    controls_ptr,  # [num_draws, NUM_COLUMNS] int64
    best_ptr,  # [num_draws, NUM_BEST] int64, out: descending; an error comes first
    NUM_TILES: tl.constexpr,
    NUM_BEST: tl.constexpr,
    WORDS: tl.constexpr,  # at least NUM_TILES * NUM_BEST
):
    """Merge the best tokens of a draw's tiles into the draw's best."""
    draw = tl.program_id(0).to(tl.int64)
    if tl.load(controls_ptr + draw * NUM_COLUMNS + ROW) < 0:
        return  # an unused draw
    error = tl.load(winners_ptr + draw)
    lanes = tl.arange(0, WORDS)
    tile_best_ptr += draw * NUM_TILES * NUM_BEST
    words = tl.load(tile_best_ptr + lanes, mask=lanes < NUM_TILES * NUM_BEST, other=NO_WINNER)
    if error != NO_WINNER:  # the tiles have written no words
        words = tl.where(lanes == 0, error, NO_WINNER)
    store_best(words, best_ptr + draw * NUM_BEST, NUM_BEST)


@triton.jit
def take_kernel(
    winners_ptr,  # [num_draws] int64, from `gumbel_argmax_kernel`
    sources_ptr,  # [num_rows] int32: index of the row's winner; -1: the row has its token
    token_ids_ptr,  # [num_rows] int32, in and out
    last_id,  # last column of the winners' logits
    names_ptr,  # int64: token ids of the columns
    HAS_NAMES: tl.constexpr,  # whether columns have names; else they are token ids
):
    """Write the token of one row; a word that is an error becomes some id of the vocabulary."""
    row = tl.program_id(0)
    source = tl.load(sources_ptr + row)
    if source >= 0:
        bits = tl.load(winners_ptr + source) & LAST_ID
        token_id = tl.minimum((bits ^ LAST_ID).to(tl.int32), last_id)  # equals LAST_ID - bits
        if HAS_NAMES:
            token_id = tl.load(names_ptr + token_id).to(tl.int32)
        tl.store(token_ids_ptr + row, token_id)

"""Measures or estimates the costs of steps on this machine before the first request.

With a large model on a CPU, measuring passes of many row counts would take as long as answering a
request. So on a CPU costs are estimated from a few matrices, and steps correct them
(cost_model.py). On a GPU they are measured: passes are short, and a pass of each row count must run
once for warm-up anyway.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from math import inf

import torch

from ...core.execution.proposer import Proposer
from ...core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ...core.model.decoder import Decoder, OwnDecoder
from ...core.ops.batch import Segment
from ...core.ops.kv_pool import KVPool
from ...core.ops.machine.device import make_stopwatch
from ...core.ops.row_extras import RowExtras, SegmentState
from ...core.ops.state_pool import DRAFT_ROOM
from ...core.ops.weights import MlpWeights, PackedLinear
from .cost_model import StepProfile

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
HEAD_REQUESTS = (1, 2, 4, 8, 16, 32)
GPU_ROWS = (*ROWS, 256, 512)  # on a GPU, many rows take little longer than one
NEAR, FAR = 32, 1024  # context lengths of the requests of a measurement, in tokens
DRAFTED = 8  # rows of a request with drafts
SECONDS = 0.1  # time limit of one measurement: slow models repeat less often
REPEATS = 6
MOST_GUESSED = 32  # maximum number of rows at which a few matrices are timed
# row counts and request counts of timed passes, if an estimate needs whole passes
TRIED_ROWS, TRIED_REQUESTS = (
    (1, 4, 16),
    (1, 4, 16),
)
SAMPLED_BYTES = 48 << 20  # size of the matrices that are timed: more than caches hold
SAMPLED_TURNS = 4  # number of timings; the best counts, because other work slows some of them
OTHERS_GROWTH = 0.05  # share by which one more row raises the time a pass spends outside matrices
ATTENTION_SHARE = 0.5  # throughput of attention relative to matrix products
TRIED_PRICE = 1e-9  # tiny price of a row in timed drafts: tokens are scored, but no node is dropped
TRIED_SAMPLING = SamplingMetadata(params=TokenSamplingParams(temperature=1.0), seed=0, prompt_len=1)


def profile_step(target: tuple[Decoder, KVPool], proposer: Proposer | None) -> StepProfile:
    """Measure the passes of the target and a proposer; overwrite the content of their KV pools."""
    forward, key_s = profile_pass(*target)
    return StepProfile(forward, {} if proposer is None else profile_proposer(proposer), key_s)


def guess_step(target: tuple[Decoder, KVPool], proposer: Proposer | None) -> StepProfile:
    """Estimate the result of `profile_step` in much less time than measuring it takes.

    Matrix products cause most of the cost of additional rows. So one pass of a single row is timed,
    and some matrices of the model with several row counts. Whole passes of several row counts are
    timed for models with experts or recurrent layers, for decoders other than `OwnDecoder`, and for
    devices other than a CPU. The content of the pools is overwritten.
    """
    forward, key_s = guess_pass(*target)
    if proposer is None:
        return StepProfile(forward, {}, key_s)
    return StepProfile(forward, profile_proposer(proposer, TRIED_REQUESTS, repeats=1), key_s)


def guess_pass(decoder: Decoder, pool: KVPool) -> tuple[dict[int, float], float]:
    """Estimate the result of `profile_pass`: seconds of a pass by its rows, and seconds per key."""
    linears = _sampled_linears(decoder)
    if not linears:
        return profile_pass(decoder, pool, TRIED_ROWS, repeats=1)
    assert isinstance(decoder, OwnDecoder)
    whole, _ = profile_pass(decoder, pool, (1,), repeats=SAMPLED_TURNS)
    sampled = _linear_seconds(decoder, linears)
    weights = [each for layer in decoder.weights.layers for each in layer.linears]
    all_bytes = sum(each.num_bytes for each in (*weights, decoder.weights.lm_head))
    scale = all_bytes / sum(each.num_bytes for each, _ in linears)
    others = max(0.0, whole[1] - scale * sampled[1])
    guessed = {
        rows: scale * seconds + others * (1.0 + OTHERS_GROWTH * (rows - 1))
        for rows, seconds in sampled.items()
    }
    num_weights = scale * sum(each.num_weights for each, _ in linears)
    most = max(sampled)
    products_s = scale * sampled[most] / (most * num_weights)  # seconds of one multiply-add
    heads = [part.heads for part in decoder.layout.parts]
    products = sum(2 * each.num_heads * each.head_dim for each in heads) / len(heads)
    key_s = products_s * products * decoder.config.num_layers / ATTENTION_SHARE
    return guessed, key_s


def _sampled_linears(decoder: Decoder) -> list[tuple[PackedLinear, int]]:
    """Return matrices of some layers, each with its number of columns.

    The list is empty if the time of more rows cannot be estimated from matrices: for models with
    experts or recurrent states, decoders other than `OwnDecoder`, and devices other than a CPU.
    """
    if not isinstance(decoder, OwnDecoder) or decoder.states or decoder.device.type != "cpu":
        return []
    layers = decoder.weights.layers
    if not all(isinstance(layer.mlp, MlpWeights) for layer in layers):
        return []
    found: list[tuple[PackedLinear, int]] = []
    num_bytes = 0
    for layer in layers:
        for each in layer.linears:
            if each in decoder.linear_specs:
                found.append((each, decoder.linear_specs[each].in_features))
                num_bytes += each.num_bytes
        if num_bytes > SAMPLED_BYTES:
            break
    return found


def _linear_seconds(
    decoder: OwnDecoder, linears: Sequence[tuple[PackedLinear, int]]
) -> dict[int, float]:
    """Return the seconds of all products together, by rows: the best of several timings."""
    ops, widths = decoder.ops, {columns for _, columns in linears}
    timed = [rows for rows in rows_to_time(decoder) if rows <= MOST_GUESSED]
    inputs = {width: torch.randn((max(timed), width), dtype=decoder.dtype) for width in widths}
    watch = make_stopwatch(decoder.device)
    best: dict[int, float] = {}
    for _ in range(SAMPLED_TURNS):
        for rows in timed:
            watch.start()
            for weight, columns in linears:
                ops.linear(inputs[columns][: max(rows, ops.min_rows)], weight)
            watch.stop()
            best[rows] = min(watch.seconds(), best.get(rows, inf))
    return best


def profile_proposer(
    proposer: Proposer, requests: Sequence[int] = HEAD_REQUESTS, *, repeats: int = REPEATS
) -> dict[int, float]:
    """Return the seconds of a proposer's pass by the number of requests that draft.

    Each request has a context of `NEAR` tokens. The time includes choosing the tokens. A pass of a
    block head drafts a whole block.
    """
    for _, pool in proposer.models:
        _write_pages(pool, max(requests) * -(-(NEAR + 1) // pool.page_size))
    logs = [pool.states.num_logs for _, pool in proposer.models if pool.states is not None]
    watch = make_stopwatch(proposer.device)
    best: dict[int, float] = {}
    for num_requests in requests:
        if num_requests > min(logs, default=num_requests):
            break
        proposer.try_draft(num_requests, NEAR)
        spent, seconds = 0.0, float("inf")
        for _ in range(repeats):
            if spent > SECONDS:
                break
            watch.start()
            proposer.try_draft(num_requests, NEAR)
            watch.stop()
            spent, seconds = spent + watch.seconds(), min(seconds, watch.seconds())
        best[num_requests] = seconds
    return best


def profile_pass(
    decoder: Decoder,
    pool: KVPool,
    rows: Sequence[int] | None = None,
    *,
    patience: int = 1,
    repeats: int = REPEATS,
) -> tuple[dict[int, float], float]:
    """Return the seconds of a pass by its ``rows``, and the seconds per key.

    All rows of a pass belong to one request with a context of `NEAR` tokens. The seconds per key
    are the time that each token of a request's context adds for each of its rows after the first.
    They are computed from passes with a context of `FAR` tokens. They are 0.0 if the pool has no
    room for that context, or if 1 or `DRAFTED` is not in ``rows``. Layers with a sliding window
    attend to fewer tokens, so for long requests the value is an upper bound. ``patience``: factor
    of the time limit and of the number of repeats.
    """
    longest = min(pool.num_pages * pool.page_size, decoder.config.max_model_len) - 1
    near = min(NEAR, longest // 2)
    requested = [n for n in rows or rows_to_time(decoder) if near + n <= max(1, longest)]
    batches = [_requests(decoder, pool, near, n) for n in requested]
    far = min(FAR, longest - DRAFTED)
    has_far = far > 4 * NEAR and {1, DRAFTED} <= set(requested)
    if has_far:
        batches += [[(far, 1)], [(far, DRAFTED)]]
    seconds = _measure(decoder, pool, batches, _compute, patience, repeats=repeats)
    by_rows = dict(zip(requested, seconds, strict=False))
    if not has_far:
        return by_rows, 0.0
    added_s = (seconds[-1] - seconds[-2]) - (by_rows[DRAFTED] - by_rows[1])
    return by_rows, max(0.0, added_s) / ((DRAFTED - 1) * (far - near))


def rows_to_time(decoder: Decoder) -> tuple[int, ...]:
    """Return the numbers of rows whose passes are timed; other passes are interpolated linearly.

    Kernels on a CPU compute rows in tiles, and one row more than a full tile takes much longer. So
    the numbers of rows that fill one or two tiles are included, and one more than each.
    """
    if decoder.device.type != "cpu":
        return GPU_ROWS
    ends = (decoder.ops.tile_rows, 2 * decoder.ops.tile_rows)
    return tuple(sorted({*ROWS, *ends, *(end + 1 for end in ends)}))


def _requests(decoder: Decoder, pool: KVPool, near: int, num_rows: int) -> list[tuple[int, int]]:
    """Return the requests to time, as (context length, rows).

    On a CPU all rows belong to one request. On a GPU many rows are divided among several requests,
    because a long chunk uses other kernels than the verification of drafts. A model with recurrent
    states gets one request, because the pool may have few states.
    """
    if decoder.device.type == "cpu" or pool.states is not None or num_rows <= DRAFTED:
        return [(near, num_rows)]
    return [(near, DRAFTED)] * (num_rows // DRAFTED)


def _measure(
    decoder: Decoder,
    pool: KVPool,
    batches: Sequence[Sequence[tuple[int, int]]],
    compute: Callable[[Decoder, KVPool, Sequence[Segment]], None],
    patience: int = 1,
    *,
    repeats: int = REPEATS,
) -> list[float]:
    """Return the seconds of a pass of each batch: the best of a few rounds.

    A batch is a list of requests as (context length, rows). The rounds alternate between the
    batches, at least twice unless a pass is slow, so that a slow period of the machine does not
    fall on one batch only.
    """
    vocab_size = decoder.config.vocab_size
    cases = [_segments(pool, requests, vocab_size) for requests in batches]
    page_ids = (page_id for segments in cases for each in segments for page_id in each.page_ids)
    _write_pages(pool, max(page_ids, default=-1) + 1)
    watch = make_stopwatch(decoder.device)
    for segments in cases[:1] if decoder.device.type == "cpu" else cases:
        compute(decoder, pool, segments)  # The first call on a GPU compiles kernels.
    best, spent = [float("inf")] * len(cases), [0.0] * len(cases)
    for turn in range(patience * repeats):
        for index, segments in enumerate(cases):
            if spent[index] > patience * SECONDS and (turn > 1 or min(best) > SECONDS):
                continue
            watch.start()
            compute(decoder, pool, segments)
            watch.stop()
            seconds = watch.seconds()
            best[index], spent[index] = min(best[index], seconds), spent[index] + seconds
    return best


def _segments(pool: KVPool, requests: Sequence[tuple[int, int]], vocab_size: int) -> list[Segment]:
    """Return one segment of random tokens for each request, given as (context length, rows).

    The tokens differ, because in a mixture of experts equal tokens would all use the same experts.
    The generator is seeded, so all passes begin with the same tokens.
    """
    generator = random.Random(0)
    token_ids = iter(lambda: generator.randrange(vocab_size), -1)
    segments = []
    for index, (start, n) in enumerate(requests):
        count = -(-(start + n) // pool.page_size)
        # Each request gets its own pages if the pool has enough: a page that is read twice would
        # come from a processor cache.
        pages = (page % pool.num_pages for page in range(index * count, (index + 1) * count))
        tokens = array("q", islice(token_ids, n))
        extras = None if pool.states is None else RowExtras(state=_drafting(index, start, n))
        segments.append(Segment(tokens, start, array("q", pages), n, extras=extras))
    return segments


def _drafting(index: int, start: int, num_rows: int) -> SegmentState:
    """Return the state of a request for a timed pass of ``num_rows`` rows.

    All rows after the first are draft tokens, unless they are more than one request may draft.
    """
    num_drafts = num_rows - 1 if num_rows - 1 <= DRAFT_ROOM else 0
    return SegmentState(index, index, start + num_rows - num_drafts)


def _write_pages(pool: KVPool, num_pages: int) -> None:
    """Write zeros to the first pages, which the timed passes read.

    The system maps memory that was never written to one shared page of zeros, which stays in the
    processor's cache, so keys would seem to cost no time.
    """
    pool.data[:num_pages].zero_()


def _compute(decoder: Decoder, pool: KVPool, segments: Sequence[Segment]) -> None:
    for segment in segments if pool.states is not None else ():
        _place_state(pool, segment)
    decoder.forward(decoder.batch(segments, page_size=pool.page_size), pool)


def _place_state(pool: KVPool, segment: Segment) -> None:
    """Reset a segment's recurrent state to the position before its rows.

    A pass that was timed before has moved the state.
    """
    state = None if segment.extras is None else segment.extras.state
    if pool.states is not None and state is not None:
        pool.states.set_position(state.slot, state.log, segment.start)

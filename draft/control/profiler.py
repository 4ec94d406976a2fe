"""Costs of steps on this machine, before the first request: measured, or guessed from little.

To measure passes of many widths takes as long as to answer a request with a large model. So costs
are guessed from a few matrices, and steps correct them (cost_model.py); on a GPU, where passes are
short and must be computed once in any case, they are measured.
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
GPU_ROWS = (*ROWS, 256, 512)  # where many rows take little longer than one
NEAR, FAR = 32, 1024  # tokens that the requests of a measurement have behind them
DRAFTED = 8  # rows of a request with drafts
SECONDS = 0.1  # for one measurement: slow models repeat less
REPEATS = 6
MOST_GUESSED = 32  # rows for which a few matrices are timed
TRIED_ROWS, TRIED_REQUESTS = (
    (1, 4, 16),
    (1, 4, 16),
)  # where whole passes must be computed for a guess
SAMPLED_BYTES = 48 << 20  # of matrices: more than caches hold
SAMPLED_TURNS = 4  # of which the best counts: a start has a machine to itself only in part
OTHERS_GROWTH = 0.05  # that one more row adds to what a pass of one takes besides its matrices
ATTENTION_SHARE = 0.5  # of the rate of matrix products, that attention reaches
TRIED_PRICE = 1e-9  # of a row in drafts that are timed: tokens are raced for, none is too dear
TRIED_SAMPLING = SamplingMetadata(params=TokenSamplingParams(temperature=1.0), seed=0, prompt_len=1)


def profile_step(target: tuple[Decoder, KVPool], proposer: Proposer | None) -> StepProfile:
    """Measure the target and a proposer on their pools, whose content is void afterwards."""
    forward, key_s = profile_pass(*target)
    return StepProfile(forward, {} if proposer is None else profile_proposer(proposer), key_s)


def guess_step(target: tuple[Decoder, KVPool], proposer: Proposer | None) -> StepProfile:
    """Guess what `profile_step` would measure, in a small part of the time.

    A pass of one row is timed, and some matrices of the model at several widths: they are most of
    what more rows cost. Experts, recurrent layers and models without matrices of ours need passes
    of more rows. Content of the pools is void afterwards.
    """
    forward, key_s = guess_pass(*target)
    if proposer is None:
        return StepProfile(forward, {}, key_s)
    return StepProfile(forward, profile_proposer(proposer, TRIED_REQUESTS, repeats=1), key_s)


def guess_pass(decoder: Decoder, pool: KVPool) -> tuple[dict[int, float], float]:
    """Guess what `profile_pass` would measure."""
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
    products_s = scale * sampled[most] / (most * num_weights)  # of one weight and one activation
    heads = [part.heads for part in decoder.layout.parts]
    products = sum(2 * each.num_heads * each.head_dim for each in heads) / len(heads)
    key_s = products_s * products * decoder.config.num_layers / ATTENTION_SHARE
    return guessed, key_s


def _sampled_linears(decoder: Decoder) -> list[tuple[PackedLinear, int]]:
    """Matrices of some layers, each with its columns.

    None of models whose costs by rows follow from something else.
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
    """Seconds of all these matrices once, by rows: the best of some turns."""
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
    """Seconds of a proposer's pass by the requests that draft, each behind `NEAR` tokens.

    Of a block head's pass, a whole block. With the choice of the tokens.
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
    """Seconds of a pass by its ``rows``, all of them one request's behind `NEAR` tokens.

    And what a token behind a request adds for each of its rows after the first: `DRAFTED` rows
    behind `FAR` tokens are compared. 0.0 if the pool has no room for so many, or if passes of 1 and
    of `DRAFTED` rows are not among those that are timed. Layers of a window
    stop attending further back: for requests longer than both, it is an upper bound. With more
    ``patience`` measuring takes so many times as long, and is disturbed less.
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
    """Numbers of rows whose passes are timed; between them a pass costs what a line says.

    On a CPU a pass costs a step more where a tile of rows ends, so the first two ends are timed.
    """
    if decoder.device.type != "cpu":
        return GPU_ROWS
    ends = (decoder.ops.tile_rows, 2 * decoder.ops.tile_rows)
    return tuple(sorted({*ROWS, *ends, *(end + 1 for end in ends)}))


def _requests(decoder: Decoder, pool: KVPool, near: int, num_rows: int) -> list[tuple[int, int]]:
    """The requests to time, as (tokens behind, rows): one; on a GPU several for many rows.

    There a long chunk has other kernels than the verification of drafts. Of recurrent states there
    may not be so many.
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
    """Seconds of a pass of each batch, of requests by their (tokens behind, rows): the best of a
    few rounds, at least two where a pass is not slow itself, so that a slow spell of the machine
    harms no batch alone.
    """
    vocab_size = decoder.config.vocab_size
    cases = [_segments(pool, requests, vocab_size) for requests in batches]
    page_ids = (page_id for segments in cases for each in segments for page_id in each.page_ids)
    _write_pages(pool, max(page_ids, default=-1) + 1)
    watch = make_stopwatch(decoder.device)
    for segments in cases[:1] if decoder.device.type == "cpu" else cases:
        compute(decoder, pool, segments)  # a GPU compiles kernels when they are first called
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
    """Rows of random tokens, the first ones the same in every pass: of a mixture of experts each
    row reads experts of its own, as rows of drafts do; equal tokens would all read the same ones.
    """
    generator = random.Random(0)
    token_ids = iter(lambda: generator.randrange(vocab_size), -1)
    segments = []
    for index, (start, n) in enumerate(requests):
        count = -(-(start + n) // pool.page_size)
        # Pages of its own, where there are enough: read twice they would come from a near cache.
        pages = (page % pool.num_pages for page in range(index * count, (index + 1) * count))
        tokens = array("q", islice(token_ids, n))
        extras = None if pool.states is None else RowExtras(state=_drafting(index, start, n))
        segments.append(Segment(tokens, start, array("q", pages), n, extras=extras))
    return segments


def _drafting(index: int, start: int, num_rows: int) -> SegmentState:
    """The state of a request that verifies drafts; of a chunk, where there are too many rows."""
    num_drafts = num_rows - 1 if num_rows - 1 <= DRAFT_ROOM else 0
    return SegmentState(index, index, start + num_rows - num_drafts)


def _write_pages(pool: KVPool, num_pages: int) -> None:
    """Write the first pages, which passes will read.

    Until then the system maps all of them to one page of zeros, which stays in the processor's
    cache: keys would seem to cost nothing.
    """
    pool.data[:num_pages].zero_()


def _compute(decoder: Decoder, pool: KVPool, segments: Sequence[Segment]) -> None:
    for segment in segments if pool.states is not None else ():
        _place_state(pool, segment)
    decoder.forward(decoder.batch(segments, page_size=pool.page_size), pool)


def _place_state(pool: KVPool, segment: Segment) -> None:
    """Make a segment's state stand before its rows: a chunk that was timed has moved it on."""
    state = None if segment.extras is None else segment.extras.state
    if pool.states is not None and state is not None:
        pool.states.stand_in(state.slot, state.log, segment.start)

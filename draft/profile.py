"""What a step costs on this machine, measured before the first request comes.

A pass over n rows takes about ``rows(n) + base``: the first part depends on how many rows are
computed, drafts included; the second on the requests that take part and on how far back they
look, whatever is drafted. Only the first decides how much to draft; the second must be known to
tell what that is worth.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ..core.batch import Segment
from ..core.kv_pool import KVPool
from ..core.model.decoder import Decoder
from ..core.ops.device import make_stopwatch
from .costs import LookBack, StepProfile

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
GPU_ROWS = (*ROWS, 256, 512)  # where many rows take little longer than one
NEAR, FAR = 32, 512  # tokens that the requests of a measurement look back on
MANY = 8  # requests
DRAFTED = 8  # rows of a request with drafts
SECONDS = 0.1  # for one measurement: slow models repeat less
REPEATS = 6


def profile_step(
    target: tuple[Decoder, KVPool], draft: tuple[Decoder, KVPool] | None
) -> StepProfile:
    """Measure both models on the pages of their own pools, whose content is void afterwards."""
    rows, look_back = profile_pass(*target)
    if draft is None:
        return StepProfile(rows, look_back=look_back)
    draft_rows, draft_look_back = profile_pass(*draft)
    return StepProfile(rows, draft_rows, look_back, draft_look_back)


def profile_pass(decoder: Decoder, pool: KVPool) -> tuple[dict[int, float], LookBack]:
    """Seconds of a pass by its rows, one request's, and what other requests and context add."""
    longest = min(pool.num_pages * pool.page_size, decoder.config.max_model_len) - 1
    far = min(FAR, longest - 1)
    near = max(0, min(NEAR, far // 2))
    asked = [n for n in _rows(decoder) if near + n <= max(1, longest)]
    cases = [(1, far), (MANY, near), (MANY, far)] if 1 in asked and far > near else []
    batches = [_requests(decoder, near, n) for n in asked] + [[(back, 1)] * n for n, back in cases]
    seconds = _measure(decoder, pool, batches)
    rows = dict(zip(asked, seconds, strict=False))
    if not cases:
        return rows, LookBack()
    work = [[count - 1, back - near, count * back - near] for count, back in cases]
    more = [each - rows[1] for each in seconds[len(asked) :]]
    found = np.linalg.lstsq(np.array(work, dtype=float), np.array(more), rcond=None)[0]
    return rows, LookBack(*(max(0.0, float(value)) for value in found))


def _rows(decoder: Decoder) -> tuple[int, ...]:
    return ROWS if decoder.device.type == "cpu" else GPU_ROWS


def _requests(decoder: Decoder, near: int, num_rows: int) -> list[tuple[int, int]]:
    """Whose rows to time: one request's; of many rows on a GPU, as drafts of several have them.

    There a long chunk takes other kernels than verification does.
    """
    if decoder.device.type == "cpu" or num_rows <= DRAFTED:
        return [(near, num_rows)]
    return [(near, DRAFTED)] * (num_rows // DRAFTED)


def _measure(
    decoder: Decoder, pool: KVPool, batches: Sequence[Sequence[tuple[int, int]]]
) -> list[float]:
    """Seconds of a pass of each batch, of requests by their (tokens behind, rows): the best of a
    few rounds. A spell in which the machine is slow so harms no batch alone.
    """
    cases = [_segments(pool, requests) for requests in batches]
    watch = make_stopwatch(decoder.device)
    for segments in cases[:1] if decoder.device.type == "cpu" else cases:
        _compute(decoder, pool, segments)  # a GPU compiles kernels when they are first called
    best, spent = [float("inf")] * len(cases), [0.0] * len(cases)
    for _ in range(REPEATS):
        for index, segments in enumerate(cases):
            if spent[index] > SECONDS:
                continue
            watch.start()
            _compute(decoder, pool, segments)
            watch.stop()
            seconds = watch.seconds()
            best[index], spent[index] = min(best[index], seconds), spent[index] + seconds
    return best


def _segments(pool: KVPool, requests: Sequence[tuple[int, int]]) -> list[Segment]:
    segments = []
    for index, (start, n) in enumerate(requests):
        count = -(-(start + n) // pool.page_size)
        # Pages of its own, where there are enough: read twice they would come from a near cache.
        pages = (page % pool.num_pages for page in range(index * count, (index + 1) * count))
        segments.append(Segment(array("q", [0] * n), start, array("q", pages), n))
    return segments


def _compute(decoder: Decoder, pool: KVPool, segments: Sequence[Segment]) -> None:
    decoder.forward(decoder.batch(segments, page_size=pool.page_size), pool)

"""Rows that C lays out from records are the rows of `build_batch`, byte for byte."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from foretoken.core.execution.step_layout import (
    StepLayout,
    cut_to_spare_pages,
    request_segments,
)
from foretoken.core.interface.draft import NO_DRAFT, Draft
from foretoken.core.interface.plan import ScheduledExtras, ScheduledRequest
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.ops.batch import RaggedBatch, build_batch
from foretoken.core.ops.rows.row_table import RowTable
from foretoken.core.ops.rows.step_inputs import lay_out, rows_library
from support.draft_trees import random_paths, tree_of

VOCAB = 50


def scheduled_of(
    rng: random.Random, page_size: int, pages: list[int], draft: Draft
) -> ScheduledRequest:
    """A decode, a chunk or the last chunk of a prompt, and now and then one that is ahead."""
    stop = rng.choice([1, 2, 30, 200, rng.randrange(1, 700)])
    is_decode = rng.random() < 0.7
    start = stop - 1 if is_decode else rng.randrange(stop)
    length = stop if is_decode or rng.random() < 0.5 else stop + 3
    is_ahead = is_decode and stop > 1 and not draft.token_ids and rng.random() < 0.2
    count = -(-(stop + len(draft.token_ids)) // page_size) + rng.randrange(2)
    num_spare = rng.randrange(-(-len(draft.token_ids) // page_size) + 2)
    wants = rng.random() < 0.1
    return ScheduledRequest(
        request_id=str(rng.random()),
        tokens=array("q", [rng.randrange(VOCAB) for _ in range(length - is_ahead)]),
        start=start,
        stop=stop,
        page_ids=array("q", [pages.pop() for _ in range(count)]),
        sampling=SamplingMetadata(
            params=TokenSamplingParams(prompt_logprobs=1 if wants else None),
            seed=1,
            prompt_len=max(1, start + rng.randrange(3)) if is_decode else length,
        ),
        spare_page_ids=array("q", [pages.pop() for _ in range(num_spare)]),
        is_ahead=is_ahead,
    )


def random_step(
    rng: random.Random, num_requests: int, page_size: int
) -> tuple[list[ScheduledRequest], list[Draft]]:
    pages = list(range(2**16))
    rng.shuffle(pages)
    requests, drafts = [], []
    for _ in range(num_requests):
        kind, size = rng.choice(["none", "chain", "tree"]), rng.randrange(1, 9)
        draft = NO_DRAFT
        if kind == "chain":
            draft = Draft.of(array("q", [rng.randrange(VOCAB) for _ in range(size)]), "a")
        elif kind == "tree":
            right = [rng.randrange(VOCAB) for _ in range(5)]
            draft = tree_of(random_paths(rng, right, size, VOCAB))
        scheduled = scheduled_of(rng, page_size, pages, draft)
        if not scheduled.samples:
            draft = NO_DRAFT
        requests.append(scheduled)
        drafts.append(cut_to_spare_pages(draft, scheduled, page_size))
    return requests, drafts


def oracle(
    requests: Sequence[ScheduledRequest], drafts: Sequence[Draft], page_size: int, min_rows: int
) -> RaggedBatch:
    segments = []
    for scheduled, draft in zip(requests, drafts, strict=True):
        tokens = scheduled.tokens[scheduled.start : scheduled.stop]
        tokens.extend([0] * scheduled.is_ahead)
        own = request_segments(scheduled, tokens, draft, page_size, samples=scheduled.samples)
        segments.extend(own)
    return build_batch(segments, page_size=page_size, device="cpu", min_rows=min_rows)


def laid_out(layout: StepLayout, min_rows: int) -> RaggedBatch:
    library = rows_library()
    assert library is not None
    assert layout.rows is not None
    assert not layout.segments
    return lay_out(layout.rows, library, device="cpu", min_rows=min_rows)


@pytest.mark.parametrize("seed", range(60))
def test_random_steps_have_the_bytes_of_their_segments(seed: int) -> None:
    rng = random.Random(seed)
    page_size, min_rows = rng.choice([1, 4, 16]), rng.choice([1, 8])
    num_requests = rng.choice([1, 2, 5, 64, 300] if seed % 10 == 0 else [1, 2, 5, 20])
    requests, drafts = random_step(rng, num_requests, page_size)
    layout = StepLayout.of(requests, drafts, page_size)
    found, wanted = laid_out(layout, min_rows), oracle(requests, drafts, page_size, min_rows)
    for field in fields(RaggedBatch):
        mine, its = getattr(found, field.name), getattr(wanted, field.name)
        if isinstance(its, torch.Tensor | np.ndarray):
            assert mine.dtype == its.dtype, field.name
            assert mine.tolist() == its.tolist(), field.name
        else:
            assert mine == its, field.name
    assert layout.num_rows == int(wanted.lens.sum())


def test_the_runs_of_logits_are_those_of_the_segments() -> None:
    rng = random.Random(7)
    requests, drafts = random_step(rng, 40, 4)
    pairs = [pair for pair in zip(requests, drafts, strict=True) if pair[0].samples]
    pairs = [pair for pair in pairs if pair[0].sampling.params.prompt_logprobs is None]
    layout = StepLayout.of(*zip(*pairs, strict=True), page_size=4)
    plan = layout.sampling_plan(len(layout.sampled_rows))
    assert plan is not None
    segments = [
        segment
        for scheduled, draft in pairs
        for segment in request_segments(scheduled, array("q", [0]), draft, 4, samples=True)
    ]
    assert plan.counts == [segment.num_logits for segment in segments]
    rows = iter(layout.sample_rows())
    for last, count in zip(plan.rows, plan.counts, strict=True):
        positions = [next(rows).position for _ in range(count)]
        assert positions == list(range(last.position - count + 1, last.position + 1))


def test_a_request_with_extras_is_laid_out_as_segments() -> None:
    requests, drafts = random_step(random.Random(1), 3, 4)
    requests[1] = replace(requests[1], extras=ScheduledExtras(num_packed_away=0))
    layout = StepLayout.of(requests, drafts, 4)
    assert layout.rows is None
    assert len(layout.segments) >= 3


def test_a_row_without_a_page_is_refused() -> None:
    library, rows = rows_library(), RowTable(4)
    assert library is not None
    rows.add(array("q", [1]), 3, 1, array("q", [7]))
    lay_out(rows, library, device="cpu", min_rows=1)
    rows.add(array("q", [1]), 4, 1, array("q", [8]))
    rows.add(array("q", [1]), 0, 1, array("q", [9, 9]))
    with pytest.raises(ValueError, match="has no page"):
        lay_out(rows, library, device="cpu", min_rows=1)

"""StepBisection: runs a failed step again in parts until the failing rows are known.

The rows of a plan may be computed again: their KV goes to the same positions of the same pages, and
the noise of a token is a function of its position. The parts have no drafts: drafts may be what
failed, and no answer depends on them.
"""

from __future__ import annotations

import traceback
from array import array
from collections.abc import Sequence

from msgspec.structs import replace

from ..interface.sampling_params import TokenSamplingParams
from ..interface.step import (
    LEAST_CHUNK,
    NO_DRAFT,
    NO_PAGES,
    PlanRow,
    SamplingMetadata,
    StepPlan,
    num_chunk_tokens,
)

_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "ALLOC_FAILED")
_GPU_FAILED = ("CUDA error", "Error [CUDA]")  # in errors of torch and Triton


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether a step failed for lack of memory; torch reports it in several ways."""
    if isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(failure) for words in _OUT_OF_MEMORY)


def may_have_lost_gpu(failure: BaseException) -> bool:
    """Whether a GPU refused a call: after a bad access it refuses every later one, too."""
    return any(words in str(failure) for words in _GPU_FAILED) and not is_out_of_memory(failure)


def forget_frames(failure: BaseException | None) -> None:
    """Release what the frames of a failure hold: the next run may need that memory."""
    seen: set[int] = set()  # causes may go round in a circle
    while failure is not None and id(failure) not in seen:
        seen.add(id(failure))
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__


class StepBisection:
    """Decides which part of a failed plan is run next: halves of halves, down to single rows.

    One failing row among n is found in 2 log2 n runs. Each part that succeeds earns one more run;
    when all are used up, the remaining parts are run once and fail as a whole. If memory ran out
    over prompt chunks, half of their tokens are run; the others wait for a later step.
    """

    def __init__(self, plan: StepPlan, failure: Exception) -> None:
        rows = [_without_drafts(row) for row in plan.rows]
        self.failure = failure  # the last one
        self.num_passed = 0  # parts that succeeded
        self.failing_rows: list[PlanRow] = []
        self._plan = plan
        self._parts = _smaller(rows, failure) or [rows]  # a stack: the next one is the last
        self._failures_left = 1 + 2 * (len(rows) - 1).bit_length()

    def next(self) -> StepPlan | None:
        """The part to run now; None at the end. Call `passed` or `failed` after it.

        Each part repeats the new pages and released requests: the failed run may not have read
        them.
        """
        return replace(self._plan, rows=self._parts.pop()) if self._parts else None

    def passed(self) -> None:
        """The part succeeded: searching on is worth another run."""
        self.num_passed += 1
        self._failures_left += 1

    def failed(self, part: StepPlan, failure: Exception) -> None:
        """The part raised: run smaller parts next, or its rows are the failing ones."""
        self.failure = failure
        self._failures_left -= not is_out_of_memory(failure)  # lack of memory has a rule of its own
        parts = _smaller(part.rows, failure)
        if self._failures_left > 0 and parts:
            self._parts += parts
            return
        self.failing_rows += part.rows

    def health_check(self, page_size: int) -> StepPlan:
        """A one-token dummy step, to check that the model works at all.

        It writes into the last page of a failing row, which is not published.
        """
        last = self.failing_rows[-1]
        page = last.page_ids[(last.stop - 1) // page_size]
        row = PlanRow(
            request_id="",
            tokens=array("q", [0]),
            start=0,
            stop=1,
            page_ids=array("q", [page]),
            sampling=SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=1),
        )
        return replace(self._plan, rows=[row], is_plain=True)

    def failing_plan(self) -> StepPlan:
        """The plan with the failing rows alone."""
        return replace(self._plan, rows=self.failing_rows)


def _smaller(rows: Sequence[PlanRow], failure: Exception) -> list[list[PlanRow]]:
    """The parts to run instead, the last one first; none if the rows cannot be split further."""
    num_tokens = num_chunk_tokens(rows)
    if is_out_of_memory(failure) and num_tokens > LEAST_CHUNK:
        chunks = _cut(rows, max(LEAST_CHUNK, num_tokens // 2))
        decodes = [row for row in rows if row.stop - row.start == 1]
        return [chunks, decodes] if decodes else [chunks]
    if len(rows) < 2:
        return []
    half = len(rows) // 2
    return [list(rows[half:]), list(rows[:half])]


def _cut(rows: Sequence[PlanRow], num_tokens: int) -> list[PlanRow]:
    """Cut chunks to ``num_tokens`` in all; a row that gets none waits for a later step."""
    kept = []
    for row in rows:
        if row.stop - row.start > 1 and num_tokens > 0:
            stop = min(row.stop, row.start + num_tokens)
            num_tokens -= stop - row.start
            kept.append(replace(row, stop=stop))
    return kept


def drafts(row: PlanRow) -> bool:
    """Whether this row has drafts."""
    return bool(row.max_draft or row.draft.token_ids)


def _without_drafts(row: PlanRow) -> PlanRow:
    if not drafts(row):
        return row
    return replace(row, draft=NO_DRAFT, max_draft=0, spare_page_ids=NO_PAGES)

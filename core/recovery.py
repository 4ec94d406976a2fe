"""Recovery: a step that raised, run again in parts until it is known who is to blame.

The rows of a plan may be computed again: their KV goes to the same positions of the same pages, and
the noise of a token is a function of its position. The parts go without drafts, which may be what
failed: no answer depends on them.
"""

from __future__ import annotations

import traceback
from array import array
from collections.abc import Sequence

from msgspec.structs import replace

from .params import SamplingParams
from .step import LEAST_CHUNK, NO_DRAFT, PlanRow, RowSampling, StepPlan, num_chunk_tokens

_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "ALLOC_FAILED")
_GPU_FAILED = ("CUDA error", "Error [CUDA]")  # in what torch and Triton say


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether a step failed for want of memory; torch says so in several ways."""
    if isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(failure) for words in _OUT_OF_MEMORY)


def may_have_lost_gpu(failure: BaseException) -> bool:
    """Whether a GPU refused a call: after a bad access it refuses every later one, too."""
    return any(words in str(failure) for words in _GPU_FAILED) and not is_out_of_memory(failure)


def forget_frames(failure: BaseException | None) -> None:
    """Let go of what the frames of a failure hold: the next run may need that memory."""
    seen: set[int] = set()  # causes may go round in a circle
    while failure is not None and id(failure) not in seen:
        seen.add(id(failure))
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__


class Retrial:
    """Decides what of a failed plan is run next: halves of halves, until single rows remain.

    One culprit among n rows is found in 2 log2 n runs. Those that come through earn as many more;
    when these are used up, parts are run once as they are, and are to blame as a whole. Where
    memory ran out over chunks of prompts, half as many of their tokens are run; the rest of them
    waits for a later step.
    """

    def __init__(self, plan: StepPlan, failure: Exception) -> None:
        rows = [_without_drafts(row) for row in plan.rows]
        self.failure = failure  # the last one
        self.num_passed = 0  # parts that came through
        self.culprits: list[PlanRow] = []
        self._plan = plan
        self._parts = _smaller(rows, failure) or [rows]  # a stack: the next one is the last
        self._failures_left = 1 + 2 * (len(rows) - 1).bit_length()

    def next(self) -> StepPlan | None:
        """The part to run now; None at the end. It ends in `passed` or in `failed`.

        Each part tells of fresh pages and of those who departed: the failed run may not have.
        """
        return replace(self._plan, rows=self._parts.pop()) if self._parts else None

    def passed(self) -> None:
        """It came through: to look on is worth a run."""
        self.num_passed += 1
        self._failures_left += 1

    def failed(self, part: StepPlan, failure: Exception) -> None:
        """It raised: smaller parts come next, or its rows are to blame."""
        self.failure = failure
        self._failures_left -= not is_out_of_memory(failure)  # memory is tried out by its own rule
        parts = _smaller(part.rows, failure)
        if self._failures_left > 0 and parts:
            self._parts += parts
            return
        self.culprits += part.rows

    def probe(self, page_size: int) -> StepPlan:
        """One token of nobody's, to see whether the model computes and chooses at all.

        It is written where a culprit computed last: into a page of its own, that nobody will read.
        """
        last = self.culprits[-1]
        page = last.page_ids[(last.stop - 1) // page_size]
        row = PlanRow(
            request_id="",
            tokens=array("q", [0]),
            start=0,
            stop=1,
            page_ids=array("q", [page]),
            sampling=RowSampling(params=SamplingParams(), seed=0, prompt_len=1),
        )
        return replace(self._plan, rows=[row], is_plain=True)

    def blamed(self) -> StepPlan:
        """The plan with the culprits alone."""
        return replace(self._plan, rows=self.culprits)


def _smaller(rows: Sequence[PlanRow], failure: Exception) -> list[list[PlanRow]]:
    """What to run instead, the last part first; nothing where rows cannot be told apart further."""
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
    """The first tokens of their chunks; a row that gets none waits for a later step."""
    kept = []
    for row in rows:
        if row.stop - row.start > 1 and num_tokens > 0:
            stop = min(row.stop, row.start + num_tokens)
            num_tokens -= stop - row.start
            kept.append(replace(row, stop=stop))
    return kept


def drafts(row: PlanRow) -> bool:
    """Whether anything is guessed in this row."""
    return bool(row.max_draft or row.branches or row.draft.token_ids)


def _without_drafts(row: PlanRow) -> PlanRow:
    if not drafts(row):
        return row
    return replace(row, draft=NO_DRAFT, max_draft=0, branches=())

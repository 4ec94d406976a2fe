"""StepBisection: runs a failed step again in parts until the failing requests are known.

Most requests of a plan can be computed again: their KV is written to the same slots, and the
sampling noise depends only on seed and position. The parts have no drafts: a draft may be the cause
of the failure, and no answer depends on drafts. A prompt chunk of a model with recurrent states
cannot be run again, because the state may already include some rows of the chunk.
"""

from __future__ import annotations

import traceback
from array import array
from collections.abc import Sequence

from msgspec.structs import replace

from ..errors import RankLost, is_out_of_memory
from ..interface.draft import NO_DRAFT_PLAN
from ..interface.extras.branches import chunk_stop
from ..interface.plan import (
    NO_PAGES,
    PLAIN,
    ScheduledExtras,
    ScheduledRequest,
    StateUse,
    StepPlan,
)
from ..interface.sampling import SamplingMetadata, TokenSamplingParams
from ..scheduling.chunk_budget import LEAST_CHUNK, num_chunk_tokens

_GPU_FAILED = ("CUDA error", "Error [CUDA]")  # found in error texts of torch and of Triton


def may_have_lost_model(failure: BaseException) -> bool:
    """Whether all later steps may fail, too, because a rank or the GPU is lost.

    For example, after an illegal memory access a GPU refuses every later call.
    """
    if isinstance(failure, RankLost):
        return True
    return any(words in str(failure) for words in _GPU_FAILED) and not is_out_of_memory(failure)


def forget_frames(failure: BaseException | None) -> None:
    """Drop the local variables in the tracebacks of ``failure``, because they may hold memory."""
    seen: set[int] = set()  # guards against a cycle of causes
    while failure is not None and id(failure) not in seen:
        seen.add(id(failure))
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__


class StepBisection:
    """Search for the failing requests of a plan: it runs halves, then quarters, down to requests.

    One failing request among n is found in about 2 log2 n runs. The number of failed runs is
    limited, and each part that succeeds allows one more. At the limit, a part that fails is not
    split further, and all its requests count as failing. If memory ran out in a step with prompt
    chunks, only half of their tokens are run; the rest waits for a later step. ``left_out``:
    requests that are not run again, because their recurrent state may have changed.
    """

    def __init__(self, plan: StepPlan, failure: Exception) -> None:
        self.left_out = [each for each in plan.requests if _moved_state(each)]
        requests = [_without_drafts(each) for each in plan.requests if not _moved_state(each)]
        self._may_lack_memory = is_out_of_memory(failure) and (
            num_chunk_tokens(plan.requests) > LEAST_CHUNK
        )
        self.failure = failure  # the latest error
        self.num_passed = 0  # number of parts that succeeded
        self.failing_requests: list[ScheduledRequest] = []
        self._plan = plan
        smaller = [] if self.left_out else _splits(requests, failure)
        # a stack: the next part is the last item
        self._parts = smaller or ([requests] if requests else [])
        self._failures_left = 1 + 2 * max(0, len(requests) - 1).bit_length()

    def next(self) -> StepPlan | None:
        """Return the part of the plan to run now, or None if the search has ended.

        The caller must report the outcome with `passed` or `failed`. Each part has all new pages
        and released requests of the plan, because the failed run may not have processed them.
        """
        return replace(self._plan, requests=self._parts.pop()) if self._parts else None

    def passed(self) -> None:
        """Record that the part of `next` succeeded, which allows one more failed run."""
        self.num_passed += 1
        self._failures_left += 1

    def failed(self, part: StepPlan, failure: Exception) -> None:
        """Record that ``part`` raised ``failure``: split it, or count its requests as failing."""
        self.failure = failure
        self._failures_left -= not is_out_of_memory(failure)  # a lack of memory is not counted
        parts = _splits(part.requests, failure)
        if self._failures_left > 0 and parts:
            self._parts += parts
            return
        self.failing_requests += part.requests

    def health_check(self, page_size: int) -> StepPlan:
        """Return a dummy step of one token, which shows whether the model still works.

        The step writes only to the last page of a failing request and to its recurrent state, which
        no other request uses.
        """
        last = (self.failing_requests or self.left_out)[-1]
        state = last.extras.state
        page = last.page_ids[(last.stop - 1 - last.extras.num_packed_away) // page_size]
        scheduled = ScheduledRequest(
            request_id="",
            tokens=array("q", [0]),
            start=0,
            stop=1,
            page_ids=array("q", [page]),
            sampling=SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=1),
            extras=PLAIN
            if state is None
            else ScheduledExtras(state=StateUse(state.slot, state.log)),
        )
        return replace(self._plan, requests=[scheduled], is_plain=True)

    def failing_plan(self) -> StepPlan:
        """Return the plan with only its failing requests."""
        return replace(self._plan, requests=self.failing_requests)

    def left_out_plan(self) -> StepPlan:
        """Return the plan with only the requests in ``left_out``."""
        return replace(self._plan, requests=self.left_out)

    @property
    def is_explained(self) -> bool:
        """Whether a failing request or a lack of memory explains the failure of the step."""
        return bool(self.failing_requests) or self._may_lack_memory


def _splits(
    requests: Sequence[ScheduledRequest], failure: Exception
) -> list[list[ScheduledRequest]]:
    """Return the smaller parts of ``requests`` in reverse order; empty for a single request.

    If memory ran out, the parts are shorter prompt chunks, and the decoding requests.
    """
    num_tokens = num_chunk_tokens(requests)
    if is_out_of_memory(failure) and num_tokens > LEAST_CHUNK:
        chunks = _cut(requests, max(LEAST_CHUNK, num_tokens // 2))
        decodes = [scheduled for scheduled in requests if scheduled.stop - scheduled.start == 1]
        if num_chunk_tokens(chunks) < num_tokens:  # rows of an image may have to stay together
            return [chunks, decodes] if decodes else [chunks]
    if len(requests) < 2:
        return []
    half = len(requests) // 2
    return [list(requests[half:]), list(requests[:half])]


def _cut(requests: Sequence[ScheduledRequest], num_tokens: int) -> list[ScheduledRequest]:
    """Return the prompt chunks of ``requests``, cut to ``num_tokens`` tokens in all.

    Chunks for which no tokens are left are dropped and wait for a later step. A request whose KV is
    packed in this step keeps at least one token: otherwise a later plan would pack its KV again.
    """
    kept = []
    for scheduled in requests:
        extras = scheduled.extras
        if scheduled.stop - scheduled.start > 1 and (num_tokens > 0 or extras.pack is not None):
            stop = min(scheduled.stop, scheduled.start + max(1, num_tokens))
            stop = chunk_stop(extras.images, extras.branches, scheduled.start, stop)
            num_tokens -= stop - scheduled.start
            kept.append(replace(scheduled, stop=stop))
    return kept


def _moved_state(scheduled: ScheduledRequest) -> bool:
    """Whether a failed step may have left a request's recurrent state in the middle of a chunk."""
    return scheduled.extras.state is not None and scheduled.stop - scheduled.start > 1


def drafts(scheduled: ScheduledRequest) -> bool:
    """Whether the request has a draft in this step."""
    return scheduled.draft_plan.num_rows > 0


def _without_drafts(scheduled: ScheduledRequest) -> ScheduledRequest:
    if not drafts(scheduled):
        return scheduled
    return replace(scheduled, draft_plan=NO_DRAFT_PLAN, spare_page_ids=NO_PAGES)

"""StepBisection: runs a failed step again in parts until the failing requests are known.

Most requests of a plan can be computed again: their KV is written to the same slots, and the
sampling noise depends only on the position. The parts have no drafts: a draft may be the cause of
the failure, and no answer depends on drafts. A prompt chunk of a model with recurrent states cannot
be run again, because its state may already include some of its rows.
"""

from __future__ import annotations

import traceback
from array import array
from collections.abc import Sequence

from msgspec.structs import replace

from ..errors import RankLost, is_out_of_memory
from ..interface.draft import NO_DRAFT_PLAN
from ..interface.extras.images import chunk_stop
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

_GPU_FAILED = ("CUDA error", "Error [CUDA]")  # markers in error texts of torch and Triton


def may_have_lost_model(failure: BaseException) -> bool:
    """Whether the failure means that all later steps would fail, too: a rank or a GPU is lost.

    After an illegal memory access a GPU refuses every later call.
    """
    if isinstance(failure, RankLost):
        return True
    return any(words in str(failure) for words in _GPU_FAILED) and not is_out_of_memory(failure)


def forget_frames(failure: BaseException | None) -> None:
    """Drop the local variables in a failure's tracebacks: they may hold memory that is needed."""
    seen: set[int] = set()  # causes may form a cycle
    while failure is not None and id(failure) not in seen:
        seen.add(id(failure))
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__


class StepBisection:
    """Chooses the part of a failed plan to run next: halves, their halves, down to single requests.

    One failing request among n is found in about 2 log2 n runs. The number of failures is limited,
    and each part that succeeds allows one more. At the limit, every part that fails does so as a
    whole. If memory ran out with prompt chunks, only half of their tokens are run; the rest waits
    for a later step. ``left_out``: requests that are not run again, because their state may have
    changed.
    """

    def __init__(self, plan: StepPlan, failure: Exception) -> None:
        self.left_out = [each for each in plan.requests if _moved_state(each)]
        requests = [_without_drafts(each) for each in plan.requests if not _moved_state(each)]
        self._may_lack_memory = is_out_of_memory(failure) and (
            num_chunk_tokens(plan.requests) > LEAST_CHUNK
        )
        self.failure = failure  # the last failure
        self.num_passed = 0  # parts that succeeded
        self.failing_requests: list[ScheduledRequest] = []
        self._plan = plan
        smaller = [] if self.left_out else _splits(requests, failure)
        # a stack: the next part is the last item
        self._parts = smaller or ([requests] if requests else [])
        self._failures_left = 1 + 2 * max(0, len(requests) - 1).bit_length()

    def next(self) -> StepPlan | None:
        """Return the part to run now; None at the end. Call `passed` or `failed` after it.

        Each part has all new pages and released requests of the plan, because the failed run may
        not have processed them.
        """
        return replace(self._plan, requests=self._parts.pop()) if self._parts else None

    def passed(self) -> None:
        """Record that the part succeeded, which allows one more failed run in the search."""
        self.num_passed += 1
        self._failures_left += 1

    def failed(self, part: StepPlan, failure: Exception) -> None:
        """Record that the part raised: queue smaller parts, or record its requests as failing."""
        self.failure = failure
        self._failures_left -= not is_out_of_memory(failure)  # `_splits` handles lack of memory
        parts = _splits(part.requests, failure)
        if self._failures_left > 0 and parts:
            self._parts += parts
            return
        self.failing_requests += part.requests

    def health_check(self, page_size: int) -> StepPlan:
        """Return a dummy step of one token, which checks that the model still works.

        The step writes to the last page of a failing request and to its recurrent state. Neither is
        used by another request.
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
        """Return the plan with the failing requests alone."""
        return replace(self._plan, requests=self.failing_requests)

    def left_out_plan(self) -> StepPlan:
        """Return the plan with the left-out requests alone."""
        return replace(self._plan, requests=self.left_out)

    @property
    def is_explained(self) -> bool:
        """Whether a failing request or a lack of memory has been found to explain the failure."""
        return bool(self.failing_requests) or self._may_lack_memory


def _splits(
    requests: Sequence[ScheduledRequest], failure: Exception
) -> list[list[ScheduledRequest]]:
    """Return the parts that replace ``requests``, last one first; empty if there are none."""
    num_tokens = num_chunk_tokens(requests)
    if is_out_of_memory(failure) and num_tokens > LEAST_CHUNK:
        chunks = _cut(requests, max(LEAST_CHUNK, num_tokens // 2))
        decodes = [scheduled for scheduled in requests if scheduled.stop - scheduled.start == 1]
        if num_chunk_tokens(chunks) < num_tokens:  # an image's rows may have to stay in one chunk
            return [chunks, decodes] if decodes else [chunks]
    if len(requests) < 2:
        return []
    half = len(requests) // 2
    return [list(requests[half:]), list(requests[:half])]


def _cut(requests: Sequence[ScheduledRequest], num_tokens: int) -> list[ScheduledRequest]:
    """Cut prompt chunks to ``num_tokens`` in all; a request without tokens waits for a later step.

    A request whose KV is to be packed keeps at least one token: otherwise a later plan would pack
    its KV a second time.
    """
    kept = []
    for scheduled in requests:
        extras = scheduled.extras
        if scheduled.stop - scheduled.start > 1 and (num_tokens > 0 or extras.pack is not None):
            stop = min(scheduled.stop, scheduled.start + max(1, num_tokens))
            stop = chunk_stop(extras.images, scheduled.start, stop)
            num_tokens -= stop - scheduled.start
            kept.append(replace(scheduled, stop=stop))
    return kept


def _moved_state(scheduled: ScheduledRequest) -> bool:
    """Whether a failed step may have changed a request's recurrent state after its first row."""
    return scheduled.extras.state is not None and scheduled.stop - scheduled.start > 1


def drafts(scheduled: ScheduledRequest) -> bool:
    """Whether this request has drafts."""
    return scheduled.draft_plan.num_rows > 0


def _without_drafts(scheduled: ScheduledRequest) -> ScheduledRequest:
    if not drafts(scheduled):
        return scheduled
    return replace(scheduled, draft_plan=NO_DRAFT_PLAN, spare_page_ids=NO_PAGES)

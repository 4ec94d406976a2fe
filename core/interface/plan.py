"""StepPlan: a step for the model thread to compute.

While a step runs, the event loop changes no request, so a plan may refer to the request's own
``tokens`` and page table instead of copying them; the runner only reads them. Each step makes
several such objects for each request. They are msgspec structs, because a dataclass takes several
times as long to construct and is tracked by the garbage collector.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from .draft import NO_DRAFT_PLAN, DraftPlan
from .extras.adapter import Adapter
from .extras.branches import Branches
from .extras.images import PromptImage, text_ids
from .extras.packing import KvPack
from .sampling import SamplingMetadata

NO_PAGES = array("q")
# Rows of the largest CUDA graph: the kernels of a step with more rows are launched one by one. A
# plain step has no such limit, because a step that is launched in the model thread has no successor
# planned ahead, which costs more than the event loop's time for the kernels.
MAX_SHORT_ROWS = 512


class StateUse(msgspec.Struct, frozen=True, gc=False):
    """Use of a request's recurrent state in a step, for models with recurrent layers.

    The request owns the state ``slot`` and the ``log``. The slot holds the state at the end of a
    page, at or before the step's first row; the log holds the positions after that. ``source``: the
    slot of a kept state from which the request resumes; it is copied to ``slot`` before the step.
    -1 means no copy. The slot of a request that starts at position 0 is reset.
    """

    slot: int
    log: int
    source: int = -1
    keeps: tuple[tuple[int, int], ...] = ()
    """(position, slot), ascending: page ends among the step's rows whose state is kept, too."""


class ScheduledExtras(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Data of a scheduled request that only some requests have; the others use `PLAIN`.

    After packing, the KV of position p is at index ``p - num_packed_away`` of the pages.
    """

    state: StateUse | None = None  # None: the model has no recurrent state
    adapter: Adapter | None = None  # the request's LoRA adapter
    images: tuple[PromptImage, ...] = ()  # all images of the prompt
    branches: Branches | None = None  # branches at the end of the prompt
    num_packed_away: int = 0  # number of tokens before ``start`` whose KV was dropped by packing
    pack: KvPack | None = None  # packing to do before the step

    def delays_launch(self, start: int) -> bool:
        """Whether the launch of the row at position ``start`` may take long.

        KV is packed or an image is encoded before it, or a backend prepares for an adapter: the
        first pass with a number of rows and adapters may compile kernels and capture a graph.
        """
        if self.pack is not None or self.adapter is not None:
            return True
        return any(start < sum(each.runs[-1]) for each in self.images)


PLAIN = ScheduledExtras()


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request's share of a step: compute KV of ``tokens[start:stop]``, then maybe sample.

    ``page_ids[i]`` holds positions ``[i * page_size, (i + 1) * page_size)``; the table covers all
    positions up to ``stop`` and the longest path of the draft. Draft nodes off the trunk have their
    KV in ``spare_page_ids`` until they are accepted. If ``is_ahead``, the request has one pending
    token, at ``stop - 1``, which the previous step is still choosing; ``tokens`` holds the tokens
    before it, and may grow during the step.
    """

    request_id: str
    tokens: array[int]  # prompt and output so far; the request's own array, read only
    start: int
    stop: int
    page_ids: array[int]  # page table; the request's own array, read only
    sampling: SamplingMetadata
    draft_plan: DraftPlan = NO_DRAFT_PLAN  # without spare pages the draft must be a chain
    spare_page_ids: array[int] = NO_PAGES  # pages for the draft at the lease's end, for this step
    is_ahead: bool = False
    extras: ScheduledExtras = PLAIN

    @property
    def samples(self) -> bool:
        """Whether the step samples a token: the chunk reaches the request's last token."""
        return self.sampling.pooling is None and (self.is_ahead or self.stop == len(self.tokens))

    def text_ids(self, start: int, stop: int) -> array[int]:
        """Return ``tokens[start:stop]``, with 0 in place of the id of each image row."""
        return text_ids(self.tokens[start:stop], self.extras.images)

    @property
    def num_pooled(self) -> int:
        """Number of the step's last rows from which it computes numbers of `Pooling`."""
        pooling = self.sampling.pooling
        if pooling is None:
            return 0
        if pooling.compare_from is None:
            return int(self.stop == len(self.tokens))
        first = self.sampling.prompt_len - 1 + pooling.compare_from
        return max(0, self.stop - max(self.start, first))

    @property
    def pools(self) -> bool:
        """Whether the step computes numbers of `Pooling`."""
        return self.num_pooled > 0


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Plan of one step, which is computed as a ragged batch."""

    requests: Sequence[ScheduledRequest]
    # Ids of pages that were allocated since the last plan; their old content is not valid.
    newly_allocated_pages: array[int]
    loaded_pages: array[int] = NO_PAGES  # ids of pages that a tier loaded since the last plan
    is_plain: bool = False  # no request drafts, and the speculator does not observe the step

    # Ids of requests that released their pages since the last plan: they ended or were preempted.
    released_request_ids: Sequence[str] = ()

    @property
    def is_short(self) -> bool:
        """Whether a device is given the step by one short call, which does not wait for the device.

        Every request computes one token without token history or an adapter. No proposer drafts,
        looked-up drafts add few rows, no KV is packed, and no image is encoded.
        """
        for scheduled in self.requests:
            is_decode = scheduled.stop - scheduled.start == 1
            is_asked = scheduled.draft_plan.max_draft > 0  # the proposer
            if not is_decode or is_asked or scheduled.sampling.needs_history:
                return False
            extras = scheduled.extras
            if extras is not PLAIN and extras.delays_launch(scheduled.start):
                return False
        if self.is_plain:
            return True
        num_drafted = sum([len(each.draft_plan.draft.token_ids) for each in self.requests])
        return len(self.requests) + num_drafted <= MAX_SHORT_ROWS

    @property
    def is_decode_only(self) -> bool:
        """Whether every request decodes one token, without a draft and without token history.

        The host then needs no chosen token to plan the next step.
        """
        if not self.is_plain:
            return False
        for scheduled in self.requests:
            is_decode = scheduled.stop - scheduled.start == 1
            if not is_decode or scheduled.sampling.needs_history:
                return False
            if not (scheduled.is_ahead or scheduled.samples):  # rows that are ahead always sample
                return False
        return True

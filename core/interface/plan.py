"""StepPlan: a step for the model thread to compute.

While a step runs, the event loop changes no request, so a plan may refer to the request's own
``tokens`` and page table instead of copying them; the model thread only reads them. Each step makes
several such objects for each request. They are msgspec structs because a dataclass takes several
times as long to construct and is tracked by the garbage collector.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from .draft import NO_DRAFT_PLAN, DraftPlan
from .extras.adapter import Adapter
from .extras.images import PromptImage, text_ids
from .extras.packing import KvPack
from .sampling import SamplingMetadata

NO_PAGES = array("q")


class StateUse(msgspec.Struct, frozen=True, gc=False):
    """Recurrent state of one request in a step, for models that keep one.

    The request owns the state ``slot`` and the ``log``. The slot holds the state at the end of a
    page, at or before the step's first row; the log holds the positions after that. ``source``: the
    slot of a kept state, copied to ``slot`` before the step because the request resumes from it;
    -1: none. The slot of a request that starts at position 0 is reset.
    """

    slot: int
    log: int
    source: int = -1
    keeps: tuple[tuple[int, int], ...] = ()
    """(position, slot), ascending: page ends among the step's rows whose state is kept, too."""


class ScheduledExtras(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Data of a scheduled request that most requests do not have; those use `PLAIN`.

    With ``num_packed_away`` the KV of position p is at index ``p - num_packed_away`` of the pages.
    """

    state: StateUse | None = None  # None: the model keeps no recurrent state
    adapter: Adapter | None = None  # adapter of the request
    images: tuple[PromptImage, ...] = ()  # all images of the prompt
    num_packed_away: int = 0  # tokens before the share whose KV was packed away
    pack: KvPack | None = None  # packing that is done before the step


PLAIN = ScheduledExtras()


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request's share of a step: compute KV of ``tokens[start:stop]``, then maybe sample.

    ``page_ids[i]`` holds positions ``[i * page_size, (i + 1) * page_size)``; the table covers
    ``stop`` and the longest path of the draft. Draft nodes off the trunk have their KV in
    ``spare_page_ids`` until a path with them is accepted. If ``is_ahead``, the request has one
    pending token, at ``stop - 1``, which the step under way is still choosing; ``tokens`` holds the
    tokens before it, and may grow during the step.
    """

    request_id: str
    tokens: array[int]  # prompt and output so far; lent, read only
    start: int
    stop: int
    page_ids: array[int]  # page table; lent, read only
    sampling: SamplingMetadata
    draft_plan: DraftPlan = NO_DRAFT_PLAN  # a draft is a chain if there are no spare pages
    spare_page_ids: array[int] = NO_PAGES  # pages at the lease's end, used for this step alone
    is_ahead: bool = False
    extras: ScheduledExtras = PLAIN

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last token, so that its last row samples a new one."""
        return self.sampling.pooling is None and (self.is_ahead or self.stop == len(self.tokens))

    def text_ids(self, start: int, stop: int) -> array[int]:
        """Return ``tokens[start:stop]``, with 0 for each row of an image."""
        return text_ids(self.tokens[start:stop], self.extras.images)

    @property
    def pools(self) -> bool:
        """Whether the chunk reaches the last token, whose row yields the result of `Pooling`."""
        return self.sampling.pooling is not None and self.stop == len(self.tokens)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Plan of one step: a ragged batch."""

    requests: Sequence[ScheduledRequest]
    # Pages allocated since the last plan: their content is void.
    newly_allocated_pages: array[int]
    loaded_pages: array[int] = NO_PAGES  # pages loaded whole from a tier since the last plan
    is_plain: bool = False  # no request drafts: the speculator learns nothing from the step

    # Requests that released their pages since the last plan: finished or preempted.
    released_request_ids: Sequence[str] = ()

    @property
    def is_decode_only(self) -> bool:
        """Whether every request decodes one token without a draft and without its token history."""
        return self.is_plain and all(
            scheduled.stop - scheduled.start == 1
            and scheduled.samples
            and not scheduled.sampling.needs_history
            for scheduled in self.requests
        )

"""Shares of a step: the prompt tokens that each request gets, and its row in the plan.

The functions read requests and change nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

from ..interface.draft import NO_DRAFT_PLAN, DraftPlan
from ..interface.extras.packing import KvPack
from ..interface.extras.request_extras import PLAIN_REQUEST
from ..interface.plan import NO_PAGES, PLAIN, ScheduledExtras, ScheduledRequest, StateUse
from ..interface.request import Request, by_work
from .chunk_budget import short_prompt_share


def schedule_request(
    request: Request,
    stop: int,
    plan: DraftPlan = NO_DRAFT_PLAN,
    spare_page_ids: array[int] = NO_PAGES,
    state: StateUse | None = None,
) -> ScheduledRequest:
    """Return a request's share of a step: its tokens up to ``stop`` and its drafts."""
    return ScheduledRequest(
        request_id=request.request_id,
        tokens=request.tokens,
        start=request.num_computed,
        stop=stop,
        page_ids=request.lease.page_ids if request.lease is not None else array("q"),
        sampling=request.sampling,
        draft_plan=plan,
        spare_page_ids=spare_page_ids,
        extras=PLAIN
        if state is None and request.extras is PLAIN_REQUEST
        else _extras(request, stop, state),
    )


def _extras(request: Request, stop: int, state: StateUse | None) -> ScheduledExtras:
    return ScheduledExtras(
        state=state,
        adapter=request.extras.adapter,
        images=request.extras.images,
        num_packed_away=request.num_packed_away(stop),
        pack=_due_pack(request, stop),
    )


def _due_pack(request: Request, stop: int) -> KvPack | None:
    """Return the packing of KV that precedes a step up to token ``stop``; None if none is due."""
    start = request.num_computed
    num_before = request.num_packed_away(start)
    num_new = request.num_packed_away(stop) - num_before
    return KvPack(request.prompt_len, start - num_before, num_new) if num_new else None


def without_suspects(prompts: list[Request]) -> list[Request]:
    """Return the first prompt alone if it is suspect, otherwise all prompts that are not suspect.

    A suspect prompt was in a step that failed, so it is computed without other prompts.
    """
    if not any(each.is_suspect for each in prompts):
        return prompts
    first = min(prompts, key=lambda each: (each.is_early, each.order))
    return [first] if first.is_suspect else [each for each in prompts if not each.is_suspect]


def share_chunk_tokens(prompts: Sequence[Request], budget: int) -> Mapping[str, int]:
    """Return the prompt tokens that each request may compute in a step, by its id.

    `short_prompt_share` goes to the prompts with the least left to compute, and the rest goes to
    the prompts in the order of ``prompts``. So the first prompt always has the greater part of a
    step, and a short prompt does not wait for the end of a long one.
    """
    shares: Counter[str] = Counter()
    for in_turn, room in (
        (sorted(prompts, key=by_work), short_prompt_share(budget)),
        (prompts, budget - short_prompt_share(budget)),
    ):
        for request in in_turn:
            count = min(room, request.num_pending - shares[request.request_id])
            shares[request.request_id] += count
            room -= count
    return shares

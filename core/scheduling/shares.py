"""Shares of a step: the prompt tokens, draft rows and pages that each request gets, and its row.

Functions for decoding requests go through all of them in one pass. Drafts get free pages only:
cached pages are never evicted for a draft. After the step the scheduler shrinks the lease to the
committed tokens.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from ...radix_cache import KVLease, PrefixCache
from ..interface.draft import NO_DRAFT_PLAN, DraftPlan
from ..interface.extras.packing import KvPack
from ..interface.extras.request_extras import PLAIN_REQUEST
from ..interface.plan import NO_PAGES, PLAIN, ScheduledExtras, ScheduledRequest, StateUse
from ..interface.protocols import Speculator
from ..interface.request import Request, by_work
from .chunk_budget import short_prompt_share
from .states import MAX_STATE_DRAFT, as_chain, use_state

MAX_DRAFT = 64  # maximum number of draft tokens along one path of a request's draft


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
    extras = ScheduledExtras(
        state=state,
        adapter=request.extras.adapter,
        images=request.extras.images,
        branches=request.extras.branches,
        num_packed_away=request.num_packed_away(stop),
        pack=_due_pack(request, stop),
    )
    return PLAIN if extras == PLAIN else extras


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


# -- decoding requests ---------------------------------------------------------------------------


def token_counts(requests: Iterable[Request]) -> list[int]:
    """Return the number of tokens of each request, prompt and answer together."""
    return list(map(len, [request.tokens for request in requests]))


def ready_to_decode(running: Collection[Request]) -> list[Request]:
    """Return the requests that have one pending token."""
    pairs = zip(running, token_counts(running), strict=True)
    return [request for request, count in pairs if count - request.num_computed == 1]


def draft_limits(requests: Sequence[Request], depth_cap: int) -> list[int]:
    """Return the maximum draft depth of each request, in tokens; at most ``depth_cap``.

    An answer's last token is never drafted. The limit is 0 until an answer has a token, because
    drafting would delay the first one.
    """
    limits = [0] * len(requests)
    for index, (request, count) in enumerate(zip(requests, token_counts(requests), strict=True)):
        if count == request.sampling.prompt_len:
            continue
        stop = request.max_len - 1
        if request.extras.kv_budget:
            stop = min(stop, request.next_packing(count - 1) or stop)
        if stop > count:
            limits[index] = depth_cap if stop - count > depth_cap else stop - count
    return limits


def plan_drafts(
    speculator: Speculator,
    cache: PrefixCache,
    decodes: Sequence[Request],
    *,
    spare: int,
    num_prefill: int,
) -> Sequence[DraftPlan] | None:
    """Return the draft of each decoding request, or None if no request drafts.

    ``spare``: number of rows that the step has room for. ``num_prefill``: number of prompt tokens
    that the same step may compute.
    """
    if not decodes or speculator.drafts_nothing(decodes):
        return None
    limits = draft_limits(decodes, MAX_DRAFT if cache.states is None else MAX_STATE_DRAFT)
    if not any(limits):
        return None
    budget = draft_row_budget(spare, others_wait=num_prefill > 0)
    plans = speculator.plan(decodes, limits, budget=budget, num_prefill=num_prefill)
    return [
        without_proposer(plan) if request.extras.kv_budget and request.is_packed else plan
        for request, plan in zip(decodes, plans, strict=True)
    ]


def without_proposer(plan: DraftPlan) -> DraftPlan:
    """Return ``plan`` with its looked-up draft, but without a proposer's draft.

    A proposer cannot draft after packing, because its own KV under these page ids is not packed.
    """
    return DraftPlan(plan.draft) if plan.max_draft else plan


def draft_row_budget(budget: int, *, others_wait: bool) -> int:
    """Return the number of rows for drafts: half of ``budget`` if prompts wait, otherwise all."""
    return max(0, budget // 2 if others_wait else budget)


def decode_rows(
    cache: PrefixCache, requests: Sequence[Request], plans: Iterable[DraftPlan]
) -> list[ScheduledRequest]:
    """Return the rows of decoding requests, after allocating the pages of their drafts."""
    rows = list[ScheduledRequest]()
    for request, plan, stop in zip(requests, plans, token_counts(requests), strict=False):
        spare_page_ids = NO_PAGES
        if plan is not NO_DRAFT_PLAN and request.lease is not None:
            num_places = request.kv_len(stop) if request.extras.kv_budget else stop
            plan, spare_page_ids = allocate_draft_pages(cache, request.lease, num_places, plan)
        state = None if cache.states is None else use_state(cache, request, stop)
        rows.append(schedule_request(request, stop, plan, spare_page_ids, state))
    return rows


def allocate_draft_pages(
    cache: PrefixCache, lease: KVLease, num_tokens: int, plan: DraftPlan
) -> tuple[DraftPlan, array[int]]:
    """Return the part of ``plan`` that fits into pages, and the pages for its nodes off the trunk.

    Pages are allocated after the first ``num_tokens`` tokens. If the longest path does not fit into
    the free pages, the plan becomes a shorter chain. The pages for nodes off the trunk are private
    pages at the lease's end, which `PrefixCache.shrink` frees. There may be too few of them for all
    nodes; then the runner drops the last nodes.
    """
    if lease.state is not None:
        plan = as_chain(plan)
    is_tree = plan.may_branch or bool(plan.draft.parents)
    depth = plan.depth if is_tree else plan.num_rows
    room = len(lease.page_ids) * cache.page_size - num_tokens
    if depth > room:
        room += cache.num_free_pages * cache.page_size
        cache.extend(lease, num_tokens + min(depth, room), evict=False)
        if depth > room:
            draft, max_draft = plan.draft.trunk().first_nodes(room), min(plan.max_draft, room)
            cut = replace(plan, draft=draft, max_draft=max_draft, may_branch=False)
            return cut, NO_PAGES
    if not is_tree:
        return plan, NO_PAGES
    wanted = -(-plan.num_beside_trunk // cache.page_size)
    count = min(wanted, cache.num_free_pages)
    if count == 0:
        return plan, NO_PAGES
    cache.extend(lease, (len(lease.page_ids) + count) * cache.page_size, evict=False)
    return plan, lease.page_ids[-count:]

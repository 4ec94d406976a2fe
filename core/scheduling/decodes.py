"""The decoding requests of a step: the limits of their drafts, the pages of drafts, and their rows.

Each function goes through all decoding requests in one pass, because a step calls it for every
request. Drafts get free pages only: cached pages are never evicted for a draft. After the step the
scheduler shrinks the lease to the committed tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from ...radix_cache import KVLease, PrefixCache
from ..interface.draft import NO_DRAFT_PLAN, DraftPlan
from ..interface.plan import NO_PAGES, ScheduledRequest
from ..interface.protocols import Speculator
from ..interface.request import Request
from .shares import schedule_request
from .states import MAX_STATE_DRAFT, as_chain, use_state

MAX_DRAFT = 64  # maximum number of draft tokens along one path of a request's draft


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

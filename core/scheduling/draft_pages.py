"""Draft pages: cut a draft plan to the free pages, and take some for nodes beside its trunk.

Drafts take free pages only: cached pages are never evicted for a draft. After the step the
scheduler shrinks the lease back to the committed tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from ...radix_cache import KVLease, PrefixCache
from ..interface.request import Request
from ..interface.speculator import NO_DRAFT_PLAN, DraftPlan
from ..interface.step import NO_PAGES, ScheduledRequest


def allocate_draft_pages(
    cache: PrefixCache, lease: KVLease, num_tokens: int, plan: DraftPlan
) -> tuple[DraftPlan, array[int]]:
    """Take pages for ``plan`` behind the first ``num_tokens`` tokens; return the part that fits.

    Its longest path is cut to the pages that are free. Also returns the pages for the nodes beside
    the trunk: private ones at the lease's end, where shrinking it takes them back. Where they are
    fewer than the plan could use, the runner drops the last nodes.
    """
    if plan is NO_DRAFT_PLAN:
        return plan, NO_PAGES
    room = (len(lease.page_ids) + cache.num_free_pages) * cache.page_size - num_tokens
    cache.extend(lease, num_tokens + min(plan.depth, room), evict=False)
    if plan.depth > room:
        draft, max_draft = plan.draft.trunk().first(room), min(plan.max_draft, room)
        return replace(plan, draft=draft, max_draft=max_draft, may_branch=False), NO_PAGES
    wanted = -(-plan.num_beside_trunk // cache.page_size)
    count = min(wanted, cache.num_free_pages)
    if count == 0:
        return plan, NO_PAGES
    cache.extend(lease, (len(lease.page_ids) + count) * cache.page_size, evict=False)
    return plan, lease.page_ids[-count:]


def schedule_request(
    request: Request,
    stop: int,
    plan: DraftPlan = NO_DRAFT_PLAN,
    spare_page_ids: array[int] = NO_PAGES,
) -> ScheduledRequest:
    """Make a request's share of a step: its tokens up to ``stop`` and its drafts."""
    return ScheduledRequest(
        request_id=request.request_id,
        tokens=request.tokens,
        start=request.num_computed,
        stop=stop,
        page_ids=request.lease.page_ids if request.lease is not None else array("q"),
        sampling=request.sampling,
        draft=plan.draft,
        max_draft=plan.max_draft,
        spare_page_ids=spare_page_ids,
        row_price=plan.row_price,
        pass_price=plan.pass_price,
    )


def draft_limits(requests: Sequence[Request], depth_cap: int) -> list[int]:
    """Most draft tokens of each request: an answer's last token is never drafted.

    0 before the first token, which drafts would delay.
    """
    num_left = (request.max_len - len(request.tokens) - 1 for request in requests)
    return [
        max(0, min(depth_cap, most)) if request.num_output else 0
        for request, most in zip(requests, num_left, strict=True)
    ]


def draft_row_budget(budget: int, *, others_wait: bool) -> int:
    """Rows for drafts: half of those that decodes leave if prompts wait, else all."""
    return max(0, budget // 2 if others_wait else budget)

"""Draft pages: cut a draft plan to the free pages, and lay out its branches.

Drafts take free pages only: cached pages are never evicted for a draft. After the step the
scheduler shrinks the lease back to the committed tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ...radix_cache import KVLease, PrefixCache
from ..interface.request import Request
from ..interface.speculator import NO_DRAFT_PLAN, DraftPlan
from ..interface.step import Branch, PlanRow


def allocate_draft_pages(
    cache: PrefixCache, lease: KVLease, num_tokens: int, plan: DraftPlan
) -> tuple[DraftPlan, list[Branch]]:
    """Take pages for ``plan`` behind the first ``num_tokens`` tokens; return the part that fits.

    The main draft is cut to the pages that are free; branches are dropped whole, the last first.
    """
    if plan is NO_DRAFT_PLAN:
        return plan, []
    longest = max([plan.depth, *(len(branch.token_ids) for branch in plan.branches)])
    room = (len(lease.page_ids) + cache.num_free_pages) * cache.page_size - num_tokens
    cache.extend(lease, num_tokens + min(longest, room), evict=False)
    if longest > room:
        return _cut(plan, room), []
    branches: list[Branch] = []
    for draft in plan.branches:
        page_ids = _own_pages(cache, lease, num_tokens, len(draft.token_ids))
        if page_ids is None:
            break
        branches.append(Branch(draft, page_ids))
    return plan, branches


def _cut(plan: DraftPlan, room: int) -> DraftPlan:
    return DraftPlan(plan.draft.first(room), min(plan.max_draft, room))


def _own_pages(
    cache: PrefixCache, lease: KVLease, num_tokens: int, draft_len: int
) -> array[int] | None:
    """Make the page table of a branch, from the last token's page on; None without free pages.

    The pages are private ones at the lease's end, where shrinking it takes them back.
    """
    shared = (num_tokens - 1) // cache.page_size
    count = (num_tokens + draft_len - 1) // cache.page_size + 1 - shared
    if count > cache.num_free_pages:
        return None
    cache.extend(lease, (len(lease.page_ids) + count) * cache.page_size, evict=False)
    return lease.page_ids[:shared] + lease.page_ids[-count:]


def make_row(
    request: Request, stop: int, plan: DraftPlan = NO_DRAFT_PLAN, branches: Sequence[Branch] = ()
) -> PlanRow:
    """Make a request's plan row: its tokens up to ``stop`` and its drafts."""
    return PlanRow(
        request_id=request.request_id,
        tokens=request.tokens,
        start=request.num_computed,
        stop=stop,
        page_ids=request.lease.page_ids if request.lease is not None else array("q"),
        sampling=request.sampling,
        draft=plan.draft,
        max_draft=plan.max_draft,
        branches=branches,
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

"""Rows with drafts: what of a draft plan fits the free pages, and where its branches lie.

Drafts take free pages only: what is committed is never evicted for a guess. After the step the
scheduler shrinks the lease back to the committed tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ..radix_cache import KVLease, PrefixCache
from .request import Request
from .speculation import NOTHING, DraftPlan
from .step import Branch, PlanRow


def fit_pages(
    cache: PrefixCache, lease: KVLease, num_tokens: int, plan: DraftPlan
) -> tuple[DraftPlan, list[Branch]]:
    """What of ``plan`` fits behind the first ``num_tokens`` tokens of a lease, pages taken.

    The main draft is cut to the pages that are free; branches are dropped whole, the last first.
    """
    if plan is NOTHING:
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
    """A page table that leaves the lease's at the last token's page; None when pages lack.

    The pages are private ones at the lease's end, where shrinking it takes them back.
    """
    shared = (num_tokens - 1) // cache.page_size
    count = (num_tokens + draft_len - 1) // cache.page_size + 1 - shared
    if count > cache.num_free_pages:
        return None
    cache.extend(lease, (len(lease.page_ids) + count) * cache.page_size, evict=False)
    return lease.page_ids[:shared] + lease.page_ids[-count:]


def make_row(
    request: Request, stop: int, plan: DraftPlan = NOTHING, branches: Sequence[Branch] = ()
) -> PlanRow:
    """A request's share of a step: its tokens up to ``stop``, and what of ``plan`` fits."""
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
    """Draft tokens that may still be served of each: the last token of an answer is never a draft.

    None before the first token: nothing delays that.
    """
    rest = (request.max_len - len(request.tokens) - 1 for request in requests)
    return [
        max(0, min(depth_cap, most)) if request.num_output else 0
        for request, most in zip(requests, rest, strict=True)
    ]


def share_of(budget: int, *, others_wait: bool) -> int:
    """Rows that drafts may have of what decodes leave: half while prompts wait to be computed."""
    return max(0, budget // 2 if others_wait else budget)

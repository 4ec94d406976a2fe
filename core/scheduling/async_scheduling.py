"""Asynchronous scheduling: plan the next step while the tokens of the present one are chosen.

If no request arrives and every running request only decodes, the lengths after a step are known
before it ends. So the next step can be planned and launched at once, and the host's work between
two steps (commit and plan) overlaps with the device's. A request that turns out to have ended has
one row too many in the next step; the output of that row is discarded.
"""

from __future__ import annotations

from array import array

from msgspec.structs import replace

from ..interface.request import Request
from ..interface.step import PlanRow, StepPlan
from .draft_pages import make_row
from .scheduler import Scheduler


def plan_next(scheduler: Scheduler, plan: StepPlan, now: float) -> StepPlan | None:
    """Plan the step after ``plan``, which is in flight; None if that depends on its outcome.

    The page tables are copies: requests may end while the step is computed. New pages may come from
    evicted prefixes even if the plan is withdrawn: they stay in the leases, and the plan made
    instead uses them.
    """
    continuing = _continuing(scheduler, plan) if plan.is_decode_only else []
    requests = [request for _, request in continuing]
    if not continuing or not scheduler.speculator.drafts_nothing(requests, num_new_tokens=1):
        return None
    scheduler.cache.tick(now)
    scheduler.request_table.begin_round(now)
    rows = []
    for row, request in continuing:
        if request.lease is None or not scheduler.cache.extend(request.lease, row.stop + 1):
            return None
        rows.append(_next_row(row, request, request.lease.page_ids[:]))
    for _, request in continuing:
        scheduler.charge(request, 1)
    return scheduler.make_plan(rows, is_plain=True)


def _continuing(scheduler: Scheduler, plan: StepPlan) -> list[tuple[PlanRow, Request]]:
    """Requests certain to decode again; empty if admission could change the batch."""
    running = scheduler.running
    here = [(row, request) for row in plan.rows if (request := running.get(row.request_id))]
    continuing = [(row, request) for row, request in here if row.stop + 1 < request.max_len]
    has_places = len(continuing) < scheduler.limits.max_running
    if len(here) < len(running) or (len(scheduler.waiting) and has_places):
        return []
    return continuing


def _next_row(row: PlanRow, request: Request, page_ids: array[int]) -> PlanRow:
    return PlanRow(
        request_id=row.request_id,
        tokens=request.tokens,
        start=row.stop,
        stop=row.stop + 1,
        page_ids=page_ids,
        sampling=row.sampling,
        is_ahead=True,
    )


def replan(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
    """Plan the same step again, now that its tokens are known, for the requests that still run."""
    here = [each for row in plan.rows if (each := scheduler.running.get(row.request_id))]
    return replace(plan, rows=[make_row(each, len(each.tokens)) for each in here])

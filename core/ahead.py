"""Planning ahead: the next step, made while the tokens that it goes on from are chosen.

While nobody comes and all that is to be done is one token for each request, how far everybody will
be after a step is known before it is over. So the next one can follow it at once: the time between
two steps, in which outcomes are committed and plans are made, passes beside the computing. Who
turns out to have ended has one row too many in the step that follows, and that row reaches nobody.
"""

from __future__ import annotations

from array import array

from msgspec.structs import replace

from .drafting import make_row
from .request import Request
from .scheduler import Scheduler
from .step import PlanRow, StepPlan


def plan_ahead(scheduler: Scheduler, plan: StepPlan, now: float) -> StepPlan | None:
    """The step behind ``plan``, which is under way; None where its outcome decides that.

    Its page tables are copies, for requests may end while it is carried out.
    """
    staying = _staying(scheduler, plan) if plan.is_steady else []
    requests = [request for _, request in staying]
    if not staying or not scheduler.speculator.is_silent(requests, ahead=1):
        return None
    scheduler.cache.tick(now)
    scheduler.roster.begin_round(now)
    rows = []
    for row, request in staying:
        if request.lease is None or not scheduler.cache.extend(request.lease, row.stop + 1):
            return None
        rows.append(_next_row(row, request, request.lease.page_ids[:]))
    for _, request in staying:
        scheduler.charge(request, 1)
    return scheduler.make_plan(rows, is_plain=True)


def _staying(scheduler: Scheduler, plan: StepPlan) -> list[tuple[PlanRow, Request]]:
    """Who goes on whatever the plan yields; nobody where it is not clear who else comes."""
    running = scheduler.running
    here = [(row, request) for row in plan.rows if (request := running.get(row.request_id))]
    staying = [(row, request) for row, request in here if row.stop + 1 < request.max_len]
    has_places = len(staying) < scheduler.limits.max_running
    if len(here) < len(running) or (len(scheduler.waiting) and has_places):
        return []
    return staying


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
    """A plan made ahead, now that its tokens are known: the rows of those who still run."""
    here = [each for row in plan.rows if (each := scheduler.running.get(row.request_id))]
    return replace(plan, rows=[make_row(each, len(each.tokens)) for each in here])

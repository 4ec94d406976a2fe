"""Asynchronous scheduling: plan the next step while the present step chooses its tokens.

If no request arrives and every running request only decodes, the lengths after a step are known
before it ends. So the next step can be planned and launched at once, and the host's work between
two steps (commit and plan) overlaps with the device's. A request that turns out to have ended has
one surplus row in the next step; the output of that row is discarded.
"""

from __future__ import annotations

from array import array

from msgspec.structs import replace

from ..interface.plan import PLAIN, ScheduledRequest, StateUse, StepPlan
from ..interface.request import Request
from .scheduler import Scheduler
from .shares import schedule_request
from .states import use_state


def plan_next(scheduler: Scheduler, plan: StepPlan, now: float) -> StepPlan | None:
    """Return a plan of the step after ``plan``, which is being computed.

    Returns None if the next step depends on the outcome of ``plan``. The page tables are copies,
    because requests may end while ``plan`` is computed. New pages may come from evicted prefixes.
    If the returned plan is discarded, the new pages stay in the leases.
    """
    loads = scheduler.page_loads
    if loads is not None and loads.is_late(now):
        return None  # `begin_round` can give up a late load only while no step is under way
    continuing = _continuing(scheduler, plan) if plan.is_decode_only else []
    requests = [request for _, request in continuing]
    if not continuing or not scheduler.speculator.drafts_nothing(requests, num_new_tokens=1):
        return None
    scheduler.cache.tick(now)
    scheduler.request_table.begin_round(now)
    page_size = scheduler.cache.page_size
    for scheduled, request in continuing:
        upto, lease = scheduled.stop + 1, request.lease
        if request.extras.kv_budget:
            upto = request.kv_len(upto)
        if lease is None:
            return None
        has_pages = upto <= len(lease.page_ids) * page_size
        if not has_pages and not scheduler.cache.extend(lease, upto):
            return None
    planned = [
        _next_row(scheduled, request, request.lease.page_ids[:])
        for scheduled, request in continuing
        if request.lease is not None
    ]
    scheduler.accounts.charge_decodes(requests)
    return scheduler.make_plan(planned, is_plain=True)


def _continuing(scheduler: Scheduler, plan: StepPlan) -> list[tuple[ScheduledRequest, Request]]:
    """Return the requests of ``plan`` that are certain to decode again.

    The list is empty if another request could join the batch, or if the next step depends on the
    outcome of ``plan``.
    """
    running = scheduler.running
    here = [
        (scheduled, running[scheduled.request_id])
        for scheduled in plan.requests
        if scheduled.request_id in running
    ]
    continuing = [
        (scheduled, request) for scheduled, request in here if scheduled.stop + 1 < request.max_len
    ]
    has_places = len(continuing) < scheduler.limits.max_running
    num_loading = 0 if scheduler.page_loads is None else scheduler.page_loads.num_loading
    if len(here) + num_loading < len(running) or (len(scheduler.waiting) and has_places):
        return []
    packed = [each for each in here if each[1].extras.kv_budget]
    if any(each.next_packing(scheduled.stop - 1) == scheduled.stop for scheduled, each in packed):
        return []  # a packing of KV is due, which depends on the outcome and frees pages
    if scheduler.cache.states is not None and _moves_states(scheduler.cache.page_size, here):
        return []
    return continuing


def _moves_states(page_size: int, here: list[tuple[ScheduledRequest, Request]]) -> bool:
    """Whether the next step moves a recurrent state of a request to the next page end.

    Such a step is not planned ahead. Otherwise the position of a state when its request ends, or
    is computed again after a failure, would depend on whether the next step had begun.
    """
    return any(scheduled.stop % page_size == 0 for scheduled, _ in here)


def _next_row(
    scheduled: ScheduledRequest, request: Request, page_ids: array[int]
) -> ScheduledRequest:
    stop, extras = scheduled.stop + 1, scheduled.extras
    if extras is not PLAIN:
        state = extras.state
        extras = replace(
            extras,
            state=None if state is None else StateUse(state.slot, state.log),
            num_packed_away=request.num_packed_away(stop),
            pack=None,
        )
    return ScheduledRequest(
        request_id=scheduled.request_id,
        tokens=request.tokens,
        start=scheduled.stop,
        stop=stop,
        page_ids=page_ids,
        sampling=scheduled.sampling,
        is_ahead=True,
        extras=extras,
    )


def replan(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
    """Return ``plan`` for its requests that still run, with the tokens that are known now."""
    here = [
        each for scheduled in plan.requests if (each := scheduler.running.get(scheduled.request_id))
    ]
    requests = [
        schedule_request(each, stop, state=use_state(scheduler.cache, each, stop))
        for each in here
        for stop in [len(each.tokens)]
    ]
    return replace(plan, requests=requests)

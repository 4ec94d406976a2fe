"""The scheduler with its invariants checked at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StateUse, StepPlan
from foretoken.core.interface.request import Request, RequestStatus, by_order
from foretoken.core.scheduling.chunk_budget import num_chunk_tokens, num_step_tokens
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.core.scheduling.states import MAX_STATE_DRAFT


class CheckedScheduler(Scheduler):
    """Raises AssertionError where a plan or the ledger is not as it must be."""

    _committed: Sequence[Request] = ()  # the requests of the last commit

    def schedule(self, now: float) -> StepPlan:
        prompts = self._prompts()
        plan = super().schedule(now)
        self.audit()
        self._check_plan(plan)
        self._check_chunks(plan, prompts)
        for request in (*self.running.values(), *self.waiting.requests):
            due = request.arrival_time + (request.deadline or 0.0)
            assert request.deadline is None or due > now, "a deadline has passed unnoticed"
        return plan

    def commit(self, plan: StepPlan, output: StepOutput, now: float) -> Any:
        before = [each for row in plan.requests if (each := self._owner(row)) is not None]
        events = super().commit(plan, output, now)
        self.audit()
        self._committed = before
        return events

    def account(self) -> None:
        super().account()
        committed, self._committed = self._committed, ()
        for request in committed:
            _check_request(request)

    def _owner(self, row: ScheduledRequest) -> Request | None:
        """Return the request of a row; None if it ended, which only a row planned ahead allows."""
        request = self.running.get(row.request_id)
        assert request is not None or row.is_ahead, "a request ended while it was in a step"
        assert request is None or row.stop <= len(request.tokens), "a row goes too far"
        return request

    def _check_plan(self, plan: StepPlan) -> None:
        ids = [row.request_id for row in plan.requests]
        assert len(set(ids)) == len(ids), "a request is in a plan twice"
        loads = self.page_loads
        is_loading = loads is not None and (loads.num_loading > 0 or loads.leases)
        assert plan.requests or is_loading or not self.running, (
            "a plan is empty while a request runs"
        )
        for row in plan.requests:
            assert self.running[row.request_id].transfer.load is None, (
                "pages are loaded and computed"
            )
        assert len(self.running) <= self.limits.max_running, "more run than may"
        num_rows = num_step_tokens(plan.requests)
        for row in plan.requests:
            num_rows += row.draft_plan.num_rows
            self._check_row(row)
        assert num_rows <= self.limits.max_batch_tokens, "a step is larger than its budget"

    def _prompts(self) -> list[Request]:
        """Prompts under way whose turn it is."""
        running = self.running.values()
        return [
            each
            for each in running
            if each.num_pending > 1 and not each.is_early and each.transfer.load is None
        ]

    def _check_chunks(self, plan: StepPlan, prompts: list[Request]) -> None:
        """Half of the prompt tokens of a step, or all that it lacks, go to the first in turn."""
        num_tokens = num_chunk_tokens(plan.requests)
        first = min(self._prompts(), key=by_order, default=None)
        if num_tokens and first is not None and first in prompts:
            chunks = {row.request_id: row.stop - row.start for row in plan.requests}
            packing = first.next_packing(first.num_computed)
            left = first.num_pending if packing is None else packing - first.num_computed
            assert chunks[first.request_id] >= min(first.num_pending, left, num_tokens / 2), (
                "the prompt whose turn it is waits for others"
            )

    def _check_row(self, row: ScheduledRequest) -> None:
        request = self.running[row.request_id]
        assert request.lease is not None
        assert row.start == request.num_computed < row.stop <= len(request.tokens)
        size, shared = self.cache.page_size, request.lease.num_shared_pages
        assert row.start >= shared * size, "a step writes a page that the tree owns"
        depth = row.draft_plan.depth
        assert len(row.page_ids) * size >= row.stop + depth - row.extras.num_packed_away, (
            "a row lacks pages"
        )
        if (packing := request.next_packing(row.start)) is not None:
            assert row.stop + depth <= packing, "a step crosses a packing"
        assert len(request.tokens) + depth < request.max_len or not depth, (
            "a draft cannot be served"
        )
        assert (row.extras.state is None) == (self.cache.states is None), "a row lacks its state"
        if row.extras.state is not None:
            self._check_state(row, row.extras.state)

    def _check_state(self, row: ScheduledRequest, state: StateUse) -> None:
        plan, size = row.draft_plan, self.cache.page_size
        assert plan.depth <= MAX_STATE_DRAFT, "a draft is longer than a log has room for"
        assert plan.draft.is_chain, "a draft is a tree, and a state cannot follow it"
        assert not plan.may_branch, "a draft may be a tree, and a state cannot follow it"
        ends = [position for position, _ in state.keeps]
        assert ends == sorted(set(ends)), "kept page ends are out of order"
        for position in ends:
            assert position % size == 0, "a state is kept where no page ends"
            assert row.start < position <= row.stop, "a state is kept outside of a step"


def _check_request(request: Request) -> None:
    """I3 and I8 of one request that was in a step."""
    assert len(request.tokens) <= request.max_len, "more tokens than were asked for"
    if request.status is RequestStatus.FINISHED:
        assert request.lease is None, "a finished request owns pages"

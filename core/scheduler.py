"""Scheduler: which tokens of which requests the next step computes.

Pure Python, synchronous, no clock of its own: `add` and `abort` change who is there, `schedule`
makes a plan, `commit` takes its outcome. It is the only writer of `Request` and, through
`PrefixCache`, the only one that moves KV pages.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from sortedcontainers import SortedKeyList

from ..radix_cache import PrefixCache
from .admission import SchedulerLimits, check_fits, check_token_ids, shares_prefill, would_fit
from .audit import check_ledger
from .commit import row_error, take_output
from .drafting import fit_pages, make_row, pending_upto, share_of
from .errors import ForetokenError, InvalidRequest, QueueFull
from .pace import Pace
from .pages import borrow, give_back, pin_prompt, publish
from .request import Delta, FinishReason, Request, RequestStatus
from .speculation import NO_SPECULATION, NOTHING, Careful, DraftPlan, Speculator
from .step import PlanRow, RowOutput, StepOutput, StepPlan

logger = logging.getLogger(__name__)
Event = tuple[Request, Delta]


class Scheduler:
    """Continuous batching over one KV pool.

    A step serves the requests that decode first, each with its draft, then prefill chunks with
    what is left of the token budget: a long prompt never stalls a stream. When pages run out the
    request that comes last (by priority, then arrival) is preempted: released and queued again.
    """

    def __init__(
        self, cache: PrefixCache, limits: SchedulerLimits, speculator: Speculator = NO_SPECULATION
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.speculator = Careful(speculator)
        self.running: dict[str, Request] = {}
        self.waiting: SortedKeyList[Request] = SortedKeyList(key=lambda request: request.order)
        self.num_preemptions = 0
        self._pace = Pace(limits.max_slowdown)
        self._by_id: dict[str, Request] = {}
        self._departed: list[str] = []  # gave up their pages since the last plan
        self._num_arrived = 0

    # -- who is there ---------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens that one request may reach: the context, or all of the pool."""
        pool = self.cache.num_total_pages * self.cache.page_size
        return min(self.limits.max_model_len, pool)

    def add(self, request: Request, now: float) -> None:
        """Queue a request that `check` let through."""
        params = request.sampling.params
        asked = (
            self.capacity if params.max_tokens is None else request.prompt_len + params.max_tokens
        )
        request.max_len = min(asked, self.capacity)
        request.arrival_time, request.serial = now, self._num_arrived
        request.usage.prompt_tokens = request.prompt_len
        self._num_arrived += 1
        self.waiting.add(request)
        self._by_id[request.request_id] = request

    def check(self, request: Request, *, num_ahead: int = 0) -> None:
        """Refuse what cannot be served; ``num_ahead`` requests are about to be added.

        Raises `QueueFull`, `PromptTooLong`, or `InvalidRequest` for token ids that the model
        does not have and for a request id that is in use.
        """
        if request.request_id in self._by_id:
            raise InvalidRequest("request_id is in use", param="request_id")
        check_fits(request, self.capacity)
        check_token_ids(request, self.limits.vocab_size)
        if self.num_requests + num_ahead >= self.limits.max_queued + self.limits.max_running:
            raise QueueFull(f"{len(self.waiting) + num_ahead} requests are waiting already")

    def abort(
        self, request_id: str, now: float, error: ForetokenError | None = None
    ) -> list[Event]:
        """End a request in whatever phase it is; unknown ids are ignored."""
        request = self._by_id.get(request_id)
        if request is None:
            return []
        return [(request, self._finish(request, _terminal(error), now))]

    def abort_all(self, now: float, error: ForetokenError | None = None) -> list[Event]:
        """End every request."""
        return [event for each in list(self._by_id) for event in self.abort(each, now, error)]

    def fail(self, plan: StepPlan, now: float, error: ForetokenError) -> list[Event]:
        """End the requests of a step that was not computed; what it wrote reaches nobody."""
        requests = [self.running[row.request_id] for row in plan.rows]
        return [
            (each, self._finish(each, Delta(error=error), now, keep=False)) for each in requests
        ]

    def expire(self, now: float) -> list[Event]:
        """End the requests whose deadline has passed."""
        late = [
            request.request_id
            for request in self._by_id.values()
            if request.deadline is not None and now - request.arrival_time >= request.deadline
        ]
        events = [event for request_id in late for event in self.abort(request_id, now)]
        for _, delta in events:
            delta.stop_reason = "deadline"
        return events

    @property
    def num_requests(self) -> int:
        """Requests waiting or running."""
        return len(self._by_id)

    # -- plan -----------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """The next step. Empty when nothing is to be done; never empty while a request runs."""
        self.cache.tick(now)
        budget = self.limits.max_batch_tokens
        decodes = self._plan_decodes(budget)
        budget -= len(decodes)
        paced = self._pace.limit(len(decodes), budget)
        drafts = self._plan_drafts(decodes, budget, paced)
        budget = min(paced, budget - sum(plan.num_rows for plan in drafts or ()))
        chunks = self._plan_chunks(budget, {each.request_id for each in decodes}, now)
        # Drafts take what pages are left: a chunk that had to evict for them would cost hits.
        rows = list(map(self._draft_row, decodes, drafts or repeat(NOTHING)))
        return self._make_plan(rows + chunks, is_plain=drafts is None)

    def _make_plan(self, rows: list[PlanRow], *, is_plain: bool) -> StepPlan:
        if not rows:  # nobody will read it: what has to be told waits for the next plan
            return StepPlan(rows=(), fresh_pages=array("q"))
        departed, self._departed = self._departed, []
        return StepPlan(
            rows=rows,
            fresh_pages=self.cache.take_fresh_pages(),
            is_plain=is_plain,
            departed=departed,
        )

    def _plan_decodes(self, budget: int) -> list[Request]:
        """Requests that lack one token, with a page for it, in order."""
        ready = sorted((r for r in self.running.values() if r.num_pending == 1), key=_order)
        planned: dict[str, Request] = {}
        for request in ready[:budget]:
            if request.lease is not None and self._reserve(request, len(request.tokens), planned):
                planned[request.request_id] = request
        return list(planned.values())

    def _plan_drafts(
        self, decodes: list[Request], spare: int, paced: int
    ) -> Sequence[DraftPlan] | None:
        """What each shall draft within the ``spare`` rows; nothing delays a first token.

        ``paced``: tokens that prompts may have of these. None when nobody drafts.
        """
        if not decodes or self.speculator.rests():
            return None
        limits = [self._draft_limit(request) if request.num_output else 0 for request in decodes]
        if not any(limits):
            return None
        others = [r.num_pending for r in self.running.values() if r.num_pending > 1]
        others += [len(r.tokens) for r in self.waiting[: self.limits.max_running]]
        budget = share_of(spare, others_wait=bool(others))
        num_prefill = pending_upto(others, paced)
        return self.speculator.plan(decodes, limits, budget=budget, num_prefill=num_prefill)

    def _draft_limit(self, request: Request) -> int:
        """Draft tokens that may still be served: the last token of an answer is never a draft."""
        return max(0, min(self.limits.depth_cap, request.max_len - len(request.tokens) - 1))

    def _draft_row(self, request: Request, plan: DraftPlan) -> PlanRow:
        stop = len(request.tokens)
        if request.lease is None or plan is NOTHING:
            return make_row(request, stop)
        plan, branches = fit_pages(self.cache, request.lease, stop, plan)
        return make_row(request, stop, plan, branches)

    def _plan_chunks(self, budget: int, planned: set[str], now: float) -> list[PlanRow]:
        """Prefill chunks, with pages, for what is left of the token budget."""
        rows = []
        for request in self._prefills(now) if budget > 0 else ():
            row = self._plan_chunk(request, budget, planned)
            if row is not None:
                rows.append(row)
                planned.add(row.request_id)
                budget -= row.stop - row.start
            if budget <= 0:
                break
        return rows

    def _prefills(self, now: float) -> Iterator[Request]:
        """Running requests that lack more than one token, then admitted ones, in order.

        Admission happens as this is consumed, so that nobody is admitted once the budget is gone.
        """
        yield from sorted((r for r in self.running.values() if r.num_pending > 1), key=_order)
        for request in list(self.waiting):
            if len(self.running) >= self.limits.max_running:
                return
            if shares_prefill(self.cache, request, self.running.values()):
                continue
            if not would_fit(self.cache, request, len(self.running)):
                return  # those behind it must not take the pages that it waits for
            self._admit(request, now)
            yield request

    def _admit(self, request: Request, now: float) -> None:
        """Give a waiting request its lease."""
        request.lease = borrow(self.cache, request)
        request.num_computed = request.lease.num_cached_tokens
        self.waiting.remove(request)
        self.running[request.request_id] = request
        request.status = RequestStatus.RUNNING
        if request.num_preemptions == 0:
            request.usage.queue_time = now - request.arrival_time
        self.speculator.join(request)

    def _plan_chunk(self, request: Request, budget: int, planned: set[str]) -> PlanRow | None:
        stop = request.num_computed + min(request.num_pending, budget)
        reserved = self._reserve(request, stop, planned, preempt_self=False)
        return make_row(request, stop) if reserved else None

    # -- pages ----------------------------------------------------------------------------------

    def _reserve(
        self,
        request: Request,
        upto: int,
        planned: Iterable[str],
        *,
        preempt_self: bool = True,
    ) -> bool:
        """Pages for positions below ``upto``, at the cost of those that come after this request."""
        while request.lease is not None and not self.cache.extend(request.lease, upto):
            victim = self._victim(planned)
            if victim is request and not preempt_self:
                return False
            self._preempt(victim)
        return request.lease is not None

    def _victim(self, planned: Iterable[str]) -> Request:
        return max((r for r in self.running.values() if r.request_id not in planned), key=_order)

    def _preempt(self, request: Request) -> None:
        """Release and queue again; what is computed stays in the tree as long as there is room."""
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)

    def _release(self, request: Request, *, keep: bool = True) -> None:
        give_back(self.cache, request, keep=keep)
        del self.running[request.request_id]
        request.num_computed = 0
        self._departed.append(request.request_id)

    # -- commit ---------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, output: StepOutput, now: float) -> list[Event]:
        """Take a step's outcome: the only place where ``tokens`` and ``num_computed`` grow."""
        self._pace.observe(plan, output)
        events = []
        for row, out in zip(plan.rows, output.rows, strict=True):
            request = self.running[row.request_id]
            delta = self._commit_row(request, row, out, now, learns=not plan.is_plain)
            if delta.token_ids or delta.prompt_logprobs or delta.terminal:
                events.append((request, delta))
        return events

    def _commit_row(
        self, request: Request, row: PlanRow, out: RowOutput, now: float, *, learns: bool
    ) -> Delta:
        try:
            delta = take_output(request, row, out, now)
        except Exception:
            logger.exception("request %s failed while its tokens were read", request.request_id)
            failed = Delta(error=ForetokenError("the answer could not be decoded"))
            return self._finish(request, failed, now)
        if learns and delta.token_ids:
            self.speculator.observe(request, row, out, len(delta.token_ids))
        if (
            out.error is not None and not delta.terminal
        ):  # it would have come to that without drafts
            delta.error = row_error(request, out)
        if delta.terminal:
            self._finish(request, delta, now, keep=out.error is None)
        elif request.lease is not None:
            if row.stop - row.start > 1 or row.start < request.prompt_len:
                publish(self.cache, request)
            self.cache.shrink(request.lease, len(request.tokens))
        if 0 < len(delta.token_ids) == request.num_output:  # the prompt is computed
            pin_prompt(self.cache, request)
        return delta

    def _finish(self, request: Request, delta: Delta, now: float, *, keep: bool = True) -> Delta:
        if request.status is RequestStatus.RUNNING:
            self._release(request, keep=keep)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._by_id[request.request_id]
        self.speculator.leave(request)
        request.usage.total_time = now - request.arrival_time
        return delta

    def audit(self) -> None:
        """Every invariant that ties requests to pages; raises AssertionError."""
        check_ledger(self.cache, self.running, list(self.waiting), set(self._by_id))


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _terminal(error: ForetokenError | None) -> Delta:
    return Delta(error=error) if error else Delta(finish_reason=FinishReason.ABORT)

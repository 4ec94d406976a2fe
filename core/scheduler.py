"""Scheduler: which tokens of which requests the next step computes.

Pure Python, synchronous, no clock of its own: `add` and `abort` change who is there, `schedule`
makes a plan, `commit` takes its outcome. With its roster it is the only writer of `Request` and,
through `PrefixCache`, the only one that moves KV pages.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat

from ..radix_cache import PrefixCache
from ..radix_cache.audit import Steps, run
from .admission import NOBODY, Ahead, SchedulerLimits
from .commit import late_end, row_error, take_output
from .drafting import draft_limits, fit_pages, make_row, share_of
from .errors import ForetokenError, InvalidRequest
from .pace import Pace
from .pages import borrow, give_back, pin_prompt, publish
from .request import Delta, FinishReason, Request, RequestStatus
from .roster import Roster
from .speculation import NO_SPECULATION, NOTHING, DraftPlan, GuardedSpeculator, Speculator
from .step import Branch, PlanRow, RowOutput, StepOutput, StepPlan

logger = logging.getLogger(__name__)
Event = tuple[Request, Delta]


class Scheduler:
    """Continuous batching over one KV pool.

    A step serves the requests that decode first, each with its draft, then prefill chunks with
    what is left of the token budget: a long prompt never stalls a stream. When pages run out the
    request that comes last is preempted: released and queued again. That order (`Request.order`)
    never changes, so no two requests preempt each other in turn, whatever the queue thinks of
    their tenants; and a request that waits long enough comes before all who arrive.
    """

    def __init__(
        self, cache: PrefixCache, limits: SchedulerLimits, speculator: Speculator = NO_SPECULATION
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.speculator = GuardedSpeculator(speculator)
        # Tokens that one request may reach: the context, or all of the pool.
        pool = cache.num_total_pages * cache.page_size
        self.capacity = min(limits.max_model_len, pool)
        self.roster = Roster(limits, self.capacity)
        self.running, self.waiting = self.roster.running, self.roster.waiting
        self.num_preemptions = 0
        self._pace = Pace(limits.max_slowdown)
        self._departed: list[str] = []  # gave up their pages since the last plan

    # -- who is there ---------------------------------------------------------------------------

    def check(self, request: Request, *, ahead: Ahead = NOBODY) -> None:
        """Refuse what cannot be served; raises what `Roster.check` does."""
        self.roster.check(request, ahead)

    def add(self, request: Request, now: float) -> None:
        """Queue a request that `check` let through."""
        self.roster.add(request, now)

    def abort(
        self, request_id: str, now: float, error: ForetokenError | None = None
    ) -> list[Event]:
        """End a request in whatever phase it is; unknown ids are ignored."""
        request = self.roster.get(request_id)
        if request is None:
            return []
        return [(request, self._finish(request, _terminal(error), now))]

    def abort_all(self, now: float, error: ForetokenError | None = None) -> list[Event]:
        """End every request."""
        return [event for each in list(self.roster.ids) for event in self.abort(each, now, error)]

    def fail(self, plan: StepPlan, now: float, error: ForetokenError) -> list[Event]:
        """End the requests of a step that was not computed; what it wrote reaches nobody."""
        requests = [self.running[row.request_id] for row in plan.rows]
        return [
            (each, self._finish(each, Delta(error=error), now, keep=False)) for each in requests
        ]

    def ease(self, plan: StepPlan) -> None:
        """Memory ran out in this step: less of prompts in those to come."""
        self._pace.ease(plan)

    def settle(self, plan: StepPlan) -> None:
        """A step was run in parts: what these did not get to is paid for when its turn comes."""
        for row in plan.rows:
            if (request := self.running.get(row.request_id)) is not None:
                request.num_prepaid += max(0, row.stop - request.num_computed)

    def expire(self, now: float) -> list[Event]:
        """End the requests whose deadline has passed; one that never ran has failed."""
        late = self.roster.late(now)
        return [(request, self._finish(request, late_end(request), now)) for request in late]

    @property
    def num_requests(self) -> int:
        """Requests waiting or running."""
        return len(self.roster)

    # -- plan -----------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """The next step. Empty when nothing is to be done; never empty while a request runs."""
        self.cache.tick(now)
        self.roster.begin_round(now)
        budget = self.limits.max_batch_tokens
        decodes = self._plan_decodes(budget)
        budget -= len(decodes)
        paced = self._pace.limit(len(decodes), budget)
        prefills = [each for each in self.running.values() if each.num_pending > 1]
        drafts = self._plan_drafts(decodes, prefills, budget, paced)
        budget = min(paced, budget - sum(plan.num_rows for plan in drafts or ()))
        chunks = self._plan_chunks(prefills, budget, {each.request_id for each in decodes}, now)
        # Drafts take what pages are left: a chunk that had to evict for them would cost hits.
        rows = list(map(self._draft_row, decodes, drafts or repeat(NOTHING)))
        return self.make_plan(rows + chunks, is_plain=drafts is None)

    def make_plan(self, rows: list[PlanRow], *, is_plain: bool) -> StepPlan:
        """A plan of these rows, which tells what was not told yet."""
        if not rows:  # nobody will read it: what has to be told waits for the next plan
            return StepPlan(rows=(), fresh_pages=array("q"))
        departed, self._departed = self._departed, []
        return StepPlan(
            rows=rows,
            fresh_pages=self.cache.take_fresh_pages(),
            is_plain=is_plain,
            departed=departed,
        )

    def drop(self, plan: StepPlan) -> None:
        """A plan of one token a row is not carried out: the next one tells what it had to tell."""
        self._departed = [*plan.departed, *self._departed]
        self.cache.return_fresh_pages(plan.fresh_pages)
        for row in plan.rows:
            if (request := self.running.get(row.request_id)) is not None:
                request.num_prepaid += 1

    def _plan_decodes(self, budget: int) -> list[Request]:
        """Requests that lack one token, with a page for it, in order."""
        ready = [each for each in self.running.values() if each.num_pending == 1]
        planned: dict[str, Request] = {}
        for request in ready[:budget]:
            if request.lease is not None and self._reserve(request, len(request.tokens), planned):
                planned[request.request_id] = request
        return list(planned.values())

    def _plan_drafts(
        self, decodes: list[Request], prefills: list[Request], spare: int, paced: int
    ) -> Sequence[DraftPlan] | None:
        """What each shall draft within the ``spare`` rows, of which prompts may have ``paced``.

        None when nobody drafts.
        """
        if not decodes or self.speculator.is_silent(decodes):
            return None
        limits = draft_limits(decodes, self.limits.depth_cap)
        if not any(limits):
            return None
        num_prompt_tokens = sum(each.num_pending for each in prefills) + self.waiting.num_tokens
        num_pending = min(paced, num_prompt_tokens)
        budget = share_of(spare, others_wait=num_pending > 0)
        return self.speculator.plan(decodes, limits, budget=budget, num_prefill=num_pending)

    def _draft_row(self, request: Request, plan: DraftPlan) -> PlanRow:
        stop = len(request.tokens)
        if request.lease is None or plan is NOTHING:
            return self._row(request, stop)
        plan, branches = fit_pages(self.cache, request.lease, stop, plan)
        return self._row(request, stop, plan, branches)

    def _row(
        self,
        request: Request,
        stop: int,
        plan: DraftPlan = NOTHING,
        branches: Sequence[Branch] = (),
    ) -> PlanRow:
        """A share of the step, charged to its tenant at once: who is let in next may depend on it.

        Drafts are charged when they are verified: the model thread says how many there are.
        """
        self.charge(request, stop - request.num_computed)
        return make_row(request, stop, plan, branches)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Tokens of a request are in a plan: its tenant pays, but for what it paid before."""
        num_due = max(0, num_tokens - request.num_prepaid)
        request.num_prepaid -= num_tokens - num_due
        self.waiting.charge(request.tenant, num_due)

    def _plan_chunks(
        self, prefills: list[Request], budget: int, planned: set[str], now: float
    ) -> list[PlanRow]:
        """Chunks of prompts, with pages, for what is left of the token budget.

        Of those that run already, in order, then of admitted ones: no request is admitted once the
        budget is gone.
        """
        rows = []
        for request in chain(prefills, self._admitted(now)) if budget > 0 else ():
            row = self._plan_chunk(request, budget, planned)
            if row is not None:
                rows.append(row)
                planned.add(row.request_id)
                budget -= row.stop - row.start
            if budget <= 0:
                break
        return rows

    def _admitted(self, now: float) -> Iterator[Request]:
        """Waiting requests, each admitted as it is asked for."""
        for request in self.roster.candidates(self.cache):
            self._admit(request, now)
            yield request

    def _admit(self, request: Request, now: float) -> None:
        """Give a waiting request its lease."""
        request.lease = borrow(self.cache, request)
        request.num_computed = request.lease.num_cached_tokens
        self.roster.let_in(request)
        if request.num_preemptions == 0:
            request.usage.queue_time = now - request.arrival_time
        self.speculator.join(request)

    def _plan_chunk(self, request: Request, budget: int, planned: set[str]) -> PlanRow | None:
        stop = request.num_computed + min(request.num_pending, budget)
        reserved = self._reserve(request, stop, planned, preempt_self=False)
        return self._row(request, stop) if reserved else None

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
        last_first = reversed(self.running.values())
        return next(each for each in last_first if each.request_id not in planned)

    def _preempt(self, request: Request) -> None:
        """Release and queue again; what is computed stays in the tree as long as there is room."""
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.roster.send_back(request)

    def _release(self, request: Request, *, keep: bool = True) -> None:
        give_back(self.cache, request, keep=keep)
        request.num_computed = 0
        self._departed.append(request.request_id)

    def flush(self, *namespaces: str | None) -> int:
        """Drop what no request uses, cached pages and what drafts draw on; returns the pages freed.

        Of these namespaces, of all when none is named; None is the shared default.
        """
        try:
            self.speculator.flush(*namespaces)
        finally:
            num_pages = self.cache.flush(*namespaces)
        return num_pages

    def flush_prefix(self, tokens: array[int], namespace: str | None) -> int:
        """Drop cached pages that begin with ``tokens`` and no request uses; returns how many.

        Drafts of the namespace go altogether: they know no prefixes. Raises `InvalidRequest` for
        tokens that do not fill a page.
        """
        page_size = self.cache.page_size
        if len(tokens) < page_size:
            message = f"a prefix must fill a page of {page_size} tokens, not {len(tokens)}"
            raise InvalidRequest(message, param="prefix")
        try:
            self.speculator.flush(namespace)
        finally:
            num_pages = self.cache.flush_prefix(tokens, namespace=namespace)
        return num_pages

    # -- commit ---------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, output: StepOutput, now: float) -> list[Event]:
        """Take a step's outcome: the only place where ``tokens`` and ``num_computed`` grow.

        A request may have ended while a plan made ahead was carried out.
        """
        self._pace.observe(plan, output)
        events = []
        for row, out in zip(plan.rows, output.rows, strict=True):
            request = self.running.get(row.request_id)
            if request is None:
                continue
            if out.num_proposed:  # accepted or not: rows were computed for them
                self.waiting.charge(request.tenant, out.num_proposed + len(row.branches))
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
        if out.error is not None and not delta.terminal:  # so it would have been without drafts
            delta.error = row_error(request, out)
        if delta.terminal:
            self._finish(request, delta, now, keep=out.error is None)
        elif request.lease is not None:
            if row.stop - row.start > 1 or row.start < request.prompt_len:
                publish(self.cache, request)
            if learns:  # else no draft has taken pages
                self.cache.shrink(request.lease, len(request.tokens))
        if 0 < len(delta.token_ids) == request.num_output:  # the prompt is computed
            pin_prompt(self.cache, request)
        return delta

    def _finish(self, request: Request, delta: Delta, now: float, *, keep: bool = True) -> Delta:
        if request.status is RequestStatus.RUNNING:
            self._release(request, keep=keep)
        self.roster.discard(request)
        self.speculator.leave(request)
        request.usage.total_time = now - request.arrival_time
        return delta

    def audit(self) -> None:
        """Every invariant that ties requests to pages; raises AssertionError."""
        run(self.checks())

    def checks(self) -> Steps:
        """`audit` in steps, between which nothing may change."""
        yield from self.roster.checks(self.cache)


def _terminal(error: ForetokenError | None) -> Delta:
    return Delta(error=error) if error else Delta(finish_reason=FinishReason.ABORT)

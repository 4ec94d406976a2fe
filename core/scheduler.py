"""Scheduler: which tokens of which requests the next step computes.

Pure Python, synchronous, no clock of its own: `add` and `abort` change who is there, `schedule`
makes a plan, `commit` takes its outcome. It is the only writer of `Request` and, through
`PrefixCache`, the only one that moves KV pages.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator

from sortedcontainers import SortedKeyList

from ..radix_cache import PrefixCache
from .admission import SchedulerLimits, check_fits, check_token_ids
from .commit import take_output
from .errors import ForetokenError, InvalidRequest, QueueFull
from .request import Delta, FinishReason, Request, RequestStatus
from .step import PlanRow, RowOutput, StepOutput, StepPlan

logger = logging.getLogger(__name__)
Event = tuple[Request, Delta]
RETURN_GROWTH = 64  # tokens that each running request may grow before a preempted one is back


class Scheduler:
    """Continuous batching over one KV pool.

    A step serves the requests that decode first, each with its draft, then prefill chunks with
    what is left of the token budget: a long prompt never stalls a stream. When pages run out the
    request that comes last (by priority, then arrival) is preempted: released and queued again.
    """

    def __init__(self, cache: PrefixCache, limits: SchedulerLimits) -> None:
        self.cache = cache
        self.limits = limits
        self.running: dict[str, Request] = {}
        self.waiting: SortedKeyList[Request] = SortedKeyList(key=lambda request: request.order)
        self.num_preemptions = 0
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
        budget = self.limits.max_batch_tokens
        rows = self._plan_decodes(budget)
        budget -= sum(1 + row.max_draft for row in rows)
        planned = {row.request_id for row in rows}
        for request in self._prefills(now):
            if budget <= 0:
                break
            row = self._plan_chunk(request, budget, planned)
            if row is not None:
                rows.append(row)
                planned.add(row.request_id)
                budget -= row.stop - row.start
        return self._make_plan(rows)

    def _make_plan(self, rows: list[PlanRow]) -> StepPlan:
        if not rows:  # nobody will read it: what has to be told waits for the next plan
            return StepPlan(rows=(), fresh_pages=array("q"))
        departed, self._departed = self._departed, []
        return StepPlan(rows=rows, fresh_pages=self.cache.take_fresh_pages(), departed=departed)

    def _plan_decodes(self, budget: int) -> list[PlanRow]:
        ready = sorted((r for r in self.running.values() if r.num_pending == 1), key=_order)
        planned: dict[str, Request] = {}
        for request in ready[:budget]:
            if request.lease is not None and self._reserve(request, len(request.tokens), planned):
                planned[request.request_id] = request
        share = self._draft_share(budget - len(planned), len(planned))
        return [
            self._row(request, len(request.tokens), self._fit_draft(request, share))
            for request in planned.values()
        ]

    def _draft_share(self, spare: int, num_decodes: int) -> int:
        """Draft tokens that each may have; half of the spare budget is others' while any wait."""
        others_wait = self.waiting or any(r.num_pending > 1 for r in self.running.values())
        return (spare // 2 if others_wait else spare) // max(1, num_decodes)

    def _fit_draft(self, request: Request, share: int) -> int:
        """Draft tokens that fit depth, budget, the request's end, and pages without eviction."""
        lease, cache, stop = request.lease, self.cache, len(request.tokens)
        if lease is None or request.num_output == 0:  # nothing may delay the first token
            return 0
        depth = self.limits.depth if request.depth is None else request.depth
        pages = (len(lease.page_ids) + cache.num_free_pages) * cache.page_size - stop
        end = request.max_len - stop - 1
        wanted = max(0, min(depth, self.limits.depth_cap, share, end, pages))
        cache.extend(lease, stop + wanted, evict=False)
        return wanted

    def _prefills(self, now: float) -> Iterator[Request]:
        """Running requests that lack more than one token, then admitted ones, in order.

        Admission happens as this is consumed, so that nobody is admitted once the budget is gone.
        """
        yield from sorted((r for r in self.running.values() if r.num_pending > 1), key=_order)
        for request in list(self.waiting):
            if len(self.running) >= self.limits.max_running:
                return
            if self._shares_running_prefill(request):
                continue
            if not self._would_fit(request):
                return  # those behind it must not take the pages that it waits for
            self._admit(request, now)
            yield request

    def _admit(self, request: Request, now: float) -> None:
        """Give a waiting request its lease."""
        request.lease = self.cache.acquire(
            request.tokens,
            namespace=request.namespace,
            limit=_cache_limit(request),
            priority=request.priority,
            is_first=request.num_preemptions == 0,
        )
        request.num_computed = request.lease.num_cached_tokens
        self.waiting.remove(request)
        self.running[request.request_id] = request
        request.status = RequestStatus.RUNNING
        if request.num_preemptions == 0:
            request.usage.cached_tokens = request.num_computed
            request.usage.queue_time = now - request.arrival_time

    def _shares_running_prefill(self, request: Request) -> bool:
        """Whether a running request is about to compute this one's next page: then wait for it."""
        if _cache_limit(request) is not None:
            return False
        cached = self.cache.match_len(request.tokens, namespace=request.namespace)
        upto = cached + self.cache.page_size
        if upto >= len(request.tokens):
            return False
        page = request.tokens[:upto]
        return any(
            other.num_computed < upto <= len(other.tokens)
            and other.namespace == request.namespace
            and other.tokens[:upto] == page
            for other in self.running.values()
            if other.num_pending > 1
        )

    def _would_fit(self, request: Request) -> bool:
        """Whether all its tokens and one more fit, with room to grow for each that runs.

        Without more room a preempted request would come back only to be preempted again.
        """
        growth = RETURN_GROWTH if request.num_preemptions else 1
        return self.cache.would_fit(
            request.tokens,
            len(request.tokens) + 1,
            namespace=request.namespace,
            slack=len(self.running) * -(-growth // self.cache.page_size),
        )

    def _plan_chunk(self, request: Request, budget: int, planned: set[str]) -> PlanRow | None:
        stop = request.num_computed + min(request.num_pending, budget)
        reserved = self._reserve(request, stop, planned, preempt_self=False)
        return self._row(request, stop) if reserved else None

    def _row(self, request: Request, stop: int, max_draft: int = 0) -> PlanRow:
        return PlanRow(
            request_id=request.request_id,
            tokens=request.tokens,
            start=request.num_computed,
            stop=stop,
            page_ids=request.lease.page_ids if request.lease is not None else array("q"),
            sampling=request.sampling,
            max_draft=max_draft,
        )

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
        lease, request.lease = request.lease, None
        if lease is not None:
            self.cache.release(lease, request.tokens, request.num_computed, keep=keep)
        del self.running[request.request_id]
        request.num_computed = 0
        self._departed.append(request.request_id)

    # -- commit ---------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, output: StepOutput, now: float) -> list[Event]:
        """Take a step's outcome: the only place where ``tokens`` and ``num_computed`` grow."""
        events = []
        for row, out in zip(plan.rows, output.rows, strict=True):
            request = self.running[row.request_id]
            delta = self._commit_row(request, row, out, now)
            if delta.token_ids or delta.prompt_logprobs or delta.terminal:
                events.append((request, delta))
        return events

    def _commit_row(self, request: Request, row: PlanRow, out: RowOutput, now: float) -> Delta:
        if out.error is not None:
            return self._finish(request, Delta(error=ForetokenError(out.error)), now, keep=False)
        try:
            delta = take_output(request, row, out, now)
        except Exception:
            logger.exception("request %s failed while its tokens were read", request.request_id)
            failed = Delta(error=ForetokenError("the answer could not be decoded"))
            return self._finish(request, failed, now)
        if delta.terminal:
            return self._finish(request, delta, now)
        if request.lease is not None:
            if row.stop - row.start > 1:
                self.cache.publish(request.lease, request.tokens, request.num_computed)
            self.cache.shrink(request.lease, len(request.tokens))
        return delta

    def _finish(self, request: Request, delta: Delta, now: float, *, keep: bool = True) -> Delta:
        if request.status is RequestStatus.RUNNING:
            self._release(request, keep=keep)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._by_id[request.request_id]
        request.usage.total_time = now - request.arrival_time
        return delta

    # -- audit ----------------------------------------------------------------------------------

    def audit(self) -> None:
        """Every invariant that ties requests to pages; raises AssertionError."""
        leases = [r.lease for r in self.running.values() if r.lease is not None]
        self.cache.check(leases)
        assert len(leases) == len(self.running), "every running request owns a lease"
        for request in self.waiting:
            assert request.lease is None, "a waiting request owns nothing"
            assert request.status is RequestStatus.WAITING
        ids = {*self.running, *(r.request_id for r in self.waiting)}
        assert ids == set(self._by_id), "a request is in exactly one state"
        for request in self.running.values():
            assert request.num_pending >= 1, "there is always a token to compute"


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _cache_limit(request: Request) -> int | None:
    """Log-probabilities of the prompt need its rows computed: read no cache beyond those told."""
    told, wanted = request.num_prompt_logprobs, request.prompt_len - 1
    asks = request.sampling.params.prompt_logprobs is not None
    return told if asks and told < wanted else None


def _terminal(error: ForetokenError | None) -> Delta:
    return Delta(error=error) if error else Delta(finish_reason=FinishReason.ABORT)

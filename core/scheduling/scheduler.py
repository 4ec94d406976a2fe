"""Scheduler: decides which tokens of which requests the next step computes.

Pure Python, synchronous, without a clock: `add` and `abort` change the set of requests, `schedule`
makes a plan, `commit` applies its outcome. With its request table it is the only writer of
`Request` and, through `PrefixCache`, the only one that moves KV pages.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice, repeat

from msgspec.structs import replace

from ...radix_cache import PrefixCache
from ...radix_cache.audit import Steps, run
from ..errors import ForetokenError, InvalidRequest
from ..interface.draft import NO_DRAFT_PLAN
from ..interface.extras.branches import chunk_stop
from ..interface.extras.request_extras import PLAIN_REQUEST
from ..interface.extras.tiers import KVTiers
from ..interface.output import RequestOutput, StepOutput
from ..interface.plan import NO_PAGES, ScheduledRequest, StepPlan
from ..interface.protocols import NO_SPECULATION, Speculator
from ..interface.request import (
    Delta,
    Fault,
    FinishReason,
    Request,
    RequestStatus,
    by_order,
    by_work,
)
from .accounting import CommittedRow, StepAccounts
from .chunk_budget import ChunkBudget, short_prompt_share
from .guarded_speculator import guarded
from .leases import (
    acquire_kv,
    awaits_prefix,
    end_turn,
    hold_prompt,
    num_uncached_tokens,
    pin_prompt,
    release_kv,
    settle_pages,
    would_fit,
)
from .output_processor import late_end, request_error, take_output
from .page_loads import PageLoads
from .request_table import NO_ARRIVALS, PendingArrivals, RequestTable, SchedulerLimits
from .scored_rows import ScoredRows
from .shares import (
    decode_rows,
    plan_drafts,
    ready_to_decode,
    schedule_request,
    share_chunk_tokens,
    token_counts,
    without_suspects,
)
from .states import use_state, want_states

logger = logging.getLogger(__name__)
Event = tuple[Request, Delta]
MAX_CLAIMS = 16  # maximum number of waiting requests for which a new prompt keeps states


class Scheduler:
    """Continuous batching over one KV pool.

    A step serves decoding requests first, each with its draft, then prefill chunks with the rest of
    the token budget: a long prompt never stalls a stream. Nor does it stall shorter prompts: a
    share of the chunk tokens goes to the prompts with the least left to compute, and the rest goes
    to the prompts in order. When pages run out, the last running request in order is preempted: its
    pages are released, and it is queued again. The order (`Request.order`) never changes, so no two
    requests preempt each other in turn, and a request that waits long enough comes before all new
    requests.

    A model with recurrent states runs at most as many requests at a time as it has slots. Raises
    ValueError if it has tiers that keep no states.
    """

    def __init__(
        self,
        cache: PrefixCache,
        limits: SchedulerLimits,
        speculator: Speculator = NO_SPECULATION,
        tiers: KVTiers | None = None,
    ) -> None:
        if tiers is not None and bool(tiers.num_state_pages) != (cache.states is not None):
            raise ValueError(
                "KV tiers must keep recurrent states if and only if the model has them"
            )
        self.cache = cache
        self.limits = limits
        self.speculator = guarded(speculator)
        # A request can have as many tokens as the context and the whole pool allow.
        pool = cache.num_total_pages * cache.page_size
        self.capacity = min(limits.max_model_len, pool)
        self.request_table = RequestTable(limits, self.capacity)
        self.running, self.waiting = self.request_table.running, self.request_table.waiting
        self.accounts = StepAccounts(self.speculator, self.waiting.charge)
        self.num_preemptions = 0
        self.num_packed_away_tokens = 0  # number of answer tokens whose KV was packed away
        self.openings: Sequence[array[int]] = ()  # `set_openings` sets them
        self.page_loads = None if tiers is None else PageLoads(cache, tiers)
        if self.page_loads is not None:
            self.page_loads.has_room = self._has_room
        self._chunk_budget = ChunkBudget(limits.max_slowdown)
        self._released_request_ids: list[str] = []  # ids that were released since the last plan

    def set_openings(self, openings: Sequence[array[int]]) -> None:
        """Set the token ids with which chat templates open an answer, the longest sequence first.

        A prompt ends with one such sequence. The next turn of a conversation may have other tokens
        in its place, so a recurrent state is kept before it.
        """
        self.openings = openings

    # -- requests -------------------------------------------------------------------------------

    def check(self, request: Request, *, pending: PendingArrivals | None = NO_ARRIVALS) -> None:
        """Refuse a request that cannot be served; raises the errors of `RequestTable.check`.

        Raises `InvalidRequest` for branches if the model has recurrent states, which follow one
        path.
        """
        if request.extras.branches is not None and self.cache.states is not None:
            raise InvalidRequest("a model with recurrent states takes no branches", param="prompt")
        self.request_table.check(request, pending)

    def add(self, request: Request, now: float) -> None:
        """Queue a request that passed `check`."""
        request.num_uncached = num_uncached_tokens(self.cache, request)
        self.request_table.add(request, now)
        self._claim_states([request], self.running.values())
        if self.page_loads is not None:
            if request.transfer.offer is not None:
                self.page_loads.meet(request)
            self.page_loads.look_up(request, now)

    def fetch(self, request: Request, now: float) -> None:
        """Load the offered pages of ``request`` into the tree, for a request with the same prompt.

        ``request`` itself is not queued, and nothing is computed for it. Without tiers the call
        does nothing.
        """
        if self.page_loads is not None:
            self.page_loads.fetch(request, now)

    def _has_room(self, request: Request) -> bool:
        return would_fit(self.cache, request, self.running.values())

    def abort(
        self, request_id: str, now: float, error: ForetokenError | None = None
    ) -> list[Event]:
        """End a waiting or running request; an unknown id is ignored."""
        request = self.request_table.get(request_id)
        if request is None:
            return []
        return [(request, self._finish(request, _terminal(error), now))]

    def abort_all(self, now: float, error: ForetokenError | None = None) -> list[Event]:
        """End every request."""
        return [
            event for each in list(self.request_table.ids) for event in self.abort(each, now, error)
        ]

    def fail(self, plan: StepPlan, now: float, error: ForetokenError) -> list[Event]:
        """End the requests of a step that failed; the KV that it wrote is not published."""
        requests = [self.running[scheduled.request_id] for scheduled in plan.requests]
        return [
            (each, self._finish(each, Delta(error=error), now, keep=False)) for each in requests
        ]

    def take_back_chunks(
        self,
        plan: StepPlan,
        now: float,
        error: ForetokenError,
        *,
        is_explained: bool,
        with_drafts: bool = False,
    ) -> list[Event]:
        """Preempt the requests of a step that failed and cannot be run again.

        Their recurrent states may already include rows of the failed step, so they resume from kept
        states. ``is_explained``: the cause of the failure is known, such as too little memory.
        Otherwise the next chunk of each request is computed in a step without other chunks. If that
        step fails, too, the request ends with ``error``. If it succeeds and the failed step had
        drafts of other requests (``with_drafts``), it counts as a failure of drafting.
        """
        events = []
        for scheduled in plan.requests:
            request = self.running[scheduled.request_id]
            if request.is_suspect and not is_explained:
                events.append((request, self._finish(request, Delta(error=error), now, keep=False)))
                continue
            if not is_explained:
                request.fault = Fault(scheduled.stop, with_drafts)
            if request.lease is not None:
                self.cache.void_state(request.lease)
            self._preempt(request)
        return events

    def shrink_chunks(self, plan: StepPlan) -> None:
        """Lower the number of prompt tokens in later steps, because memory ran out in ``plan``."""
        self._chunk_budget.shrink_chunks(plan)

    def credit_unfinished(self, plan: StepPlan) -> None:
        """Record the tokens of ``plan`` that were charged to tenants but not computed.

        The step was run in parts, and not all parts were computed.
        """
        for scheduled in plan.requests:
            if (request := self.running.get(scheduled.request_id)) is not None:
                request.num_charged_not_computed += max(0, scheduled.stop - request.num_computed)

    def expire(self, now: float) -> list[Event]:
        """End the requests whose deadline has passed; a request that never ran gets an error."""
        late = self.request_table.expired(now)
        return [(request, self._finish(request, late_end(request), now)) for request in late]

    @property
    def num_requests(self) -> int:
        """Number of waiting and running requests."""
        return len(self.request_table)

    # -- plan -----------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step.

        The plan is empty if there is no request, or if all running requests wait for their pages
        to be loaded.
        """
        self.cache.tick(now)
        self.request_table.begin_round(now)
        if self.page_loads is not None:
            self.page_loads.begin_round(now)
        budget = self.limits.max_batch_tokens
        running = self.running.values()
        decodes = self._plan_decodes(ready_to_decode(running), budget)
        budget -= len(decodes)
        max_chunk_tokens = self._chunk_budget.limit(len(decodes), budget)
        prefills = []
        if len(running) > len(decodes):
            prefills = [e for e in running if e.num_pending > 1 and e.transfer.load is None]
        num_prompt_tokens = sum([each.num_pending for each in prefills]) + self.waiting.num_tokens
        num_prefill = min(max_chunk_tokens, num_prompt_tokens)
        drafts = plan_drafts(
            self.speculator, self.cache, decodes, spare=budget, num_prefill=num_prefill
        )
        chunks = []
        if prefills or len(self.waiting):
            budget = min(max_chunk_tokens, budget - sum([each.num_rows for each in drafts or ()]))
            chunks = self._plan_chunks(prefills, budget, {each.request_id for each in decodes}, now)
        if any(self.running[each.request_id].is_suspect for each in chunks):
            drafts = None  # a suspect runs without drafts, which could cause a failure, too

        # Drafts get pages last: evicting cached pages for drafts would cost prefix hits.
        rows = decode_rows(self.cache, decodes, drafts or repeat(NO_DRAFT_PLAN))
        self.accounts.charge_decodes(decodes)
        return self.make_plan(rows + chunks, is_plain=drafts is None)

    def make_plan(self, scheduled: list[ScheduledRequest], *, is_plain: bool) -> StepPlan:
        """Return a plan of ``scheduled``, with the pages and released ids since the last plan."""
        if not scheduled:  # an empty plan is not computed, so ids and pages stay for the next plan
            return StepPlan(requests=(), newly_allocated_pages=array("q"))
        released_request_ids, self._released_request_ids = self._released_request_ids, []
        loads = self.page_loads
        return StepPlan(
            requests=scheduled,
            newly_allocated_pages=self.cache.take_newly_allocated_pages(),
            loaded_pages=NO_PAGES if loads is None else loads.take_loaded_pages(),
            is_plain=is_plain,
            released_request_ids=released_request_ids,
        )

    def discard_plan(self, plan: StepPlan) -> None:
        """Take back a plan that only decodes: the next plan gets its released ids and its pages."""
        if self.page_loads is not None:
            self.page_loads.return_loaded_pages(plan.loaded_pages)
        self._released_request_ids = [*plan.released_request_ids, *self._released_request_ids]
        self.cache.return_newly_allocated_pages(plan.newly_allocated_pages)
        for scheduled in plan.requests:
            if (request := self.running.get(scheduled.request_id)) is not None:
                request.num_charged_not_computed += 1

    def _plan_decodes(self, ready: Sequence[Request], budget: int) -> list[Request]:
        """Reserve a page for the one pending token of each request in ``ready``.

        Returns the requests that got one, in order, at most ``budget``.
        """
        planned: dict[str, Request] = {}
        ready, page_size = ready[:budget], self.cache.page_size
        for request, count in zip(ready, token_counts(ready), strict=True):
            upto = request.kv_len(count) if request.extras.kv_budget else count
            if (lease := request.lease) is not None and (
                upto <= len(lease.page_ids) * page_size or self._reserve(request, upto, planned)
            ):
                planned[request.request_id] = request
        return list(planned.values())

    def _schedule_chunk(self, request: Request, stop: int) -> ScheduledRequest:
        """Schedule a chunk and charge its tenant at once: the next admission may depend on that."""
        self.accounts.charge(request, stop - request.num_computed)
        state = None if self.cache.states is None else use_state(self.cache, request, stop)
        return schedule_request(request, stop, state=state)

    def _plan_chunks(
        self, prefills: list[Request], budget: int, planned: set[str], now: float
    ) -> list[ScheduledRequest]:
        """Return chunks of prompts, of at most ``budget`` tokens in all, after reserving pages.

        Waiting requests are admitted in order until prompts fill the budget. If they fill it, short
        prompts are admitted before their turn, and all admitted prompts share the budget.
        """
        if budget <= 0:
            return []
        in_turn, early = self._fill_in_turn(prefills, budget, now)
        prompts = in_turn + early
        if sum(each.num_pending for each in in_turn) >= budget:
            least = min(map(by_work, prompts))
            prompts += self._admit_early(least, short_prompt_share(budget), now)
        prompts = without_suspects(prompts)
        shares = share_chunk_tokens(prompts, budget)
        return self._schedule_chunks(sorted(prompts, key=by_order), shares, planned)

    def _fill_in_turn(
        self, prefills: list[Request], budget: int, now: float
    ) -> tuple[list[Request], list[Request]]:
        """Admit requests in order until they have at least ``budget`` tokens to compute.

        Returns the prompts whose turn it is, and the prompts that were admitted early and whose
        turn has not come. Their turn comes when the next waiting request is later in order.
        """
        in_turn = [each for each in prefills if not each.is_early]
        early = deque(each for each in prefills if each.is_early)
        room = budget - sum(each.num_pending for each in in_turn)
        waiting = self.request_table.candidates(self.cache, self.page_loads)
        while room > 0:
            head = self.waiting.first()
            if early and (head is None or early[0].order < head.order):
                request = early.popleft()
            elif (found := next(waiting, None)) is not None:
                self._admit(request := found, now)
                if request.transfer.load is not None:
                    continue
            else:
                break
            request.is_early = False
            in_turn.append(request)
            room -= request.num_pending
        return in_turn, list(early)

    def _admit_early(self, least: tuple[int, int], share: int, now: float) -> list[Request]:
        """Admit short requests before their turn, until they have ``share`` tokens to compute.

        ``least``: priority and remaining tokens of the shortest running prompt. A request must have
        at most half of that number of tokens to compute, or a more urgent priority. The turn of a
        request with a more urgent priority is now, at any length.
        """
        admitted: list[Request] = []
        waiting = self.request_table.short_ones(self.cache, self.page_loads, least)
        while share > 0 and (request := next(waiting, None)) is not None:
            self._admit(request, now)
            request.is_early = request.priority >= least[0]
            if request.transfer.load is not None:
                continue
            admitted.append(request)
            share -= request.num_pending
        return admitted

    def _schedule_chunks(
        self, prompts: list[Request], shares: Mapping[str, int], planned: set[str]
    ) -> list[ScheduledRequest]:
        """Return a chunk of each prompt that has tokens in ``shares`` and for which pages suffice.

        A chunk never cuts `undivided_runs`, such as image rows that attend to each other; to
        complete such rows, one chunk of a step may exceed its share. `ScoredRows` limits the rows
        that need logits.
        """
        chunks, is_exceeded = [], False
        scored: ScoredRows | None = None
        for request in prompts:
            share_stop = request.num_computed + shares.get(request.request_id, 0)
            if (packing := request.next_packing(request.num_computed)) is not None:
                share_stop = min(share_stop, packing)
            stop = share_stop
            extras = request.extras
            if extras is not PLAIN_REQUEST and stop > request.num_computed:
                stop = chunk_stop(extras.images, extras.branches, request.num_computed, share_stop)
            if stop > share_stop:
                if is_exceeded:
                    continue
                is_exceeded = True
            if request.sampling.scores_given:
                scored = scored or ScoredRows(self.limits.vocab_size)
                stop = scored.cut(request, stop)
            if stop > request.num_computed and self._reserve(
                request, request.kv_len(stop), planned, preempt_self=False
            ):
                if scored is not None:
                    scored.take(request, stop)
                chunks.append(self._schedule_chunk(request, stop))
                planned.add(request.request_id)
        return chunks

    def _admit(self, request: Request, now: float) -> None:
        """Move a waiting request to the running requests, with a lease of pages."""
        request.lease = acquire_kv(self.cache, request)
        if self.cache.states is not None:
            want_states(self.cache, request, request.lease, self.openings)
        request.num_computed = request.lease.num_cached_tokens
        self.request_table.admit(request)
        self._claim_states(islice(self.waiting.requests, MAX_CLAIMS), [request])
        if request.num_preemptions == 0:
            request.usage.queue_time = now - request.arrival_time
        if self.page_loads is not None:
            self.page_loads.begin(request, now, self._chunk_budget.token_seconds)
        self.speculator.join(request)

    def _claim_states(self, waiting: Iterable[Request], running: Collection[Request]) -> None:
        """Let running prompts keep the recurrent states from which waiting prompts can resume.

        This happens before the waiting request is admitted: by then the running prompt might have
        passed the end of their common pages.
        """
        if self.cache.states is not None:
            for request in waiting:
                awaits_prefix(self.cache, request, running)

    # -- pages ----------------------------------------------------------------------------------

    def _reserve(
        self,
        request: Request,
        upto: int,
        planned: Iterable[str],
        *,
        preempt_self: bool = True,
    ) -> bool:
        """Reserve pages for the first ``upto`` tokens with KV; return whether there were enough.

        If the pool lacks pages, requests that come later in order are preempted. ``preempt_self``:
        whether the request itself may be preempted as the last one.
        """
        while request.lease is not None and not self.cache.extend(request.lease, upto):
            victim = self.request_table.victim(planned)
            if victim is None or (victim is request and not preempt_self):
                return False
            self._preempt(victim)
        return request.lease is not None

    def _preempt(self, request: Request) -> None:
        """Release a request's pages and queue it again; computed pages stay cached."""
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.num_uncached = num_uncached_tokens(self.cache, request)
        self.request_table.requeue(request)

    def _release(self, request: Request, *, keep: bool = True) -> None:
        if self.page_loads is not None:
            self.page_loads.leave(request)
        release_kv(self.cache, request, keep=keep)
        request.num_computed = 0
        self._released_request_ids.append(request.request_id)

    def flush(self, *namespaces: str | None) -> int:
        """Drop the unused cached pages and the tokens indexed for look-up drafts in ``namespaces``.

        Without arguments, all namespaces are flushed; None is the shared default namespace. Returns
        how many pages became free.
        """
        try:
            self.speculator.flush(*namespaces)
        finally:
            num_pages = self.cache.flush(*namespaces)
        return num_pages

    def flush_prefix(self, tokens: array[int], namespace: str | None) -> int:
        """Drop the unused cached pages of all prompts that begin with ``tokens``.

        Returns the number of dropped pages. All tokens of the namespace that are indexed for
        look-up drafts are dropped, because they cannot be found by prefix. Raises `InvalidRequest`
        for tokens that do not fill a page.
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

    def end_session(self, session: str, arrived: Iterable[Request] = ()) -> bool:
        """End a session, and let its pages be evicted first; return whether it had pages.

        Turns of the session that have not ended give up their pages when they end. ``arrived``:
        requests that were not added yet.
        """
        for request in (*self.request_table.of_session(session), *arrived):
            if request.cache.session == session:
                request.cache = replace(request.cache, ends_session=True)
        return self.cache.end_session(session)

    # -- commit ---------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, output: StepOutput, now: float) -> list[Event]:
        """Apply a step's outcome; a running request gets tokens here only.

        A request that ended while the step was computed is skipped. The deltas of the events are
        complete after `account`.
        """
        self.account()
        self._chunk_budget.observe(plan, output)
        events, with_drafts = list[Event](), not plan.is_plain
        for scheduled, out in zip(plan.requests, output.requests, strict=True):
            if scheduled.request_id not in self.running:
                continue
            request = self.running[scheduled.request_id]
            delta = self._commit_request(request, scheduled, out, now, with_drafts=with_drafts)
            if delta.token_ids or delta.prompt_logprobs or delta.pooled or delta.terminal:
                events.append((request, delta))
        return events

    def account(self) -> None:
        """Count and charge the tokens of the last commit, and let the speculator learn from it.

        The next plan does not depend on this, so it may be done while the next step computes. It
        must be done before the deltas of the commit are delivered.
        """
        self.accounts.settle()

    def _commit_request(
        self,
        request: Request,
        scheduled: ScheduledRequest,
        out: RequestOutput,
        now: float,
        *,
        with_drafts: bool,
    ) -> Delta:
        if request.lease is not None and request.lease.state is not None:
            self.cache.settle_state(request.lease, scheduled.stop)
        fault = request.fault
        if fault is not None and fault.beside_drafts and scheduled.stop - scheduled.start > 1:
            fault.beside_drafts = False
            self.speculator.broke_step()
        try:
            delta = take_output(request, scheduled, out)
        except Exception:
            logger.exception("request %s failed while its tokens were read", request.request_id)
            failed = Delta(error=ForetokenError("the answer could not be decoded"))
            return self._finish(request, failed, now, keep=False)
        extras = scheduled.extras
        if extras.pack is not None:
            self.num_packed_away_tokens += extras.pack.num_packed_away
            request.usage.evicted_tokens = extras.num_packed_away
        # The tokens before the failure are valid and may have ended the answer.
        if out.error is not None and not delta.terminal:
            delta.error = request_error(request, out)
        row = CommittedRow(request, scheduled, out, delta, now, is_plain=not with_drafts)
        self.accounts.add(row)
        if delta.finish_reason is not None or delta.error is not None:
            self._finish(request, delta, now, keep=out.error is None)
        else:
            settle_pages(self.cache, request, scheduled, with_drafts=with_drafts)
        if scheduled.start < request.sampling.prompt_len:
            has_begun = 0 < len(delta.token_ids) == request.num_output
            if has_begun or (delta.finish_reason is not None and not request.sampling.generates):
                pin_prompt(self.cache, request)  # this step completed the prompt
        return delta

    def _finish(self, request: Request, delta: Delta, now: float, *, keep: bool = True) -> Delta:
        num_computed = 0
        if request.status is RequestStatus.RUNNING:
            num_computed = request.num_computed if keep else 0
            self._release(request, keep=keep)
            if request.transfer.hands_over and delta.finish_reason in (
                FinishReason.STOP,
                FinishReason.LENGTH,
            ):
                hold_prompt(self.cache, request)
        elif self.page_loads is not None:
            self.page_loads.forget(request)
        end_turn(self.cache, request, num_computed)
        self.request_table.discard(request)
        self.speculator.leave(request)
        request.usage.total_time = now - request.arrival_time
        return delta

    def audit(self) -> None:
        """Assert the invariants of requests, pages and tiers."""
        run(self.checks())

    def checks(self) -> Steps:
        """Assert the same invariants as `audit` in parts, one part each iteration.

        Nothing may change until the last iteration.
        """
        loads = self.page_loads
        yield from self.request_table.checks(self.cache, () if loads is None else loads.leases)
        if loads is not None:
            yield from loads.tiers.checks()


def _terminal(error: ForetokenError | None) -> Delta:
    return Delta(error=error) if error else Delta(finish_reason=FinishReason.ABORT)

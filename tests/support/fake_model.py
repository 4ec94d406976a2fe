"""A model without tensors: the next token and the KV of a position are hashes of its prefix.

So a million steps are cheap, every answer is known in advance, and every page that a step reads
can be checked for holding the KV of exactly the tokens on its path.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from foretoken.core.interface.draft import Draft
from foretoken.core.interface.extras.request_extras import request_extras
from foretoken.core.interface.extras.tiers import KVTiers
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import OnKernelsStarted, Pending, Speculator, ignore_kernels
from foretoken.core.interface.request import OnToken, Request
from foretoken.core.interface.sampling import Pooling, SamplingMetadata, TokenSamplingParams
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.row_extras import RowExtras, SegmentState
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.radix_cache import PrefixCache, StateSlots
from support.fixed_depth import FixedDepth
from support.launch_behind import Finished, launch_behind
from support.toy_states import ToyStates, Value

VOCAB_SIZE = 7
EOS = 0

Drafter = Callable[[ScheduledRequest, random.Random], list[int]]


def next_token(tokens: Sequence[int]) -> int:
    """Return the fake model's token after these; never EOS."""
    return 1 + hash(tuple(tokens)) % (VOCAB_SIZE - 1)


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The fake model's answer, token by token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def no_draft(row: ScheduledRequest, rng: random.Random) -> list[int]:
    return []


def perfect(row: ScheduledRequest, rng: random.Random) -> list[int]:
    return answer(row.tokens, row.draft_plan.max_draft)


def wrong(row: ScheduledRequest, rng: random.Random) -> list[int]:
    return [EOS] * row.draft_plan.max_draft


def sometimes(row: ScheduledRequest, rng: random.Random) -> list[int]:
    """Right up to a random point."""
    right = answer(row.tokens, row.draft_plan.max_draft)
    cut = rng.randrange(row.draft_plan.max_draft + 1)
    return right[:cut] + [EOS] * (rng.randrange(row.draft_plan.max_draft - cut + 1))


class FakeRunner:
    """Runs plans, and fails loudly when a page does not hold what its path says.

    With ``states``, too, when a request's recurrent state is not that of its tokens.
    """

    is_async = False

    def prepare_thread(self) -> None: ...

    def __init__(
        self,
        page_size: int,
        drafter: Drafter = no_draft,
        seed: int = 0,
        *,
        states: ToyStates | None = None,
    ) -> None:
        self.page_size = page_size
        self.states = states
        self.num_computed = 0
        self.plans: list[StepPlan] = []
        self._drafter = drafter
        self._rng = random.Random(seed)
        self.kv: dict[tuple[int, int], int] = {}  # by page and place in it

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        """Compute it at once."""
        if after is not None:
            run = partial(FakeRunner.launch, self, on_kernels_started=on_kernels_started)
            return launch_behind(run, plan, after.finish())
        on_kernels_started()
        return Finished(self.step(plan))

    def step(self, plan: StepPlan) -> StepOutput:
        self.plans.append(plan)
        if self.states is not None:
            place_states(self.states, plan)
        return StepOutput(requests=[self._row(row) for row in plan.requests])

    def _row(self, row: ScheduledRequest) -> RequestOutput:
        draft = self._drafter(row, self._rng) if row.samples and row.draft_plan.max_draft else []
        for position in range(row.start):
            held = self.kv[self._slot(row, position)]
            assert held == hash(tuple(row.tokens[: position + 1])), "foreign KV on the path"
        path = [*row.tokens[: row.stop], *draft]
        branches = row.extras.branches
        first = len(path) if branches is None else branches.first
        for position in range(row.start, len(path)):
            key = tuple(path[: position + 1])
            # The KV of a branch belongs to no prefix of the tokens.
            self.kv[self._slot(row, position)] = hash(key if position < first else (key,))
        if branches is not None and row.stop > first:
            assert (row.start < first, row.stop) == (True, len(row.tokens)), "branches are divided"
        if self.states is not None:
            follow_state(self.states, row, path)
        self.num_computed += row.stop - row.start
        if not row.samples:
            pooled = array("f", [float(sum(row.tokens))]) if row.pools else None
            return RequestOutput(request_id=row.request_id, pooled=pooled)
        right = answer(row.tokens, len(draft) + 1)
        num_accepted = 0
        while num_accepted < len(draft) and draft[num_accepted] == right[num_accepted]:
            num_accepted += 1
        return RequestOutput(
            request_id=row.request_id,
            token_ids=right[: num_accepted + 1],
            draft=Draft.of(draft, "fake"),
            path=range(num_accepted),
        )

    def _slot(self, row: ScheduledRequest, position: int) -> tuple[int, int]:
        return row.page_ids[position // self.page_size], position % self.page_size


def place_states(states: ToyStates, plan: StepPlan) -> None:
    """Place states as the runner does before a step."""
    for row in plan.requests:
        state = row.extras.state
        assert state is not None
        if state.source >= 0:
            states.copy_slot(state.source, state.slot)
        elif row.start == 0:
            states.reset(state.slot)


def follow_state(states: ToyStates, row: ScheduledRequest, path: Sequence[int]) -> None:
    """Compute a request's rows from its state, which must come to the hashes of its tokens."""
    use = row.extras.state
    assert use is not None
    extras = RowExtras(state=SegmentState(use.slot, use.log, row.stop, use.keeps))
    segment = Segment(path[row.start :], row.start, row.page_ids, 0, extras=extras)
    first = right = (0, 0, 0)
    values = states.compute(row.request_id, segment, first, _next_value)
    for token in path[: row.start]:
        right = _next_value(right, token)
    for token, value in zip(path[row.start :], values, strict=True):
        right = _next_value(right, token)
        assert value == right, "the state of another prefix"


def _next_value(value: Value, token: int) -> Value:
    return (hash((value[0], token)), value[2], token)


def toy_states(scheduler: Scheduler, **options: Any) -> ToyStates:
    """The states of a model for a scheduler that has slots for them."""
    slots = scheduler.cache.states
    assert slots is not None

    def violation(text: str) -> None:
        raise AssertionError(text)

    return ToyStates(
        slots.num_total,
        slots.num_logs,
        page_size=scheduler.cache.page_size,
        violation=violation,
        **options,
    )


def make_scheduler(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_batch_tokens: int = 16,
    max_running: int = 8,
    max_queued: int = 100,
    max_model_len: int = 1000,
    depth: int = 0,
    speculator: Speculator | None = None,
    max_slowdown: float = math.inf,
    aging_seconds: float = 10.0,
    max_priority: float = math.inf,
    cache_quota: float = 1.0,
    make_tiers: Callable[[PrefixCache], KVTiers] | None = None,
    num_slots: int = 0,
    interval: int = 0,
) -> Scheduler:
    limits = SchedulerLimits(
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_queued=max_queued,
        max_slowdown=max_slowdown,
        aging_seconds=aging_seconds,
        max_priority=max_priority,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
    )
    states = StateSlots(num_slots, max_running, interval=interval) if num_slots else None
    cache = PrefixCache(num_pages, page_size, cache_quota=cache_quota, states=states)
    tiers = None if make_tiers is None else make_tiers(cache)
    return Scheduler(cache, limits, speculator or FixedDepth(depth), tiers)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    on_token: OnToken | None = None,
    namespace: str | None = None,
    tenant: str | None = None,
    priority: int = 0,
    deadline: float | None = None,
    depth: int | None = None,
    stop_ids: Sequence[int] = (EOS,),
    pooling: Pooling | None = None,
    **params: object,
) -> Request:
    params.setdefault("max_tokens", 8)
    sampling = SamplingMetadata(
        params=TokenSamplingParams(**params),  # type: ignore[arg-type]
        seed=0,
        prompt_len=len(prompt),
        pooling=pooling,
    )
    branches = None if pooling is None else pooling.branches_of(len(prompt))
    return Request(
        extras=request_extras(None, (), branches),
        request_id=request_id,
        tokens=array("q", prompt),
        sampling=sampling,
        stop_ids=frozenset(stop_ids),
        on_token=on_token,
        namespace=namespace,
        tenant=tenant,
        priority=priority,
        deadline=deadline,
        depth=depth,
    )


class Driver:
    """Runs a scheduler step by step and collects what each request was told."""

    step_seconds = 1.0

    def __init__(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.now = 0.0
        self.served: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.pooled: dict[str, list[float]] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.check(request)
            self.scheduler.add(request, self.now)
            self.served[request.request_id] = []

    def abort(self, request_id: str) -> None:
        self._note(self.scheduler.abort(request_id, self.now))

    def step(self) -> StepPlan:
        self.now += self.step_seconds
        self._note(self.scheduler.expire(self.now))
        plan = self.scheduler.schedule(self.now)
        self.scheduler.audit()
        if plan.requests:
            self.scheduler.speculator.work()
            output = self.runner.step(plan)
            events = self.scheduler.commit(plan, output, self.now)
            self.scheduler.account()
            self._note(events)
            self.scheduler.speculator.observe_step(plan, output, sum(output.times.values()))
        else:
            assert not plan.released_request_ids, "nobody reads an empty plan"
        self.scheduler.audit()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.num_requests:
                return
            idle = not self.step().requests
            assert not (idle and self.scheduler.num_requests), "requests wait for ever"
        raise AssertionError("the requests never ended")

    def _note(self, events: list) -> None:  # type: ignore[type-arg]
        for request, delta in events:
            assert request.request_id not in self.ended, "told something after the end"
            self.served[request.request_id] += delta.token_ids
            if delta.pooled is not None:
                self.pooled[request.request_id] = list(delta.pooled)
            if delta.terminal:
                self.ended[request.request_id] = delta.finish_reason or str(delta.error)

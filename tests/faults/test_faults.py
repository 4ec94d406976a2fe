"""The table of faults in code: what may go wrong, and what holds all the same.

In every case the neighbours say what they say alone, every request is told of exactly one end,
every page is accounted for, and the engine serves whoever comes next. Faults of a real model:
test_model_faults.py. What hangs, stands still or is drained: core/engine/test_watchdog.py and
api/server/test_supervision.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from foretoken.core.engine.engine import Engine
from foretoken.core.errors import DeadlineExceeded, ForetokenError, InvalidRequest
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.request import Delta, FinishReason
from foretoken.core.scheduling.chunk_budget import num_step_tokens
from support.fake_model import FakeRunner, answer, make_request, make_scheduler, sometimes
from support.fault_table import BAD, NAMES, NUM_TOKENS, PROMPTS, Act, Reader, live, no_act
from support.fixed_depth import FixedDepth


class Raising(FakeRunner):
    """Computes a step and raises when ``fault`` says so of its plan."""

    def __init__(self, fault: Callable[[StepPlan], BaseException | None]) -> None:
        super().__init__(4, sometimes)
        self.fault = fault

    def step(self, plan: StepPlan) -> StepOutput:
        output = super().step(plan)
        failure = self.fault(plan)
        if failure is not None:
            raise failure
        return output


class NotFinite(FakeRunner):
    """The bad row's logits are no numbers, from its second token on."""

    def __init__(self) -> None:
        super().__init__(4, sometimes)

    def step(self, plan: StepPlan) -> StepOutput:
        rows = [
            RequestOutput(request_id=BAD, error="the model's logits are not finite")
            if out.request_id == BAD and len(row.tokens) > row.sampling.prompt_len
            else out
            for row, out in zip(plan.requests, super().step(plan).requests, strict=True)
        ]
        return StepOutput(requests=rows)


def once(failure: BaseException) -> Callable[[StepPlan], BaseException | None]:
    left = [failure]
    return lambda plan: left.pop() if left else None


def with_bad(plan: StepPlan) -> BaseException | None:
    names = {row.request_id for row in plan.requests}
    return RuntimeError("the forward pass failed") if BAD in names else None


def beyond(num_tokens: int) -> Callable[[StepPlan], BaseException | None]:
    return lambda plan: MemoryError() if num_step_tokens(plan.requests) > num_tokens else None


def reads_badly(after: int) -> Callable[[int], str | None]:
    """A detokeniser, or whatever else is told of tokens, that raises after some."""
    seen: list[int] = []

    def on_token(token_id: int) -> str | None:
        seen.append(token_id)
        if len(seen) > after:
            raise ValueError("not a text")
        return None

    return on_token


class BrokenSpeculator(FixedDepth):
    """Raises wherever it is asked."""

    def __init__(self, *verbs: str) -> None:
        super().__init__(3)
        for verb in verbs:
            setattr(self, verb, self._fail)

    def _fail(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("the speculator failed")


class WrongPlans(FixedDepth):
    """Plans for the wrong number of requests, or more than was offered."""

    def plan(self, requests, limits, *, budget, num_prefill):
        plans = super().plan(requests, limits, budget=budget, num_prefill=num_prefill)
        return [*plans, *plans]


def abort_after(num_tokens: int) -> Act:
    """The caller leaves when so many tokens were told."""

    def act(engine: Engine, reader: Reader) -> None:
        push, told = reader.stream.push, [0]

        def counted(delta: Delta) -> None:
            push(delta)
            told[0] += len(delta.token_ids)
            if told[0] >= num_tokens and not delta.terminal:
                engine.abort(BAD)

        reader.stream.push = counted  # type: ignore[method-assign]
        if num_tokens == 0:
            engine.abort(BAD)

    return act


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``ends``: how the bad request ends; None: as if nothing had happened."""

    runner: Callable[[], FakeRunner] = lambda: FakeRunner(4, sometimes)
    request: dict[str, object] = field(default_factory=dict)
    scheduler: dict[str, object] = field(default_factory=dict)
    act: Act = no_act
    ends: type[ForetokenError] | FinishReason | None = None


FAULTS = {
    "the target raises once": Fault(runner=lambda: Raising(once(RuntimeError("x")))),
    "the target raises for one request": Fault(
        runner=lambda: Raising(with_bad), ends=ForetokenError
    ),
    "a row is not finite": Fault(runner=NotFinite, ends=ForetokenError),
    "memory runs out in prefill": Fault(runner=lambda: Raising(beyond(20))),
    "memory runs out once while decoding": Fault(runner=lambda: Raising(once(MemoryError()))),
    "KV is exhausted while decoding": Fault(scheduler={"num_pages": 9}),
    "abort while waiting": Fault(act=abort_after(0), ends=FinishReason.ABORT),
    "abort after the first token": Fault(act=abort_after(1), ends=FinishReason.ABORT),
    "abort in the middle": Fault(act=abort_after(4), ends=FinishReason.ABORT),
    "detokeniser raises at the first token": Fault(
        request={"on_token": reads_badly(0)}, ends=ForetokenError
    ),
    "detokeniser raises in the middle": Fault(
        request={"on_token": reads_badly(4)}, ends=ForetokenError
    ),
    "the deadline passes while waiting": Fault(request={"deadline": 0.0}, ends=DeadlineExceeded),
    "the speculator raises when it plans": Fault(
        scheduler={"speculator": BrokenSpeculator("plan", "drafts_nothing")}
    ),
    "the speculator raises when it learns": Fault(
        scheduler={"speculator": BrokenSpeculator("observe", "observe_step", "work")}
    ),
    "the speculator raises as requests come and go": Fault(
        scheduler={"speculator": BrokenSpeculator("join", "leave")}
    ),
    "the speculator plans nonsense": Fault(scheduler={"speculator": WrongPlans(3)}),
}


def hash_engine(fault: Fault) -> Engine:
    options: dict[str, object] = {"depth": 3, "max_batch_tokens": 64, "num_pages": 60}
    return Engine(make_scheduler(**(options | fault.scheduler)), fault.runner())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_strikes_its_request_alone(name: str) -> None:
    fault = FAULTS[name]
    engine = hash_engine(fault)
    requests = {
        each: make_request(each, PROMPTS[each], **(fault.request if each == BAD else {}))
        for each in NAMES
    }
    readers = await live(engine, requests, fault.act)
    bad = readers[BAD]
    if fault.ends is None:
        assert bad.tokens == answer(PROMPTS[BAD], NUM_TOKENS)
    else:
        right = answer(PROMPTS[BAD], NUM_TOKENS)
        assert bad.tokens == right[: len(bad.tokens)], "what it was told is right"
        end = bad.end.finish_reason if isinstance(bad.end, Delta) else type(bad.end)
        assert end is fault.ends
    for each in set(NAMES) - {BAD}:
        assert readers[each].tokens == answer(PROMPTS[each], NUM_TOKENS)
    engine.runner = FakeRunner(4)  # the next one finds a sound engine; it knows no page yet
    await engine.flush_cache()
    after = Reader(engine.submit(make_request(BAD, [6, 6], max_tokens=3)))
    assert (await after.read()).tokens == answer([6, 6], 3)
    await engine.close()
    engine.scheduler.audit()


async def test_exhausted_kv_preempts_and_does_not_play_ping_pong() -> None:
    engine = hash_engine(Fault(scheduler={"num_pages": 14}))
    requests = {name: make_request(name, PROMPTS[name], max_tokens=40) for name in NAMES}
    for name, reader in (await live(engine, requests, no_act)).items():
        assert reader.tokens == answer(PROMPTS[name], 40)
    assert 0 < engine.scheduler.num_preemptions <= 2 * len(NAMES)
    await engine.close()


async def test_a_prompt_larger_than_the_pool_is_refused_before_anything_is_done() -> None:
    engine = hash_engine(Fault(scheduler={"num_pages": 4}))
    await engine.start()
    with pytest.raises(InvalidRequest):
        engine.submit(make_request(BAD, [1] * 16))
    assert engine.scheduler.num_requests == 0
    await engine.close()


async def test_the_same_id_again_right_after_an_abort_is_another_request() -> None:
    engine = hash_engine(Fault())
    await engine.start()
    for _ in range(3):
        first = Reader(engine.submit(make_request(BAD, PROMPTS[BAD], max_tokens=50)))
        engine.abort(BAD)
        await first.read()
        again = Reader(engine.submit(make_request(BAD, [5, 4], max_tokens=NUM_TOKENS)))
        assert (await again.read()).tokens == answer([5, 4], NUM_TOKENS)
        assert (first.num_ends, again.num_ends) == (1, 1)
    assert (await engine.audit())["ok"]
    await engine.close()


async def test_a_reader_that_never_reads_costs_one_slot_and_nobody_anything() -> None:
    engine = hash_engine(Fault())
    await engine.start()
    idle = Reader(engine.submit(make_request(BAD, PROMPTS[BAD], max_tokens=100)))
    for _ in range(3):
        reader = Reader(engine.submit(make_request("one", PROMPTS["one"], max_tokens=100)))
        assert (await reader.read()).tokens == answer(PROMPTS["one"], 100)
    assert idle.stream.ended
    assert (await engine.audit())["requests"] == {"running": 0, "waiting": 0}
    assert (await idle.read()).tokens == answer(PROMPTS[BAD], 100)
    await engine.close()

"""A step on its way through the model thread: in order, with the tokens of the one before."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from foretoken.core.flight import Flight, Grounded
from foretoken.core.model_thread import Job, ModelThread
from foretoken.core.params import SamplingParams
from foretoken.core.step import (
    AheadTokens,
    PlanRow,
    RowOutput,
    RowSampling,
    StepOutput,
    StepPlan,
)

PROMPT = array("q", [7, 8, 9])
SAMPLING = RowSampling(params=SamplingParams(), seed=0, prompt_len=3)
FAILED = RuntimeError("the forward pass failed")


def plan_of(names: str, num_ahead: int = 0) -> StepPlan:
    """A step of so many tokens behind the prompt; all but that of the first are told later."""
    stop = len(PROMPT) + num_ahead
    rows = [
        PlanRow(
            request_id=name,
            tokens=AheadTokens(PROMPT, stop) if num_ahead else PROMPT,  # type: ignore[arg-type]
            start=stop - 1,
            stop=stop,
            page_ids=array("q", [0]),
            sampling=SAMPLING,
        )
        for name in names
    ]
    return StepPlan(rows=rows, fresh_pages=array("q"), is_plain=True)


def yields(**tokens: int) -> StepOutput:
    """A token for each of these, an error for who has 0."""
    rows = [
        RowOutput(request_id=name, token_ids=(token,))
        if token
        else RowOutput(request_id=name, error="not finite")
        for name, token in tokens.items()
    ]
    return StepOutput(rows=rows, num_rows=len(rows))


class Recorder:
    """Answers with what it was given, in turn, and keeps what every row went on from."""

    def __init__(self, *outcomes: StepOutput | BaseException) -> None:
        self._outcomes = deque(outcomes)
        self.seen: list[dict[str, int]] = []

    def step(self, plan: StepPlan) -> StepOutput:
        self.seen.append({row.request_id: row.tokens[row.start] for row in plan.rows})
        outcome = self._outcomes.popleft()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class Launch:
    def __init__(self, device: Device, number: int, outcome: StepOutput | Exception) -> None:
        self._device, self._number, self._outcome = device, number, outcome

    def finish(self) -> StepOutput:
        self._device.calls.append(f"finish {self._number}")
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Device:
    """Launches, and keeps the order of the calls. ``refuses``: what launch number n raises."""

    launches = True

    def __init__(
        self, *outcomes: StepOutput | Exception, refuses: dict[int, BaseException] | None = None
    ) -> None:
        self.calls: list[str] = []
        self.befores: list[object] = []
        self.launched: list[Launch] = []
        self._outcomes, self._refuses = outcomes, refuses or {}

    def step(self, plan: StepPlan) -> StepOutput:
        raise AssertionError("it launches")

    def launch(self, plan: StepPlan, after: Launch | None = None) -> Launch:
        number = len(self.befores)
        self.calls.append(f"launch {number}")
        self.befores.append(after)
        if number in self._refuses:
            raise self._refuses[number]
        self.launched.append(Launch(self, number, self._outcomes[number]))
        return self.launched[-1]


class Hand:
    """A thread that makes its next call when it is told to."""

    def __init__(self) -> None:
        self.jobs: deque[Job[Any]] = deque()

    def start(self, work: Callable[[], Any]) -> Job[Any]:
        self.jobs.append(job := Job(work))
        return job

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            job = self.jobs.popleft()
            try:
                job.end(job.work(), None)
            except BaseException as failure:
                job.end(None, failure)

    def close(self) -> None: ...


def chain(runner: Any, *names: str, launches: bool = False) -> list[Flight]:
    """One step behind the other."""
    flights: list[Flight] = []
    for number, each in enumerate(names):
        after = flights[-1] if flights else None
        flights.append(Flight(plan_of(each, number), runner, 0.0, after=after, launches=launches))
    return flights


def tokens_of(output: StepOutput) -> dict[str, list[int]]:
    return {row.request_id: list(row.token_ids) for row in output.rows}


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


# -- one after the other --------------------------------------------------------------------------


def test_steps_go_on_from_the_tokens_of_the_one_before() -> None:
    async def scenario() -> None:
        thread = ModelThread("foretoken-test", lambda: None)
        runner = Recorder(yields(a=1, b=2), yields(a=3, b=4), yields(a=5, b=6))
        flights = chain(runner, "ab", "ab", "ab")
        assert [flight.is_ahead for flight in flights] == [False, True, True]
        for flight in flights:
            flight.start(thread)
        outputs = [await flight.outcome(thread).result() for flight in flights]
        assert runner.seen == [{"a": 9, "b": 9}, {"a": 1, "b": 2}, {"a": 3, "b": 4}]
        assert list(map(tokens_of, outputs)) == [
            {"a": [1], "b": [2]},
            {"a": [3], "b": [4]},
            {"a": [5], "b": [6]},
        ]
        thread.close()

    run(scenario)


def test_who_left_between_two_plans_does_not_mix_up_the_tokens() -> None:
    async def scenario() -> None:
        thread, runner = Hand(), Recorder(yields(a=1, b=2, c=3), yields(c=4, b=5))
        flights = chain(runner, "abc", "cb")
        for flight in flights:
            flight.start(thread)
        thread.turn(2)
        assert runner.seen[1] == {"c": 3, "b": 2}

    run(scenario)


def test_a_row_without_a_token_yields_nothing_and_the_others_go_on() -> None:
    async def scenario() -> None:
        thread, runner = Hand(), Recorder(yields(a=1, b=0, c=3), yields(a=4, c=5))
        flights = chain(runner, "abc", "abc")
        for flight in flights:
            flight.start(thread)
        thread.turn(2)
        output = await flights[1].outcome(thread).result()
        assert runner.seen[1] == {"a": 1, "c": 3}
        assert [row.request_id for row in output.rows] == ["a", "b", "c"]
        assert tokens_of(output) == {"a": [4], "b": [], "c": [5]}
        assert output.num_rows == 2

    run(scenario)


def test_where_no_row_has_a_token_nothing_is_computed() -> None:
    async def scenario() -> None:
        thread, runner = Hand(), Recorder(yields(a=0))
        flights = chain(runner, "a", "a")
        for flight in flights:
            flight.start(thread)
        thread.turn(2)
        with pytest.raises(Grounded):
            await flights[1].outcome(thread).result()
        assert len(runner.seen) == 1

    run(scenario)


def test_what_follows_a_step_that_failed_is_not_computed() -> None:
    async def scenario() -> None:
        thread, runner = Hand(), Recorder(FAILED)
        flights = chain(runner, "a", "a", "a")
        for flight in flights:
            flight.start(thread)
        thread.turn(3)
        with pytest.raises(RuntimeError, match="forward pass"):
            await flights[0].outcome(thread).result()
        for flight in flights[1:]:
            with pytest.raises(Grounded):
                await flight.outcome(thread).result()
        assert len(runner.seen) == 1

    run(scenario)


def test_a_step_that_nobody_began_can_be_withdrawn_once() -> None:
    async def scenario() -> None:
        thread, runner = Hand(), Recorder(yields(a=1))
        flights = chain(runner, "a", "a")
        for flight in flights:
            flight.start(thread)
        thread.turn()
        assert flights[1].withdraw()
        assert not flights[1].withdraw()
        thread.turn()
        with pytest.raises(Grounded):
            await flights[1].outcome(thread).result()
        assert len(runner.seen) == 1

    run(scenario)


def test_a_step_that_the_thread_is_in_cannot_be_withdrawn() -> None:
    class Gated(Recorder):
        entered, gate = threading.Semaphore(0), threading.Semaphore(0)

        def step(self, plan: StepPlan) -> StepOutput:
            self.entered.release()
            self.gate.acquire()
            return super().step(plan)

    async def scenario() -> None:
        thread, runner = ModelThread("foretoken-test", lambda: None), Gated(*[yields(a=1)] * 3)
        flights = chain(runner, "a", "a", "a")
        for flight in flights:
            flight.start(thread)
        await asyncio.to_thread(runner.entered.acquire)
        runner.gate.release()
        await asyncio.to_thread(runner.entered.acquire)
        assert [flight.withdraw() for flight in flights] == [False, False, True]
        runner.gate.release()
        for flight in flights[:2]:
            assert tokens_of(await flight.outcome(thread).result()) == {"a": [1]}
        with pytest.raises(Grounded):
            await flights[2].outcome(thread).result()
        thread.close()

    run(scenario)


def test_no_step_keeps_those_before_it() -> None:
    async def scenario() -> None:
        thread, runner = Hand(), Recorder(yields(a=1), yields(a=2))
        first, second = chain(runner, "a", "a")
        first.start(thread)
        second.start(thread)
        known = weakref.ref(first)
        thread.turn(2)
        del first
        gc.collect()
        assert known() is None
        assert tokens_of(await second.outcome(thread).result()) == {"a": [2]}

    run(scenario)


# -- launches -------------------------------------------------------------------------------------


def test_the_next_step_is_launched_before_anybody_waits_for_the_first() -> None:
    async def scenario() -> None:
        thread = ModelThread("foretoken-test", lambda: None)
        device = Device(yields(a=1), yields(a=2), yields(a=3))
        flights = chain(device, "a", "a", "a", launches=True)
        flights[0].start(thread)
        flights[1].start(thread)
        assert tokens_of(await flights[0].outcome(thread).result()) == {"a": [1]}
        flights[2].start(thread)
        assert tokens_of(await flights[1].outcome(thread).result()) == {"a": [2]}
        assert tokens_of(await flights[2].outcome(thread).result()) == {"a": [3]}
        assert device.calls == [
            "launch 0", "launch 1", "finish 0", "launch 2", "finish 1", "finish 2",
        ]  # fmt: skip
        assert device.befores == [None, *device.launched[:2]]
        thread.close()

    run(scenario)


def test_a_step_is_waited_for_once_however_often_its_outcome_is_asked_for() -> None:
    async def scenario() -> None:
        thread, device = Hand(), Device(yields(a=1))
        (flight,) = chain(device, "a", launches=True)
        flight.start(thread)
        assert flight.outcome(thread) is flight.outcome(thread)
        thread.turn(2)
        assert device.calls == ["launch 0", "finish 0"]

    run(scenario)


@pytest.mark.parametrize("failure", [FAILED, SystemExit()])
def test_a_launch_that_fails_is_told_where_its_outcome_is_waited_for(failure) -> None:
    async def scenario() -> None:
        thread = Hand()
        device = Device(yields(a=1), yields(a=2), refuses={1: failure})
        flights = chain(device, "a", "a", "a", launches=True)
        for flight in flights:
            flight.start(thread)
        jobs = [flight.outcome(thread) for flight in flights]
        thread.turn(6)
        assert tokens_of(await jobs[0].result()) == {"a": [1]}
        with pytest.raises(type(failure)):
            await jobs[1].result()
        with pytest.raises(Grounded):
            await jobs[2].result()
        assert device.calls == ["launch 0", "launch 1", "finish 0"]

    run(scenario)


def test_a_failure_that_the_device_tells_late_is_that_of_its_own_step() -> None:
    async def scenario() -> None:
        thread, device = Hand(), Device(FAILED, yields(a=2))
        flights = chain(device, "a", "a", launches=True)
        for flight in flights:
            flight.start(thread)
        jobs = [flight.outcome(thread) for flight in flights]
        thread.turn(4)
        with pytest.raises(RuntimeError, match="forward pass"):
            await jobs[0].result()
        await jobs[1].result()  # void, but the device has done with its pages
        assert device.calls == ["launch 0", "launch 1", "finish 0", "finish 1"]

    run(scenario)


def test_a_launch_that_was_withdrawn_is_not_made() -> None:
    async def scenario() -> None:
        thread, device = Hand(), Device(yields(a=1))
        flights = chain(device, "a", "a", launches=True)
        for flight in flights:
            flight.start(thread)
        thread.turn()
        assert [flight.withdraw() for flight in flights] == [False, True]
        job = flights[1].outcome(thread)
        thread.turn(2)
        with pytest.raises(Grounded):
            await job.result()
        assert device.calls == ["launch 0"]

    run(scenario)


def test_no_launch_keeps_those_before_it() -> None:
    async def scenario() -> None:
        thread, device = Hand(), Device(yields(a=1), yields(a=2))
        first, second = chain(device, "a", "a", launches=True)
        first.start(thread)
        second.start(thread)
        known = weakref.ref(first)
        thread.turn(2)
        first.outcome(thread)
        thread.turn()
        del first
        gc.collect()
        assert known() is None
        assert tokens_of(await _last(second, thread)) == {"a": [2]}

    run(scenario)


async def _last(flight: Flight, thread: Hand) -> StepOutput:
    job = flight.outcome(thread)
    thread.turn()
    return await job.result()

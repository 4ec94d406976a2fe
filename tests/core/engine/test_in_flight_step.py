"""A step on its way through the model thread: in order, with the tokens of the one before."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from foretoken.core.engine.model_thread import ModelThread
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.protocols import StepCancelled
from support.in_flight_fakes import FAILED, Hand, Recorder, chain, run, tokens_of, yields


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
        assert [row.request_id for row in output.requests] == ["a", "b", "c"]
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
        with pytest.raises(StepCancelled):
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
            with pytest.raises(StepCancelled):
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
        with pytest.raises(StepCancelled):
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
        with pytest.raises(StepCancelled):
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

"""Steps that a device is given before the one ahead of them is over, and their outcomes."""

from __future__ import annotations

import gc
import weakref

import pytest

from foretoken.core.engine.model_thread import ModelThread
from foretoken.core.engine.step_executor import InFlightStep
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.protocols import StepCancelled
from support.in_flight_fakes import FAILED, Device, Hand, chain, run, tokens_of, yields


def test_the_next_step_is_launched_before_anybody_waits_for_the_first() -> None:
    async def scenario() -> None:
        thread = ModelThread("foretoken-test", lambda: None)
        device = Device(yields(a=1), yields(a=2), yields(a=3))
        flights = chain(device, "a", "a", "a")
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
        (flight,) = chain(device, "a")
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
        flights = chain(device, "a", "a", "a")
        for flight in flights:
            flight.start(thread)
        jobs = [flight.outcome(thread) for flight in flights]
        thread.turn(6)
        assert tokens_of(await jobs[0].result()) == {"a": [1]}
        with pytest.raises(type(failure)):
            await jobs[1].result()
        with pytest.raises(StepCancelled):
            await jobs[2].result()
        assert device.calls == ["launch 0", "launch 1", "finish 0"]

    run(scenario)


def test_a_failure_that_the_device_tells_late_is_that_of_its_own_step() -> None:
    async def scenario() -> None:
        thread, device = Hand(), Device(FAILED, yields(a=2))
        flights = chain(device, "a", "a")
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
        flights = chain(device, "a", "a")
        for flight in flights:
            flight.start(thread)
        thread.turn()
        assert [flight.withdraw() for flight in flights] == [False, True]
        assert not flights[1].withdraw(), "once is enough"
        job = flights[1].outcome(thread)
        thread.turn(2)
        with pytest.raises(StepCancelled):
            await job.result()
        assert device.calls == ["launch 0"]

    run(scenario)


def test_no_launch_keeps_those_before_it() -> None:
    async def scenario() -> None:
        thread, device = Hand(), Device(yields(a=1), yields(a=2))
        first, second = chain(device, "a", "a")
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


def test_a_withdrawn_launch_and_the_one_before_it_are_let_go_of_at_once() -> None:
    async def scenario() -> None:
        thread, device = Hand(), Device(yields(a=1))
        flights = chain(device, "a", "a")
        for flight in flights:
            flight.start(thread)
        assert flights[1].withdraw()
        thread.turn(2)
        known = [weakref.ref(each) for each in flights]
        gc.disable()  # what it holds on a device must not wait for the collector
        try:
            del flight, flights
            assert [each() for each in known] == [None, None]
        finally:
            gc.enable()

    run(scenario)


async def _last(flight: InFlightStep, thread: Hand) -> StepOutput:
    job = flight.outcome(thread)
    thread.turn()
    return await job.result()

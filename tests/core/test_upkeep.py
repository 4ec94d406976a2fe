"""Upkeep: once for each step, where it delays none, and before the next is planned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from simulation import loop as loops
from simulation.loop import SimulatedLoop

from foretoken.core.upkeep import BEGIN_AT, LEAST_STEP, Upkeep

STEP_S = 0.010


def run(scenario: Callable[[SimulatedLoop, Upkeep, list[float]], Awaitable[None]]) -> None:
    """In virtual time, with the moments at which the work was done."""

    async def main(loop: SimulatedLoop) -> None:
        done: list[float] = []
        began = loop.time()
        upkeep = Upkeep(lambda: done.append(loop.time() - began))
        await scenario(loop, upkeep, done)

    loops.run(main, 0)


def steps(upkeep: Upkeep, seconds: float) -> Upkeep:
    for _ in range(100):
        upkeep.observe(seconds)
    return upkeep


def test_the_work_begins_when_the_model_thread_is_in_its_kernels() -> None:
    async def scenario(loop: SimulatedLoop, upkeep: Upkeep, done: list[float]) -> None:
        steps(upkeep, STEP_S).begin()
        assert not done
        await asyncio.sleep(STEP_S)
        assert done == [pytest.approx(BEGIN_AT * STEP_S, rel=0.1)]
        upkeep.finish()
        assert len(done) == 1, "it is done already"

    run(scenario)


def test_a_step_that_ends_early_has_its_work_done_before_the_next() -> None:
    async def scenario(loop: SimulatedLoop, upkeep: Upkeep, done: list[float]) -> None:
        steps(upkeep, STEP_S).begin()
        upkeep.finish()
        assert done == [0.0]
        await asyncio.sleep(STEP_S)
        assert len(done) == 1, "the timer is gone"

    run(scenario)


def test_two_steps_have_two_works_though_nobody_finished_the_first() -> None:
    async def scenario(loop: SimulatedLoop, upkeep: Upkeep, done: list[float]) -> None:
        steps(upkeep, STEP_S).begin()
        upkeep.begin()
        await asyncio.sleep(STEP_S)
        assert len(done) == 2

    run(scenario)


def test_steps_too_short_for_a_timer_have_it_done_at_once() -> None:
    async def scenario(loop: SimulatedLoop, upkeep: Upkeep, done: list[float]) -> None:
        steps(upkeep, LEAST_STEP / 2).begin()
        assert done == [0.0]
        await asyncio.sleep(STEP_S)
        assert len(done) == 1

    run(scenario)


def test_a_short_step_behind_long_ones_does_not_wait_for_the_work() -> None:
    async def scenario(loop: SimulatedLoop, upkeep: Upkeep, done: list[float]) -> None:
        steps(upkeep, 100 * STEP_S).observe(STEP_S)
        upkeep.begin()
        await asyncio.sleep(STEP_S)
        assert len(done) == 1, "it is done within the step"

    run(scenario)


def test_what_was_cancelled_is_not_done() -> None:
    async def scenario(loop: SimulatedLoop, upkeep: Upkeep, done: list[float]) -> None:
        steps(upkeep, STEP_S).begin()
        assert upkeep.cancel()
        assert not upkeep.cancel()
        await asyncio.sleep(STEP_S)
        assert not done

    run(scenario)

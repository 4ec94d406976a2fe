"""Findings of seeds, each as a scenario of its own: seeds change with the generator."""

from __future__ import annotations

from dataclasses import replace

from foretoken.core.interface.plan import StepPlan

from . import loop as loops
from .asks import Ask
from .faults import Fault
from .loop import SimulatedLoop
from .model import HashDecoder
from .test_cancellation import client, make_world
from .verdict import check_end


def test_an_abort_that_came_too_late_does_not_end_the_next_request_of_that_id() -> None:
    """A failed step is run again in parts: one ends "a", and during the next its client is told.

    It asks again as "a" before the engine has looked at the abort of the first.
    """

    async def scenario(loop: SimulatedLoop) -> None:
        world = make_world(loop)
        failures: list[StepPlan] = []

        def fails_once(plan: StepPlan, decoder: HashDecoder) -> None:
            if len(plan.requests) == 2 and not failures:
                failures.append(plan)
                world.engine.abort("a")
                raise Fault

        world.faults.before = fails_once
        await world.engine.start()
        first = world.submit(Ask(prompt=(1, 2), max_tokens=1), "a")
        other = world.submit(Ask(prompt=(3, 4), max_tokens=4), "b")
        await client(world).read(*first)
        await client(world).fast(Ask(prompt=(2, 1), max_tokens=6), "a")
        await client(world).read(*other)
        assert failures
        assert [told.end for told in world.told if told.request.request_id == "a"] == ["length"] * 2
        await check_end(world)

    loops.run(scenario, 0)


def test_a_chunk_of_one_token_that_is_not_a_number_reaches_no_other_request() -> None:
    """The chunk decides no token, so the verifier never sees it; its page was published."""

    async def scenario(loop: SimulatedLoop) -> None:
        world = make_world(loop)
        world.scheduler.limits = replace(world.scheduler.limits, max_batch_tokens=1)

        def breaks(plan: StepPlan, decoder: HashDecoder) -> None:
            (row,) = plan.requests
            decoder.broken = {"a"} & {row.request_id} if row.start == 1 else set()

        world.faults.before = breaks
        world.faults.broken.add("a")
        await world.engine.start()
        for name in ("a", "b"):
            await client(world).fast(Ask(prompt=(1, 2, 3, 4, 5), max_tokens=2), name)
        assert [told.end for told in world.told] == ["error", "length"]
        await check_end(world)

    loops.run(scenario, 0)

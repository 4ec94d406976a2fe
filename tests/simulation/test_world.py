"""Some hundred seeds of the whole engine, and that the simulator itself does what it says."""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial

import pytest

from support.fake_model import FakeRunner, make_request, make_scheduler

from . import loop as loops
from .loop import SimulatedLoop, Stuck
from .thread import SimulatedThread
from .world import Findings, live

NUM_SEEDS, NUM_PARTS = 160, 8


@pytest.fixture(autouse=True)
def _quiet():
    """The engine logs each fault with its traceback, which costs more than the fault."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_whatever_a_seed_brings_the_invariants_hold(part: int) -> None:
    """``python -m simulation --seeds 1 --from SEED`` in tests/ shows one of them again."""
    total = sum((live(seed).ends for seed in range(part, NUM_SEEDS, NUM_PARTS)), start=_nothing())
    assert {"stop", "length", "abort", "error"} <= set(total)


def test_some_worlds_evict_kv_of_answers() -> None:
    """Answers and pages are checked as everywhere, with few tokens that keep their KV."""
    for seed in (18, 22, 28):
        assert live(seed).num_packed_away > 0


def _nothing():
    return Findings().ends


def test_a_seed_runs_the_same_way_twice() -> None:
    for seed in (3, 4):
        first, second = live(seed), live(seed)
        assert first == second
        assert first.trace != live(seed + 10).trace


def test_whoever_waits_for_nothing_is_found() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="nothing is scheduled") as caught:
        loops.run(lambda loop: waits(), 0)
    assert "Event.wait" in str(caught.value), "the report says who waits, and where"


def test_whoever_turns_without_end_is_found() -> None:
    async def turns() -> None:
        while True:  # noqa: ASYNC110 - the loop is what is tested
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="no time passes"):
        loops.run(lambda loop: turns(), 0)


def test_a_day_passes_in_no_time_and_timers_keep_their_order() -> None:
    async def scenario(loop: SimulatedLoop) -> list[int]:
        seen: list[int] = []
        for hours in random.Random(0).sample(range(1, 12), 11):
            loop.call_later(3600.0 * hours, seen.append, hours)
        await asyncio.sleep(12 * 3600.0)
        return seen

    for seed in range(20):
        assert loops.run(scenario, seed) == list(range(1, 12))


def orders(body) -> set[tuple[str, ...]]:
    """Return the orders in which a body notes its events, over many seeds."""

    async def scenario(loop: SimulatedLoop) -> tuple[str, ...]:
        seen: list[str] = []
        await body(seen)
        return tuple(seen)

    return {loops.run(scenario, seed) for seed in range(40)}


def test_what_one_callback_registers_keeps_its_order() -> None:
    async def body(seen: list[str]) -> None:
        loop = asyncio.get_running_loop()
        for name in "abc":
            loop.call_soon(seen.append, name)
        await asyncio.sleep(1.0)

    assert orders(body) == {("a", "b", "c")}


def test_what_different_tasks_register_comes_in_any_order() -> None:
    async def one(seen: list[str], name: str) -> None:
        await asyncio.sleep(0)
        seen.append(name)

    async def body(seen: list[str]) -> None:
        await asyncio.gather(*(one(seen, name) for name in "abc"))

    assert len(orders(body)) == 6


def test_timers_of_one_moment_and_calls_in_threads_come_in_any_order() -> None:
    async def sleeps(seen: list[str]) -> None:
        async def one(name: str) -> None:
            await asyncio.sleep(1.0)
            seen.append(name)

        await asyncio.gather(one("a"), one("b"))

    async def calls(seen: list[str]) -> None:
        await asyncio.gather(*(asyncio.to_thread(seen.append, name) for name in "ab"))

    assert orders(sleeps) == orders(calls) == {("a", "b"), ("b", "a")}


def test_a_request_that_changes_under_its_step_is_found() -> None:
    changes: list[str] = []

    async def scenario(loop: SimulatedLoop) -> None:
        scheduler, request = make_scheduler(), make_request("a", [1, 2, 3])
        scheduler.add(request, 0.0)
        thread = SimulatedThread(random.Random(0), lambda: 1.0, changes.append)
        plan = scheduler.schedule(0.0)
        job = thread.start(partial(FakeRunner(page_size=4).step, plan))
        request.tokens.append(5)
        await job.result()

    loops.run(scenario, 0)
    assert changes == ["what a step was lent changed while it ran"]

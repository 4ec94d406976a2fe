"""Hangs and closes while two steps are under way: as if there had been one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from foretoken.core.engine.model_thread import StepHung
from foretoken.core.errors import EngineDead
from foretoken.core.interface.request import FinishReason
from support import virtual_time
from support.fake_model import answer
from support.overlap_fixture import PROMPTS, Reader, come_to_rest, make_engine, read_all, run
from support.virtual_thread import Launching, a_second


def hangs_at(number: int) -> Callable[[], float | None]:
    """The thread never comes back from that call."""
    left = iter(range(10_000))
    return lambda: None if next(left) == number else 1.0


@pytest.mark.parametrize("number", [2, 3, 4])
def test_a_step_that_hangs_ends_the_engine_in_time_whatever_follows_it(number) -> None:
    async def scenario() -> None:
        engine = make_engine(Launching(), seconds=hangs_at(number), step_timeout=16.0)
        await engine.start()
        readers = [Reader(engine, str(i), PROMPTS[i]) for i in range(2)]
        await read_all(*readers)
        assert [type(reader.end) for reader in readers] == [EngineDead] * 2
        assert 16 <= virtual_time.now() <= 16 + number + 5
        assert engine.hung
        assert isinstance(engine.failure, StepHung)
        assert engine._watchdog.records[-1].failure == "StepHung"
        engine.scheduler.audit()
        await engine.close()

    run(scenario)


def test_long_steps_that_overlap_are_no_step_that_hangs() -> None:
    async def scenario() -> None:
        engine = make_engine(Launching(), seconds=lambda: 7.9, step_timeout=8.0)
        await engine.start()
        reader = Reader(engine, "a", PROMPTS[0], max_tokens=20)
        await read_all(reader)
        assert reader.tokens == answer(PROMPTS[0], 20)
        await come_to_rest(engine)

    run(scenario)


def test_each_step_takes_as_long_as_the_thread_was_in_it() -> None:
    async def scenario() -> None:
        engine = make_engine(Launching())
        await engine.start()
        await read_all(Reader(engine, "a", PROMPTS[0], max_tokens=8))
        assert [note.seconds for note in engine._watchdog.records] == [1.0] * 8
        assert [note.began for note in engine._watchdog.records] == [1.0 + i for i in range(8)]
        assert engine.metrics.render()[0].count(b"step_seconds_sum 8.0") == 1
        await come_to_rest(engine)

    run(scenario)


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [2.0, 4.5, 6.0])
def test_an_engine_that_is_closed_ends_everybody_and_loses_no_page(after) -> None:
    async def scenario() -> None:
        engine = make_engine(Launching())
        await engine.start()
        readers = [Reader(engine, str(i), PROMPTS[i], max_tokens=50) for i in range(2)]
        await asyncio.sleep(after)
        await engine.close()
        await read_all(*readers)
        for reader, prompt in zip(readers, PROMPTS, strict=False):
            assert reader.reason[0] is FinishReason.ABORT
            assert reader.tokens == answer(prompt, len(reader.tokens))
        engine.scheduler.audit()
        assert engine.scheduler.num_requests == 0

    run(scenario)


def test_an_engine_that_is_drained_lets_everybody_finish() -> None:
    async def scenario() -> None:
        engine = make_engine(Launching(), seconds=a_second)
        await engine.start()
        reader = Reader(engine, "a", PROMPTS[0], max_tokens=20)
        await asyncio.sleep(3.5)
        await engine.close(drain_seconds=100)
        await reader.task
        assert reader.tokens == answer(PROMPTS[0], 20)
        engine.scheduler.audit()

    run(scenario)

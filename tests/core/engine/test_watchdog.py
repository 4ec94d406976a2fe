"""A step that does not come back from the model thread is given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from foretoken.core.engine.engine import Engine
from foretoken.core.engine.model_thread import BEATS, Job, StepHung, Supervision
from foretoken.core.errors import EngineDead
from support import virtual_time
from support.fake_model import FakeRunner, answer, make_request, make_scheduler

PROMPT = [1, 2, 3]


class SlowThread:
    """A `StepThread` in virtual time: call number n takes ``seconds(n)``, None for ever."""

    def __init__(self, seconds: Callable[[int], float | None]) -> None:
        self.seconds = seconds
        self.jobs: list[Job] = []

    def start(self, work):
        self.jobs.append(job := Job(work))
        seconds = self.seconds(len(self.jobs) - 1)
        if seconds is not None:
            job.loop.call_later(seconds, self.end, job)
        return job

    def end(self, job: Job) -> None:
        job.end(job.work(), None)

    def close(self) -> None: ...


def make_engine(seconds: Callable[[int], float | None], **supervision) -> Engine:
    return Engine(
        make_scheduler(),
        FakeRunner(4),
        clock=virtual_time.now,
        make_thread=lambda name, on_start: SlowThread(seconds),
        supervision=Supervision(**supervision),
    )


def hangs_at(call: int, *, else_s: float = 0.1) -> Callable[[int], float | None]:
    return lambda number: None if number == call else else_s


async def read(engine: Engine, request_id: str = "a", **options) -> list[int]:
    stream = engine.submit(make_request(request_id, PROMPT, **options))
    return [token async for delta in stream for token in delta.token_ids]


def test_a_step_that_never_comes_back_ends_the_engine_and_everybody_is_told_in_time() -> None:
    async def scenario() -> None:
        engine = make_engine(hangs_at(3), step_timeout=120)
        await engine.start()
        readers = [asyncio.create_task(read(engine, each)) for each in "ab"]
        await asyncio.sleep(100)
        assert engine.alive
        told = await asyncio.gather(*readers, return_exceptions=True)
        assert [type(each) for each in told] == [EngineDead, EngineDead]
        assert 120 < virtual_time.now() <= 120 * (1 + 1 / BEATS) + 1
        assert not engine.alive
        assert engine.hung
        assert isinstance(engine.failure, StepHung)
        with pytest.raises(EngineDead):
            engine.submit(make_request("late", PROMPT))
        await engine.close(drain_seconds=30)

    virtual_time.run(scenario)


def test_what_a_given_up_step_still_brings_is_ignored() -> None:
    async def scenario() -> None:
        engine = make_engine(hangs_at(2), step_timeout=8)
        await engine.start()
        with pytest.raises(EngineDead):
            await read(engine)
        engine._thread.end(engine._thread.jobs[2])
        await asyncio.sleep(1)
        engine.scheduler.audit()
        assert engine.scheduler.num_requests == 0

    virtual_time.run(scenario)


def test_a_step_of_thirty_seconds_ends_nothing_but_readiness_tells_of_it() -> None:
    async def scenario() -> None:
        engine = make_engine(lambda number: 30.0 if number else 0.1)
        await engine.start()
        assert engine.readiness is None
        reader = asyncio.create_task(read(engine, max_tokens=5, deadline=50.0))
        await asyncio.sleep(9)
        assert engine.readiness is None
        await asyncio.sleep(2)
        assert engine.readiness is not None
        assert engine.alive
        tokens = await reader
        assert tokens == answer(PROMPT, 2), "its deadline passed in the second step, once"
        assert engine.readiness is None
        await engine.close()

    virtual_time.run(scenario)


def test_long_steps_one_after_the_other_are_not_one_that_hangs() -> None:
    async def scenario() -> None:
        engine = make_engine(lambda number: 7.9, step_timeout=8)
        await engine.start()
        assert await read(engine, max_tokens=20) == answer(PROMPT, 20)
        await engine.close()

    virtual_time.run(scenario)


def test_a_clock_that_leaps_ends_no_step_and_passes_a_deadline_once() -> None:
    async def scenario() -> None:
        engine = make_engine(lambda number: 5.0 if number else 0.1, step_timeout=80)
        await engine.start()
        patient = asyncio.create_task(read(engine, "patient", max_tokens=4))
        late = engine.submit(make_request("late", PROMPT, max_tokens=4, deadline=60.0))
        await asyncio.sleep(7)
        asyncio.get_running_loop()._selector.now += 10_000.0
        assert await patient == answer(PROMPT, 4)
        deltas = [delta async for delta in late]
        assert [delta.stop_reason for delta in deltas if delta.terminal] == ["deadline"]
        assert engine.alive
        await engine.close()

    virtual_time.run(scenario)


def test_an_idle_or_closed_engine_sets_no_timers() -> None:
    async def scenario() -> None:
        engine = make_engine(lambda number: 0.1, step_timeout=8)
        await engine.start()
        await read(engine)
        await asyncio.sleep(2)
        assert not asyncio.get_running_loop()._scheduled
        await asyncio.sleep(20)
        assert not engine.hung
        await read(engine, "b")
        await engine.close()
        assert all(timer.cancelled() for timer in asyncio.get_running_loop()._scheduled)

    virtual_time.run(scenario)


def test_a_timeout_of_zero_is_never() -> None:
    async def scenario() -> None:
        engine = make_engine(lambda number: 1e6, step_timeout=0)
        await engine.start()
        assert await read(engine, max_tokens=2) == answer(PROMPT, 2)
        await engine.close()

    virtual_time.run(scenario)


def test_closing_waits_for_a_step_that_hangs_no_longer_than_the_watchdog(tmp_path) -> None:
    async def scenario() -> None:
        engine = make_engine(hangs_at(2), step_timeout=80, dump_dir=tmp_path)
        await engine.start()
        stream = engine.submit(make_request("a", PROMPT))
        await asyncio.sleep(1)
        await engine.close(drain_seconds=10)
        assert virtual_time.now() <= 80 * (1 + 1 / BEATS) + 1
        assert engine.hung
        assert stream.ended
        assert engine.num_crash_dumps == 1

    virtual_time.run(scenario)


def test_a_hung_step_leaves_a_dump_that_says_where_everything_stood(tmp_path) -> None:
    async def scenario() -> None:
        engine = make_engine(hangs_at(3), step_timeout=8, dump_dir=tmp_path)
        await engine.start()
        with pytest.raises(EngineDead):
            await read(engine)

    virtual_time.run(scenario)
    (path,) = tmp_path.iterdir()
    dump = json.loads(path.read_text())
    assert dump["failure"]["kind"] == "StepHung"
    assert [request["id"] for request in dump["requests"]] == ["a"]
    assert dump["steps"][-1]["failure"] == "StepHung"
    assert dump["steps"][-1]["seconds"] >= 8

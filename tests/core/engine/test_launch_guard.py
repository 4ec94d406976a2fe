"""A launch that hangs on the event loop, where no timer fires meanwhile, is told of by a thread."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from threading import Event

import pytest

from foretoken.core.engine.engine import Engine
from foretoken.core.engine.launch_guard import BEATS, LaunchGuard
from foretoken.core.engine.model_thread import StepHung, Supervision
from foretoken.core.errors import EngineDead
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.protocols import OnKernelsStarted, Pending, ignore_kernels
from support import virtual_time
from support.fake_model import answer
from support.overlap_fixture import PROMPTS, Reader, come_to_rest, make_engine, read_all, run
from support.virtual_thread import Launching, Told


def test_a_launch_that_hangs_is_told_of_once() -> None:
    told: list[str] = []
    guard = LaunchGuard(0.0, lambda: told.append("hung"))
    guard.begin()
    for _ in range(BEATS):
        guard.beat()
    assert not told
    assert not guard.has_hung
    for _ in range(3 * BEATS):
        guard.beat()
    assert told == ["hung"]
    guard.end()
    assert guard.has_hung


def test_many_launches_one_after_the_other_are_not_one_that_hangs() -> None:
    guard = LaunchGuard(0.0, lambda: pytest.fail("nothing hangs"))
    for _ in range(3):
        guard.begin()
        for _ in range(BEATS):
            guard.beat()
        guard.end()
    for _ in range(3 * BEATS):
        guard.beat()


def test_a_thread_counts_while_the_launch_blocks_its_own() -> None:
    is_told = Event()
    guard = LaunchGuard(0.01, is_told.set)
    guard.begin()
    assert is_told.wait(30)
    guard.end()
    guard.close()


class Hanging(Launching):
    """The launch of that number takes 50 seconds, and the thread of the guard so many ticks."""

    def __init__(self, number: int, num_beats: int) -> None:
        super().__init__()
        self.engine: Engine | None = None
        self.seen: list[float] = []
        self.readiness: str | None = None
        self._number, self._num_beats = number, num_beats

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Told:
        if self.calls.count("launch") == self._number:
            assert self.engine is not None
            asyncio.get_running_loop()._selector.now += 50.0  # type: ignore[attr-defined]
            self.seen.append(self.engine._watchdog.seconds_under_way(virtual_time.now()))
            self.readiness = self.engine.readiness
            for _ in range(self._num_beats):
                self.engine._watchdog.launch_guard.beat()
        return super().launch(plan, after, on_kernels_started)


# The thread launches step 0, of the prompts; the loop launches step 1, and the others behind it.
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_launch_is_watched_before_it_begins(number: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = make_engine(runner := Hanging(number, BEATS + 1), step_timeout=40.0)
        engine.supervision = Supervision(step_timeout=40.0, dump_dir=tmp_path)
        runner.engine = engine
        await engine.start()
        readers = [Reader(engine, str(i), PROMPTS[i], max_tokens=20) for i in range(2)]
        await read_all(*readers)
        assert runner.seen[0] >= 50
        assert runner.readiness is not None
        assert [type(reader.end) for reader in readers] == [EngineDead] * 2
        assert engine.hung
        assert isinstance(engine.failure, StepHung)
        engine.scheduler.audit()
        assert engine.scheduler.num_requests == 0
        await engine.close()

    run(scenario)
    reports = [json.loads(each.read_bytes()) for each in tmp_path.iterdir()]
    (hung,) = [each for each in reports if each["reason"] == "the launch of a step hangs"]
    assert hung["step_under_way_seconds"] >= 50


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_clock_that_leaps_during_a_launch_ends_nothing(number: int) -> None:
    async def scenario() -> None:
        engine = make_engine(runner := Hanging(number, 1), step_timeout=40.0)
        runner.engine = engine
        await engine.start()
        reader = Reader(engine, "a", PROMPTS[0], max_tokens=20)
        await read_all(reader)
        assert reader.tokens == answer(PROMPTS[0], 20)
        assert engine._watchdog.seconds_under_way(virtual_time.now()) == 0
        await come_to_rest(engine)

    run(scenario)

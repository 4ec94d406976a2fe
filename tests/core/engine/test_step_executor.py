"""One step on behalf of the engine's loop: what must be over before it goes on, and what counts."""

from __future__ import annotations

import asyncio

import pytest

from foretoken.core.engine.model_thread import Job, Watchdog
from foretoken.core.engine.step_executor import MAX_FRUITLESS_STEPS, OverlapWork, StepExecutor
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.scheduling.scheduler import Event
from foretoken.core.telemetry.metrics import EngineMetrics
from support.fake_model import FakeRunner, make_request, make_scheduler


class LaterThread:
    """A call ends some turns of the loop after it began."""

    def __init__(self) -> None:
        self.num_ended = 0

    def start(self, work):
        job = Job(work)
        asyncio.get_running_loop().call_soon(self._turn, job, 3)
        return job

    def _turn(self, job: Job[StepOutput], turns_left: int) -> None:
        if turns_left:
            job.loop.call_soon(self._turn, job, turns_left - 1)
            return
        self.num_ended += 1
        try:
            job.end(job.work(), None)
        except RuntimeError as failure:
            job.end(None, failure)

    def close(self) -> None: ...


class Scene:
    def __init__(self, meanwhile=lambda: None, *, is_much=True) -> None:
        self.scheduler = make_scheduler()
        self.thread = LaterThread()
        self.told: list[Event] = []
        self.step_executor = StepExecutor(
            self.scheduler,
            EngineMetrics(self.scheduler),
            self.thread,
            Watchdog(0.0),
            on_events=self.told.extend,
            overlap_work=OverlapWork(meanwhile, lambda: is_much),
            clock=lambda: 0.0,
        )

    async def step(self, name: str, runner: FakeRunner) -> StepOutput | None:
        """The only step of a request."""
        self.scheduler.add(make_request(name, [1, 2, 3], max_tokens=1), 0.0)
        return await self.step_executor.step(self.scheduler.schedule(0.0), runner)


class Broken(FakeRunner):
    def step(self, plan: StepPlan) -> StepOutput:
        raise RuntimeError("the forward pass failed")


@pytest.mark.parametrize("is_much", [True, False])
def test_a_step_is_over_before_what_failed_meanwhile_is_raised(is_much) -> None:
    async def scenario() -> None:
        def meanwhile() -> None:
            raise LookupError("nobody is told")

        scene = Scene(meanwhile, is_much=is_much)
        with pytest.raises(LookupError):
            await scene.step("a", FakeRunner(page_size=4))
        assert scene.thread.num_ended == 1

    asyncio.run(scenario())


def test_failures_count_in_a_row_and_not_in_all() -> None:
    async def scenario() -> None:
        scene, good, bad = Scene(), FakeRunner(page_size=4), Broken(page_size=4)
        for index in range(2 * MAX_FRUITLESS_STEPS):
            assert await scene.step(f"bad-{index}", bad) is None
            assert await scene.step(f"good-{index}", good) is not None
        for index in range(MAX_FRUITLESS_STEPS - 1):
            await scene.step(f"bad again-{index}", bad)
        with pytest.raises(RuntimeError):
            await scene.step("the last", bad)

    asyncio.run(scenario())

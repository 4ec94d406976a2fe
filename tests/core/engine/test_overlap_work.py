"""OverlapWork: what is much is done behind the kernels, once for each step, and never lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from foretoken.core.engine.engine import Engine
from foretoken.core.engine.step_executor import OverlapWork
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.protocols import OnKernelsStarted, Pending, ignore_kernels
from support.fake_model import FakeRunner, make_request, make_scheduler


class Work:
    """Overlap work of a test: it counts its runs, and may be much, or fail."""

    def __init__(self) -> None:
        self.count = 0
        self.is_much = True
        self.failure: BaseException | None = None
        self.overlap_work = OverlapWork(self.do, lambda: self.is_much)

    def do(self) -> None:
        self.count += 1
        if self.failure is not None:
            raise self.failure


def run(scenario: Callable[[Work], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Work())

    asyncio.run(main())


async def turn() -> None:
    """Let the loop do what it was told."""
    for _ in range(3):
        await asyncio.sleep(0)


def told(work: Work) -> None:
    """The kernels begin, in another thread."""
    thread = threading.Thread(target=work.overlap_work.kernels_started)
    thread.start()
    thread.join()


def test_the_work_waits_for_the_kernels() -> None:
    async def scenario(work: Work) -> None:
        work.overlap_work.begin(is_notified=True)
        await turn()
        assert work.count == 0
        told(work)
        await turn()
        assert work.count == 1
        work.overlap_work.finish()
        told(work)
        await turn()
        assert work.count == 1, "once for each step"

    run(scenario)


def test_a_step_that_ends_untold_has_its_work_done_then() -> None:
    async def scenario(work: Work) -> None:
        work.overlap_work.begin(is_notified=True)
        work.overlap_work.finish()
        assert work.count == 1
        told(work)
        await turn()
        assert work.count == 1

    run(scenario)


def test_kernels_that_began_before_the_loop_was_ready_are_no_news() -> None:
    async def scenario(work: Work) -> None:
        told(work)
        work.overlap_work.begin(is_notified=True)
        assert work.count == 1, "nobody will tell again"
        work.overlap_work.finish()
        work.overlap_work.begin(is_notified=True)
        assert work.count == 1, "that was of the step before"
        work.overlap_work.finish()

    run(scenario)


@pytest.mark.parametrize(("is_notified", "is_much"), [(False, True), (True, False)])
def test_what_is_little_or_untold_of_is_done_at_once(is_notified, is_much) -> None:
    async def scenario(work: Work) -> None:
        work.is_much = is_much
        work.overlap_work.begin(is_notified=is_notified)
        assert work.count == 1
        work.overlap_work.finish()
        assert work.count == 1

    run(scenario)


def test_what_fails_behind_the_kernels_is_raised_where_the_step_ends() -> None:
    async def scenario(work: Work) -> None:
        work.failure = LookupError("nobody is told")
        work.overlap_work.begin(is_notified=True)
        told(work)
        await turn()
        with pytest.raises(LookupError):
            work.overlap_work.finish()
        work.failure = None
        work.overlap_work.begin(is_notified=True)
        work.overlap_work.finish()
        assert work.count == 2, "once raised it is forgotten"

    run(scenario)


def test_what_was_cancelled_is_not_done() -> None:
    async def scenario(work: Work) -> None:
        work.overlap_work.begin(is_notified=True)
        work.overlap_work.cancel()
        told(work)
        await turn()
        work.overlap_work.finish()
        assert work.count == 0

    run(scenario)


def test_kernels_that_begin_when_the_loop_is_gone_tell_nobody() -> None:
    kept: list[Work] = []

    async def scenario(work: Work) -> None:
        work.overlap_work.begin(is_notified=True)
        kept.append(work)

    run(scenario)
    told(kept[0])
    assert kept[0].count == 0


class Announcing(FakeRunner):
    """Runner whose kernels go on until the test lets them end."""

    def __init__(self) -> None:
        """On the running loop."""
        super().__init__(page_size=4)
        self._loop = asyncio.get_running_loop()
        self.is_second = asyncio.Event()  # the second step is under way
        self._announce: OnKernelsStarted = ignore_kernels
        self.may_begin, self.may_end = threading.Event(), threading.Event()
        self.num_steps = 0

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        self._announce = on_kernels_started
        return super().launch(plan, after)

    def step(self, plan: StepPlan) -> StepOutput:
        self.num_steps += 1
        if self.num_steps > 1:  # the first has nobody to tell of anything
            self._loop.call_soon_threadsafe(self.is_second.set)
            assert self.may_begin.wait(30)
        self._announce()
        if self.num_steps > 1:
            assert self.may_end.wait(30)
        return super().step(plan)


@pytest.mark.parametrize("num_requests", [1, 8])
async def test_tokens_are_told_while_the_next_ones_are_computed(num_requests) -> None:
    """Tokens of a few requests are told at once, of many as soon as the kernels begin."""
    runner = Announcing()
    engine = Engine(make_scheduler(max_batch_tokens=64), runner)
    await engine.start()
    streams = [
        engine.submit(make_request(str(each), [each % 7, each % 3, 2], max_tokens=4))
        for each in range(num_requests)
    ]
    try:
        first = [asyncio.ensure_future(anext(aiter(stream))) for stream in streams]
        await runner.is_second.wait()
        await turn()
        assert [task.done() for task in first] == [num_requests == 1] * num_requests
        runner.may_begin.set()
        for task in first:
            assert (await task).token_ids, "the step is still under way"
        assert runner.num_steps == 2
    finally:
        runner.may_begin.set()
        runner.may_end.set()
        await engine.close()

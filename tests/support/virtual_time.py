"""An event loop whose time jumps to the next timer, and a driver that answers by that time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

from foretoken.bench.load.figures import Record
from foretoken.bench.load.generator import Job, Load
from foretoken.bench.load.http import Failure


class _Jumping(selectors.SelectSelector):
    """Nothing but timers ever wakes the loop."""

    now = 0.0

    def select(self, timeout=None):
        assert timeout is not None, "the loop would wait for ever"
        self.now += max(0.0, timeout)
        return super().select(0)


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run to the end in no time."""
    selector = _Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work())


def now() -> float:
    return asyncio.get_running_loop().time()


class FakeDriver:
    """The first token after ``first`` seconds, the next ones every ``gap``; one at a time or not.

    ``fails`` names the numbers of the requests that are refused; each request begins ``later``
    than the one before it, and ``per_token`` later for each token of its prompt.
    """

    def __init__(
        self, first=1.0, gap=0.1, *, slots=1000, fails=(), later=0.0, per_token=0.0
    ) -> None:
        self.first, self.gap, self.fails, self.later = first, gap, fails, later
        self.per_token = per_token
        self.jobs: list[Job] = []
        self.most_running = self.running = 0
        self._slots = asyncio.Semaphore(slots)

    async def ask(self, job: Job, record: Record):
        number = len(self.jobs)
        self.jobs.append(job)
        if number in self.fails:
            raise Failure("HTTP 429", "busy")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async with self._slots:
                prompt_len = sum(len(piece.content) for piece in job.prompt)
                await asyncio.sleep(self.first + self.later * number + self.per_token * prompt_len)
                for index in range(job.output_len):
                    if index:
                        await asyncio.sleep(self.gap)
                    record.times.append(now())
                    record.counts.append(1)
                    if job.watch is not None:
                        job.watch(record)
        finally:
            self.running -= 1
        return [900_000 + number] * job.output_len

    async def settle(self) -> None: ...


def make_load(driver: FakeDriver) -> Load:
    return Load(driver, clock=now)

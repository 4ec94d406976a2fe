"""Sessions run against a driver: closed loop, open loop, warm-up, and who failed.

A *session* asks one request after the other, or several, each maybe made of earlier answers. In a
closed loop ``concurrency`` sessions run at a time. In an open loop they arrive by a schedule that
the server cannot slow down, and their first request is due at its arrival even where a cap on the
concurrency keeps it waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .figures import Record
from .http import Failure

Content = list[int] | str
"""Token ids, or text where the server renders conversations itself."""
Clock = Callable[[], float]
NOT_SENT = "not sent: an earlier request of its session failed"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a conversation."""

    role: str  # system, user, assistant
    content: Content


@dataclass(slots=True, kw_only=True)
class Job:
    """One request. ``watch`` is called with its record whenever tokens have come."""

    name: str
    prompt: Sequence[Piece]
    output_len: int
    due: float | None = None  # on the load's clock; None: now
    speculation: str | int | None = None  # None: as the server is set
    watch: Callable[[Record], None] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, in the words that prompts are made of."""

    content: Content
    record: Record


Ask = Callable[[Job], Awaitable[Reply]]


@dataclass(slots=True)
class Session:
    """Requests that depend on each other; ``planned`` is their number if nothing fails."""

    run: Callable[[Ask], Awaitable[None]]
    planned: int = 1
    at: float | None = None  # seconds after the start, where the workload has its own schedule


@contextlib.asynccontextmanager
async def at_once(
    requests: Iterable[Coroutine[Any, Any, object]],
) -> AsyncIterator[list[asyncio.Task[object]]]:
    """Run requests beside a block, to their ends; the first failure cuts off what still runs."""
    tasks = [asyncio.create_task(request) for request in requests]
    try:
        yield tasks
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Driver(Protocol):
    """Receiver of a load: a server or an engine."""

    async def ask(self, job: Job, record: Record) -> Content:
        """Send a job and write into its record as tokens come; raises `Failure`."""
        ...

    async def settle(self) -> None:
        """After the last job: complete the records."""
        ...


class Corpus(Protocol):
    """Source of texts that prompts are cut from."""

    def cut(self, key: object, length: int) -> Content:
        """``length`` tokens that belong to ``key``: the same ones each time."""
        ...


@dataclass(slots=True)
class Load:
    """Runs sessions and keeps the records of all their requests."""

    driver: Driver
    clock: Clock = time.perf_counter
    speculation: str | int | None = None
    records: list[Record] = field(default_factory=list)
    running: int = 0

    # -- one request ----------------------------------------------------------------------------

    async def ask(self, job: Job) -> Reply:
        """Send one request and record it; raises `Failure`, which is recorded too."""
        now = self.clock()
        due = now if job.due is None else job.due
        record = Record(job.name, due, sent=now, times=[], counts=[], asked_len=job.output_len)
        self.records.append(record)
        self.running += 1
        if job.speculation is None:
            job.speculation = self.speculation
        try:
            content = await self.driver.ask(job, record)
            if not record.times:
                raise Failure("no token", "the answer ended without one")
        except Failure as failure:
            record.error, record.message = failure.kind, failure.message
            raise
        except asyncio.CancelledError:
            record.was_cut = True
            raise
        finally:
            record.ended = self.clock()
            self.running -= 1
        return Reply(content, record)

    async def session(self, session: Session, due: float | None = None) -> None:
        """Run one session to its end; what a failure keeps it from asking is recorded."""
        num_asked = 0

        async def ask(job: Job) -> Reply:
            nonlocal num_asked, due
            num_asked += 1
            if due is not None:  # of the first request only; later ones depend on its answer
                job.due, due = due, None
            return await self.ask(job)

        try:
            await session.run(ask)
        except Failure as failure:
            now, why = self.clock(), str(failure)
            for _ in range(session.planned - num_asked):
                lost = Record("-", now, sent=now, ended=now, error=NOT_SENT, message=why)
                self.records.append(lost)

    # -- loops ----------------------------------------------------------------------------------

    async def closed(self, sessions: Iterable[Session], concurrency: int) -> None:
        """``concurrency`` sessions at a time, the next one as soon as one ends."""
        left = iter(sessions)

        async def worker() -> None:
            for session in left:
                await self.session(session)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())

    async def open(
        self, sessions: Sequence[Session], arrivals: Sequence[float], cap: int | None = None
    ) -> None:
        """Each session at its arrival (seconds from now), at most ``cap`` at a time."""
        begin = self.clock()
        room = asyncio.Semaphore(cap or len(sessions) or 1)

        async def one(session: Session, due: float) -> None:
            await asyncio.sleep(due - self.clock())
            async with room:
                await self.session(session, due)

        async with asyncio.TaskGroup() as group:
            for session, arrival in zip(sessions, arrivals, strict=True):
                group.create_task(one(session, begin + arrival))


def arrivals(count: int, rate: float, rng: random.Random, burstiness: float = 1.0) -> list[float]:
    """Seconds of ``count`` arrivals at ``rate`` a second, the first one at 0.

    The gaps are gamma distributed with shape ``burstiness``: 1 is Poisson, below it they bunch,
    above it they even out. An infinite rate has all arrive at once.
    """
    if rate == float("inf"):
        return [0.0] * count
    found, now = [], 0.0
    for _ in range(count):
        found.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return found


async def warm_up(load: Load, corpus: Corpus, count: int) -> list[Record]:
    """Requests on text of their own, so that they warm code and not the cache; their records."""
    begin = len(load.records)
    jobs = [
        Job(name="warm-up", prompt=[Piece("user", corpus.cut(("warm-up", i), 64))], output_len=16)
        for i in range(count)
    ]
    await asyncio.gather(*map(load.ask, jobs), return_exceptions=True)
    found = load.records[begin:]
    del load.records[begin:]
    return found

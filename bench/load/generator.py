"""Runs sessions on a driver in closed and open loops, with warm-up, and records failures.

A *session* makes requests one after another or several at a time; each may depend on earlier
answers. In a closed loop ``concurrency`` sessions run at a time. In an open loop they arrive by a
schedule that the server cannot slow down. Their first request is due at its arrival, even if a cap
on the concurrency keeps it waiting.
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
"""Token ids, or text for servers that render conversations themselves."""
Clock = Callable[[], float]
NOT_SENT = "not sent: an earlier request of its session failed"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a conversation."""

    role: str  # One of system, user and assistant.
    content: Content


@dataclass(slots=True, kw_only=True)
class Job:
    """One request. ``watch`` is called with its record whenever tokens arrive."""

    name: str
    prompt: Sequence[Piece]
    output_len: int
    due: float | None = None  # Due time on the load's clock; None: now.
    speculation: str | int | None = None  # None: the server's own setting.
    watch: Callable[[Record], None] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer in the form that prompts are made of, and its record."""

    content: Content
    record: Record


Ask = Callable[[Job], Awaitable[Reply]]


@dataclass(slots=True)
class Session:
    """Requests that depend on each other; ``planned`` is their number if nothing fails."""

    run: Callable[[Ask], Awaitable[None]]
    planned: int = 1
    # Arrival in seconds after the start, for workloads with a schedule of their own.
    at: float | None = None


@contextlib.asynccontextmanager
async def at_once(
    requests: Iterable[Coroutine[Any, Any, object]],
) -> AsyncIterator[list[asyncio.Task[object]]]:
    """Run requests to their ends while the body of the ``with`` statement runs.

    The first failure cancels the others.
    """
    tasks = [asyncio.create_task(request) for request in requests]
    try:
        yield tasks
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Driver(Protocol):
    """The receiver of a load: a server or an engine."""

    async def ask(self, job: Job, record: Record) -> Content:
        """Send a job and write into its record as tokens arrive. Raises `Failure`."""
        ...

    async def settle(self) -> None:
        """Complete the records after the last job."""
        ...


class Corpus(Protocol):
    """Source of the texts that prompts are cut from."""

    def cut(self, key: object, length: int) -> Content:
        """Return the ``length`` tokens that belong to ``key``, the same each time."""
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
        """Send one request and record it. Raises `Failure`, which is also recorded."""
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
                raise Failure("no token", "the answer ended without any token")
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
        """Run one session to its end; the requests that a failure prevents are recorded."""
        num_asked = 0

        async def ask(job: Job) -> Reply:
            nonlocal num_asked, due
            num_asked += 1
            # Only the first request has a schedule; later ones depend on its answer.
            if due is not None:
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
        """Run ``concurrency`` sessions at a time; the next one starts as soon as one ends."""
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
        """Run each session at its arrival (seconds from now), at most ``cap`` at a time."""
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
    """Return the seconds of ``count`` arrivals at ``rate`` per second; the first is at 0.

    The gaps are gamma distributed with shape ``burstiness``: 1 is Poisson, lower values are
    burstier, and higher ones more regular. With an infinite rate all arrive at once.
    """
    if rate == float("inf"):
        return [0.0] * count
    found, now = [], 0.0
    for _ in range(count):
        found.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return found


async def warm_up(load: Load, corpus: Corpus, count: int) -> list[Record]:
    """Send requests with text of their own, to warm up the code but not the cache.

    Returns their records.
    """
    begin = len(load.records)
    jobs = [
        Job(name="warm-up", prompt=[Piece("user", corpus.cut(("warm-up", i), 64))], output_len=16)
        for i in range(count)
    ]
    await asyncio.gather(*map(load.ask, jobs), return_exceptions=True)
    found = load.records[begin:]
    del load.records[begin:]
    return found

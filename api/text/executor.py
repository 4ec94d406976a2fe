"""Worker: a thread for long jobs, which does not delay the exit of the interpreter."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from ...core.errors import QueueFull
from ..types.request_context import NO_ORIGIN, Origin
from ..types.shares import FAIR_SHARE

T = TypeVar("T")
STACK_BYTES = 64 * 2**20  # address space of the stack, for recursion over deeply nested values


Waited = TypeVar("Waited")
# limit on the total size of the bodies of waiting jobs; a body takes up to 25 times as much memory
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Job(Generic[Waited]):
    """A job, the future of its result, and the caller and size of its request body (``origin``)."""

    future: Future[Waited]
    work: Callable[[], Waited]
    origin: Origin


class Waiting:
    """The waiting jobs of all callers, which are served in turn. Every operation is O(1).

    Each caller has an equal share of the queue, and can always have one waiting job.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._by_caller: OrderedDict[bytes, OrderedDict[Future[Any], Job[Any]]] = OrderedDict()
        self._bytes: dict[bytes, int] = {}
        self._sum = 0
        self._caller_of: dict[Future[Any], bytes] = {}

    def __len__(self) -> int:
        return len(self._caller_of)

    def put(self, job: Job[Any]) -> None:
        """Append a job to its caller's queue. Raises `QueueFull`."""
        caller, num_bytes = job.origin
        own = self._bytes.get(caller, 0)
        share = FAIR_SHARE * self._max_bytes
        if _is_over(own, num_bytes, share) or _is_over(self._sum, num_bytes, self._max_bytes):
            raise QueueFull("the tokenization queue is full")
        self._by_caller.setdefault(caller, OrderedDict())[job.future] = job
        self._bytes[caller] = own + num_bytes
        self._sum += num_bytes
        self._caller_of[job.future] = caller

    def take(self) -> Job[Any]:
        """Remove and return the first job of the next caller. At least one job must be waiting."""
        caller, jobs = next(iter(self._by_caller.items()))
        job = next(iter(jobs.values()))
        self._by_caller.move_to_end(caller)
        self.drop(job.future)
        return job

    def drop(self, future: Future[Any]) -> None:
        """Remove a job, if it is waiting."""
        caller = self._caller_of.pop(future, None)
        if caller is None:
            return
        job = self._by_caller[caller].pop(future)
        self._bytes[caller] -= job.origin.num_bytes
        self._sum -= job.origin.num_bytes
        if not self._by_caller[caller]:
            del self._by_caller[caller], self._bytes[caller]

    def clear(self) -> list[Job[Any]]:
        """Remove and return all jobs."""
        jobs = list(chain.from_iterable(each.values() for each in self._by_caller.values()))
        for job in jobs:
            self.drop(job.future)
        return jobs


def _is_over(num_waiting: int, num_bytes: int, limit: float) -> bool:
    return num_waiting > 0 and num_waiting + num_bytes > limit


class Worker:
    """Runs jobs of several callers in turn. The thread starts with the first job.

    A pool of `concurrent.futures` would be joined at exit, however long its job takes, and its
    stack size cannot be set. ``stack_bytes`` is the size of the thread's stack.
    """

    def __init__(self, name: str, *, stack_bytes: int = STACK_BYTES) -> None:
        self._name = name
        self._stack_bytes = stack_bytes
        self._waiting = Waiting()
        self._changed = threading.Condition()  # guards the waiting jobs
        self._is_closed = self._is_started = False

    @property
    def num_waiting(self) -> int:
        """Number of waiting jobs."""
        return len(self._waiting)

    def submit(self, job: Callable[[], T], origin: Origin = NO_ORIGIN) -> Future[T]:
        """Queue a job. Its future can be cancelled until it begins. Raises `QueueFull`."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
                return future
            self._waiting.put(Job(future, job, origin))
            self._changed.notify()
        if not self._is_started:
            self._is_started = True
            self._start()
        return future

    async def run(self, job: Callable[[], T], *, seconds: float, origin: Origin = NO_ORIGIN) -> T:
        """Run a job in the thread, and return its result.

        Raises `QueueFull`, and TimeoutError after ``seconds`` from the start of the job. If this
        call is cancelled, a waiting job is dropped; a running job runs to its end and delays later
        jobs, so the job itself must limit its time.
        """
        loop = asyncio.get_running_loop()
        is_awaited = True

        def begin() -> None:
            if is_awaited:
                limit.reschedule(loop.time() + seconds)

        def timed() -> T:
            loop.call_soon_threadsafe(begin)
            return job()

        future = self.submit(timed, origin)
        try:
            async with asyncio.timeout(None) as limit:
                return await asyncio.wrap_future(future)
        except BaseException:
            with self._changed:
                self._waiting.drop(future)
            raise
        finally:
            is_awaited = False

    def close(self) -> None:
        """Cancel the waiting jobs. The running job continues."""
        with self._changed:
            self._is_closed = True
            dropped = self._waiting.clear()
            self._changed.notify()
        for job in dropped:
            job.future.cancel()

    def _start(self) -> None:
        """Start the thread. The global stack size is set for it, then restored."""
        before = threading.stack_size(self._stack_bytes)
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        finally:
            threading.stack_size(before)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (next_one := self._next()) is not None:
            if next_one.future.set_running_or_notify_cancel():
                _do(next_one)
            del next_one  # the job may be big, and the next job may come much later

    def _next(self) -> Job[Any] | None:
        """Wait for the next job and return it; None after `close`."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            return self._waiting.take() if self._waiting else None


def _do(job: Job[Any]) -> None:
    try:
        result = job.work()
    except BaseException as error:
        job.future.set_exception(error)
    else:
        job.future.set_result(result)

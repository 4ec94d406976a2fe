"""ModelThread: the one thread that computes, seen from the event loop.

What `concurrent.futures` and `asyncio.shield` do for the same costs locks, callbacks and turns of
the loop, a tenth of a millisecond a step: as long as a small model takes for a token.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T")
EXIT_SECONDS = 10.0  # that the interpreter's exit waits for a call under way


class Job(Generic[T]):
    """A call under way. Belongs to the event loop on which it was started."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self._is_over = False
        self._ended: asyncio.Future[None] = self.loop.create_future()
        self._result: T | None = None
        self._failure: BaseException | None = None

    async def result(self) -> T:
        """What the call returns or raises, at its end even when the caller is cancelled."""
        try:
            await self._ended
        except asyncio.CancelledError:
            if not self._is_over:  # only the waiting was cancelled
                self._ended = self.loop.create_future()
                await self._ended
            raise
        if self._failure is not None:
            raise self._failure
        return self._result  # type: ignore[return-value] # a T where nothing was raised

    def end(self, result: T | None, failure: BaseException | None) -> None:
        """Called on the event loop."""
        self._result, self._failure, self._is_over = result, failure, True
        if not self._ended.done():
            self._ended.set_result(None)


class ModelThread:
    """Runs one call after the other for as long as it lives.

    ``on_start`` runs in it first; what that raises every call raises.
    """

    def __init__(self, name: str, on_start: Callable[[], None]) -> None:
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        # A daemon: else an engine that nobody closed would keep the interpreter from its exit.
        self._thread = threading.Thread(
            target=self._serve, args=(on_start,), name=name, daemon=True
        )
        self._thread.start()
        _LIVING.add(self)

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Begin a call on behalf of the running event loop."""
        job = Job(work)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Let it end after the calls that it was given."""
        self._jobs.put(None)

    def join(self, seconds: float) -> None:
        """Wait for its end, once it is closed."""
        self._thread.join(seconds)

    def _serve(self, on_start: Callable[[], None]) -> None:
        _, failure = _outcome(on_start)
        while (job := self._jobs.get()) is not None:
            outcome = _outcome(job.work) if failure is None else (None, failure)
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits
                job.loop.call_soon_threadsafe(job.end, *outcome)
            del job, outcome  # nothing is kept alive while it waits


_LIVING: WeakSet[ModelThread] = WeakSet()


@atexit.register
def _end_all() -> None:
    """Kernels must not run while the memory that they read is torn down."""
    threads = list(_LIVING)
    for thread in threads:
        thread.close()
    for thread in threads:
        thread.join(EXIT_SECONDS)


def _outcome(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as failure:  # raised where it is waited for
        return None, failure

"""ModelThread: the single thread that computes steps, its calls on the event loop, and a watchdog.

`concurrent.futures` and `asyncio.shield` would add locks, callbacks and iterations of the event
loop: a tenth of a millisecond per step, as long as a small model computes a token.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..errors import EngineDead
from ..interface.plan import StepPlan
from ..scheduling.chunk_budget import num_step_tokens

T = TypeVar("T")
EXIT_SECONDS = 10.0  # time for which the interpreter's exit waits for a running call
MAX_RECORDS = 64  # runs of the model thread that are kept
BEATS = 8  # beats of the watchdog after which a step is given up
STEP_SECONDS, READY_SECONDS = 120.0, 10.0


class Job(Generic[T]):
    """A running call; it belongs to the event loop on which it was started."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.is_over = False
        self._ended: asyncio.Future[None] = self.loop.create_future()
        self._result: T | None = None
        self._failure: BaseException | None = None

    async def result(self) -> T:
        """Wait for the call's end, even if the caller is cancelled; return or raise its outcome."""
        cancelled: asyncio.CancelledError | None = None
        while not self.is_over:
            try:
                await self._ended
            except asyncio.CancelledError as error:
                cancelled = error
                self._ended = self.loop.create_future()  # the wait was cancelled, not the job
        if cancelled is not None:
            raise cancelled
        if self._failure is not None:
            raise self._failure
        return self._result  # type: ignore[return-value] # a T if nothing was raised

    def end(self, result: T | None, failure: BaseException | None) -> None:
        """Record the call's end, on the event loop; only the first end of a call counts."""
        if self.is_over:
            return
        self._result, self._failure, self.is_over = result, failure, True
        if not self._ended.done():
            self._ended.set_result(None)


class StepThread(Protocol):
    """Thread in which an engine computes; tests replace it."""

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Begin a call; its outcome is passed to ``Job.end`` on the event loop."""

    def close(self) -> None:
        """Stop the thread once its calls have ended; no further call may be started."""


class ModelThread:
    """Thread that runs one call after the other until it is closed by its owner.

    ``on_start`` runs in it first; if that raises, every call raises the same error.
    """

    def __init__(self, name: str, on_start: Callable[[], None]) -> None:
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()  # no job may follow the end marker
        self._is_closed = False
        self._current: Job[Any] | None = None  # the call that the thread is in
        self._latest: weakref.ref[Job[Any]] | None = None  # the job that was started last

        # A daemon: an engine that was not closed must not keep the interpreter from exiting.
        self._thread = threading.Thread(
            target=self._serve, args=(on_start,), name=name, daemon=True
        )
        _RUNNING.add(self)
        self._thread.start()

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Begin a call on behalf of the running event loop. Raises `EngineDead` once closed."""
        job = Job(work)
        with self._lock:
            if self._is_closed:
                raise EngineDead("the engine was closed")
            self._jobs.put(job)
            self._latest = weakref.ref(job)
        return job

    def close(self) -> None:
        """End the thread after the calls that it was given."""
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)

    def join(self) -> None:
        """Wait until the running call ends, unless it was abandoned."""
        if not self._is_given_up:
            self._thread.join(EXIT_SECONDS)

    @property
    def _is_given_up(self) -> bool:
        """Whether the thread is in a call that was abandoned.

        No caller waits for the launch of a step. It counts as abandoned if the call that was
        started last is.
        """
        job, latest = self._current, None if self._latest is None else self._latest()
        return job is not None and (job.is_over or (latest is not None and latest.is_over))

    def _serve(self, on_start: Callable[[], None]) -> None:
        """Run the calls in the thread. It keeps no reference to the last one while it waits."""
        _, failure = _outcome(on_start)
        del on_start
        while (job := self._jobs.get()) is not None:
            self._current = job
            outcome = _outcome(job.work) if failure is None else (None, failure)
            self._current = None
            with contextlib.suppress(RuntimeError):  # the job's loop is closed: no caller waits
                job.loop.call_soon_threadsafe(job.end, *outcome)
            del job, outcome


# a running thread keeps its own object alive
_RUNNING: weakref.WeakSet[ModelThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all threads: kernels must not run while the memory that they read is torn down."""
    running = list(_RUNNING)
    for thread in running:
        thread.close()
    for thread in running:
        thread.join()


def _outcome(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as failure:  # `Job.result` raises it in the waiting caller
        return None, failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Time limits of a step, and the crash dumps of an engine that dies.

    ``step_timeout``: seconds after which the engine gives up a step and ends; 0: no limit.
    ``ready_step_seconds``: the engine is not ready while a step takes longer. ``dump_dir``: folder
    of crash dumps; None: no dumps. ``about`` is added to each dump.
    """

    step_timeout: float = STEP_SECONDS
    ready_step_seconds: float = READY_SECONDS
    dump_dir: Path | None = None
    about: Mapping[str, object] = field(default_factory=dict)


class StepHung(Exception):  # noqa: N818 - nothing was raised: that is the trouble
    """Raised if the model thread did not return from a step in time."""


class StepRecord(NamedTuple):
    """A record of one step that the model thread has run."""

    began: float  # on the engine's clock
    seconds: float
    num_requests: int
    num_tokens: int
    failure: str | None  # kind of the exception


class Watchdog:
    """Gives up a call of the model thread that takes longer than ``seconds``; 0: no limit.

    The caller that waits for the call gets `StepHung`; the thread itself cannot be ended. A timer
    runs while there are calls. The watchdog counts the timer's ticks instead of comparing times: if
    the clock jumps or the machine is suspended, this counts as one tick and ends no engine. The
    last calls are recorded.
    """

    def __init__(self, seconds: float) -> None:
        self.records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._began: float | None = None  # start of the running call, on the engine's clock
        self._period = seconds / BEATS
        self._seconds = seconds
        self._job: Job[Any] | None = None  # the job under way
        self._num_jobs = 0  # number of jobs so far
        self._seen = 0  # number of jobs at the last beat
        self._num_beats = 0  # beats since the present job was first seen
        self._timer: asyncio.TimerHandle | None = None
        self.gave_up = False

    def watch(self, job: Job[Any], now: float) -> None:
        """Begin to watch a call that was started on the running event loop."""
        self._job, self._began = job, now
        self._num_jobs += 1
        if self._timer is None and self._seconds > 0:
            self._arm(job.loop)

    def end(self, plan: StepPlan, now: float, failure: BaseException | None) -> None:
        """Record the end of the call, which computed ``plan``."""
        began, self._job, self._began = self._began, None, None
        if began is not None:
            kind = None if failure is None else type(failure).__name__
            counts = len(plan.requests), num_step_tokens(plan.requests)
            self.records.append(StepRecord(began, now - began, *counts, kind))

    def seconds_under_way(self, now: float) -> float:
        """Return the seconds since the present call began; 0 between two calls."""
        return 0.0 if self._began is None else now - self._began

    def close(self) -> None:
        """Stop watching."""
        self._job = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._period, self._beat)

    def _beat(self) -> None:
        self._timer = None
        job = self._job
        if job is None:
            return
        self._num_beats = self._num_beats + 1 if self._seen == self._num_jobs else 0
        self._seen = self._num_jobs
        if self._num_beats < BEATS:
            self._arm(job.loop)
            return
        self.gave_up = True
        job.end(None, StepHung(f"a step took longer than {self._seconds:g} s (--step-timeout)"))

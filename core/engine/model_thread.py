"""ModelThread: the thread that computes steps, and a watchdog that limits their time.

`concurrent.futures` and `asyncio.shield` would add locks, callbacks and iterations of the event
loop: a tenth of a millisecond per step, in which a small model computes a whole token.
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
from .launch_guard import BEATS, LaunchGuard

T = TypeVar("T")
EXIT_SECONDS = 10.0  # maximum time for which the interpreter's exit waits for a running call
MAX_RECORDS = 64  # number of calls of the model thread that the watchdog keeps a record of
STEP_SECONDS, READY_SECONDS = 120.0, 10.0


class Job(Generic[T]):
    """A call in another thread; its caller waits for it on the event loop that started it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.is_over = False
        self._ended: asyncio.Future[None] = self.loop.create_future()
        self._result: T | None = None
        self._failure: BaseException | None = None

    async def result(self) -> T:
        """Wait until the call ends, and return its result or raise its error.

        If the caller is cancelled, it still waits for the end of the call first.
        """
        cancelled: asyncio.CancelledError | None = None
        while not self.is_over:
            try:
                await self._ended
            except asyncio.CancelledError as error:
                cancelled = error
                self._ended = self.loop.create_future()  # the cancellation ended the future only
        if cancelled is not None:
            raise cancelled
        if self._failure is not None:
            raise self._failure
        return self._result  # type: ignore[return-value] # a T if nothing was raised

    def end(self, result: T | None, failure: BaseException | None) -> None:
        """Record the outcome of the call, on its event loop; later outcomes are ignored."""
        if self.is_over:
            return
        self._result, self._failure, self.is_over = result, failure, True
        if not self._ended.done():
            self._ended.set_result(None)


class StepThread(Protocol):
    """Protocol of the thread in which an engine computes; tests replace the thread."""

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Begin a call in the thread; its outcome is passed to ``Job.end`` on the event loop."""

    def close(self) -> None:
        """Let the thread end after the calls that were started; later calls are refused."""


class ModelThread:
    """Thread that runs one call after another until its owner closes it.

    ``on_start`` runs in the thread first; if it raises an error, every call raises that error.
    """

    def __init__(self, name: str, on_start: Callable[[], None]) -> None:
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()  # keeps jobs from being queued after the end marker None
        self._is_closed = False
        self._current: Job[Any] | None = None  # the job that the thread is running
        # A daemon thread, so that an engine that was not closed does not block the exit.
        self._thread = threading.Thread(
            target=self._serve, args=(on_start,), name=name, daemon=True
        )
        _RUNNING.add(self)
        self._thread.start()

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Begin a call for the running event loop. Raises `EngineDead` if the thread is closed."""
        job = Job(work)
        with self._lock:
            if self._is_closed:
                raise EngineDead("the engine was closed")
            self._jobs.put(job)
        return job

    def close(self) -> None:
        """Let the thread end after the calls that were started; later calls are refused."""
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)

    def join(self) -> None:
        """Wait until the thread ends, for at most `EXIT_SECONDS`.

        The call returns at once if the thread is in a call that its caller gave up.
        """
        job = self._current
        if job is None or not job.is_over:
            self._thread.join(EXIT_SECONDS)

    def _serve(self, on_start: Callable[[], None]) -> None:
        """Run the queued calls in the thread, without keeping a reference to a call that ended."""
        _, failure = _outcome(on_start)
        del on_start
        while (job := self._jobs.get()) is not None:
            self._current = job
            outcome = _outcome(job.work) if failure is None else (None, failure)
            self._current = None
            with contextlib.suppress(RuntimeError):  # if the job's loop is closed, no caller waits
                job.loop.call_soon_threadsafe(job.end, *outcome)
            del job, outcome


# The set is weak, because a running thread keeps its own `ModelThread` alive.
_RUNNING: weakref.WeakSet[ModelThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all model threads, because the interpreter's exit frees memory that kernels read."""
    running = list(_RUNNING)
    for thread in running:
        thread.close()
    for thread in running:
        thread.join()


def _outcome(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as failure:  # `Job.result` raises it in the caller
        return None, failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Time limits of a step, and settings of the crash dumps.

    ``step_timeout``: seconds after which the engine gives up a step and ends; 0: no limit.
    ``ready_step_seconds``: seconds of a running step after which the engine is not ready until the
    step ends. ``dump_dir``: folder of crash dumps; None: no dumps. ``about``: values that are added
    to each dump.
    """

    step_timeout: float = STEP_SECONDS
    ready_step_seconds: float = READY_SECONDS
    dump_dir: Path | None = None
    about: Mapping[str, object] = field(default_factory=dict)


class StepHung(Exception):  # noqa: N818 - nothing was raised: that is the trouble
    """Error of a step whose launch or output took too long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"a step took longer than {seconds:g} s (--step-timeout)")


class StepRecord(NamedTuple):
    """Record of one step that the model thread has run."""

    began: float  # seconds on the engine's clock
    seconds: float
    num_requests: int
    num_tokens: int
    failure: str | None  # type name of the exception; None if the step succeeded


class Watchdog:
    """Watchdog that gives up a call of the model thread after ``seconds``; 0: no limit.

    The caller that waits for the call gets `StepHung`; the thread itself cannot be stopped. A timer
    runs while calls run. The watchdog counts the timer's ticks instead of comparing times: if the
    clock jumps or the machine is suspended, this counts as a single tick and ends no engine. The
    watchdog also records the latest calls. A `LaunchGuard` watches launches on the event loop and
    calls ``on_hung_launch`` in its thread.
    """

    def __init__(self, seconds: float, on_hung_launch: Callable[[], None] = lambda: None) -> None:
        self.records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        # time at which the running call, or the launch before it, began; None: neither runs
        self._began: float | None = None
        self._period = seconds / BEATS
        self._seconds = seconds
        self._job: Job[Any] | None = None  # the running job
        self._num_jobs = 0  # number of jobs watched so far
        self._seen = 0  # value of `_num_jobs` at the last tick
        self._num_beats = 0  # number of ticks since the first tick during this job
        self._timer: asyncio.TimerHandle | None = None
        self.launch_guard = LaunchGuard(seconds, on_hung_launch)
        self._has_hung = False  # whether a watched call took too long

    @property
    def gave_up(self) -> bool:
        """Whether a step took too long."""
        return self._has_hung or self.launch_guard.has_hung

    def begin_launch(self, now: float) -> None:
        """Begin to watch a step, which the event loop is about to launch itself."""
        if self._began is None:  # otherwise the preceding step is still under way
            self._began = now
        self.launch_guard.begin()

    def end_launch(self, error: BaseException | None = None) -> None:
        """Record that the launch ended, with ``error`` if it failed.

        Raises `StepHung`, caused by the error, if the launch took too long.
        """
        self.launch_guard.end()
        if self.launch_guard.has_hung:
            raise StepHung(self._seconds) from error

    def watch(self, job: Job[Any], now: float) -> None:
        """Begin to watch a call that was started on the running event loop."""
        self._job, self._began = job, now
        self._num_jobs += 1
        if self._timer is None and self._seconds > 0:
            self._arm(job.loop)

    def end(self, plan: StepPlan, now: float, failure: BaseException | None) -> None:
        """Record the end of the watched call, which computed ``plan``."""
        began, self._job, self._began = self._began, None, None
        if began is not None:
            kind = None if failure is None else type(failure).__name__
            counts = len(plan.requests), num_step_tokens(plan.requests)
            self.records.append(StepRecord(began, now - began, *counts, kind))

    def seconds_under_way(self, now: float) -> float:
        """Return the seconds since the running step began; 0 if no step is running."""
        return 0.0 if self._began is None else now - self._began

    def close(self) -> None:
        """Stop the timer and forget the watched call."""
        self._job = None
        self.launch_guard.close()
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
        self._has_hung = True
        job.end(None, StepHung(self._seconds))

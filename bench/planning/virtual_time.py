"""An event loop with a virtual clock, and threads whose calls take virtual time.

Waiting takes no real time: when nothing is ready, the clock moves on to the next timer. The planner
runs engines on it, and so do the simulations of the tests, which choose at random where asyncio
leaves the order open.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ...core.engine.model_thread import Job
from ...core.errors import EngineDead

T = TypeVar("T")
# Turns of the loop without any passing time, after which it counts as a busy loop.
MAX_TURNS_AT_ONCE = 5_000
Outcome = tuple[Any, BaseException | None]


class Stuck(AssertionError):  # noqa: N818 - a finding of simulations, as assertions are
    """A task waits for an event that can never happen."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop on which time passes at once when nothing else is ready.

    ``max_seconds``: virtual time after which `Stuck` is raised. ``errors`` collects the errors that
    asyncio would only log.
    """

    # These belong to asyncio's own implementation, which does not annotate them.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int
    _stopping: bool

    def __init__(self, max_seconds: float = float("inf")) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.num_turns = 0
        self._max_seconds = max_seconds
        self._now = 0.0
        self._turns_at_once = 0
        self.set_exception_handler(self._note_error)

    # -- what asyncio calls ---------------------------------------------------------------------

    def time(self) -> float:
        """Return virtual seconds."""
        return self._now

    def _write_to_self(self) -> None:
        """Do nothing: no other thread is waiting."""

    def _run_once(self) -> None:
        """Run one turn: let time pass, take the timers that are due, run the ready callbacks."""
        self.num_turns += 1
        self._pass_time()
        ready = [*self._ready, *self._due()]
        self._ready.clear()
        for handle in self._in_order(ready):
            if not handle.cancelled():
                self._run_handle(handle)

    def _in_order(self, ready: list[asyncio.Handle]) -> list[asyncio.Handle]:
        """Return the callbacks of a turn in the order in which they run."""
        return ready

    def _run_handle(self, handle: asyncio.Handle) -> None:
        handle._run()

    # -- time -----------------------------------------------------------------------------------

    def _pass_time(self) -> None:
        when = self._next_timer()
        if not self._ready and not self._stopping:
            if when is None:
                raise Stuck(f"nothing is ready and nothing is scheduled\n{self.state()}")
            self._move_to(when)
            return
        self._turns_at_once += 1
        if self._turns_at_once > MAX_TURNS_AT_ONCE:
            raise Stuck(f"the loop is busy, but no time passes\n{self.state()}")

    def _move_to(self, when: float) -> None:
        if when > self._now:
            self._now, self._turns_at_once = when, 0
        if self._now > self._max_seconds:
            raise Stuck(f"a task is still waiting after {self._now:.0f} s\n{self.state()}")

    def _next_timer(self) -> float | None:
        while self._scheduled and self._scheduled[0].cancelled():
            self._timer_cancelled_count -= 1
            heapq.heappop(self._scheduled)._scheduled = False  # type: ignore[attr-defined]
        return self._scheduled[0].when() if self._scheduled else None

    def _due(self) -> list[asyncio.TimerHandle]:
        """Return the timers that are due, ordered by time; `_tie` orders equal times."""
        due: list[tuple[float, float, int, asyncio.TimerHandle]] = []
        while (when := self._next_timer()) is not None and when <= self._now:
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False  # type: ignore[attr-defined]
            due.append((when, self._tie(), len(due), handle))
        return [handle for *_, handle in sorted(due)]

    def _tie(self) -> float:
        """Return the sort key of timers that are due at the same time."""
        return 0.0

    # -- what went wrong ------------------------------------------------------------------------

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def state(self) -> str:
        """Describe the place at which every task is suspended."""
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        lines = [f"at {self._now:.3f} s, turn {self.num_turns}"]
        return "\n".join(lines + [f"  {task.get_name()}: {_place(task)}" for task in tasks])

    def end(self) -> None:
        """Cancel the remaining tasks, ignore their errors, and close."""
        try:
            for _ in range(3):
                if left := asyncio.all_tasks(self):
                    self._turns_at_once = 0
                    for task in left:
                        task.cancel()
                    self.call_later(60.0, self.stop)
                    self.run_forever()
        except Stuck:
            pass  # The caller has this error already, or no longer needs it.
        finally:
            self.close()


def _place(task: asyncio.Task[Any]) -> str:
    """Return the frames in which a task is suspended, innermost first."""
    frames: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return " < ".join(reversed(frames))


L = TypeVar("L", bound=VirtualLoop)


def run_on(loop: L, main: Callable[[L], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` to its end without waiting, and return its result.

    Raises its errors, and `Stuck` if tasks are left or asyncio has logged an error.
    """
    try:
        result = loop.run_until_complete(main(loop))
        loop.run_until_complete(loop.shutdown_asyncgens())
        if left := asyncio.all_tasks(loop):
            raise Stuck(f"tasks have not ended: {left}")
        if loop.errors:
            raise Stuck(f"the loop has logged errors: {loop.errors}")
        return result
    finally:
        loop.end()


class VirtualThread:
    """A `StepThread` without a thread: calls run on the loop and end later, one by one.

    A call is computed when it begins, and ends after the virtual seconds that it spent (`spend`).
    `time` is the clock inside the call.
    """

    def __init__(self, on_thread_start: Callable[[], None] = lambda: None) -> None:
        self.is_closed = False
        self._queue: deque[Job[Any]] = deque()  # The first job is running.
        self._spent = 0.0  # Seconds spent by the running call.
        on_thread_start()

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Begin a call. Raises `EngineDead` once closed."""
        if self.is_closed:
            raise EngineDead("the engine was closed")
        job = Job(work)
        self._queue.append(job)
        if len(self._queue) == 1:
            self._begin()
        return job

    def close(self) -> None:
        """Accept no more calls."""
        self.is_closed = True

    def spend(self, seconds: float) -> None:
        """Make the running call take ``seconds`` longer."""
        self._spent += seconds

    def time(self) -> float:
        """Return virtual seconds as the running call sees them."""
        return asyncio.get_running_loop().time() + self._spent

    def _begin(self) -> None:
        job = self._queue[0]
        outcome = outcome_of(job.work)
        seconds, self._spent = self._spent, 0.0
        job.loop.call_later(seconds, self._end, job, outcome)

    def _end(self, job: Job[Any], outcome: Outcome) -> None:
        self._queue.popleft()
        if self._queue:
            self._begin()
        job.end(*outcome)


def outcome_of(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Run a call and return its result and its error."""
    try:
        return work(), None
    except BaseException as failure:  # The error is raised at the waiting caller.
        return None, failure

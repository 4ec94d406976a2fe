"""The model thread of a simulation: a step runs inline and ends a random virtual time later."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from foretoken.core.engine.model_thread import Job
from foretoken.core.engine.step_executor import InFlightStep
from foretoken.core.errors import EngineDead
from foretoken.core.interface.plan import StepPlan

from .loop import SimulatedLoop

T = TypeVar("T")
HANGS = -1.0  # seconds


class SimulatedThread:
    """A `StepThread` that owns no thread.

    ``seconds`` tells how long each call takes, or `HANGS`, which only steps do: nobody watches the
    warm-up. A call computes at its beginning or at its end, by lot: either way, what it was lent
    must not change until then. Calls follow each other: one begins when the one before has ended.
    """

    def __init__(
        self,
        rng: random.Random,
        seconds: Callable[[], float],
        on_change: Callable[[str], None],
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_calls = 0
        self.is_closed = False
        self.under_way = 0
        self._queue: deque[Job[Any]] = deque()  # the first one is under way
        self._rng = rng
        self._seconds = seconds
        self._on_change = on_change
        on_thread_start()

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Begin a call. Raises `EngineDead` once closed."""
        if self.is_closed:
            raise EngineDead("the engine was closed")
        if self.under_way == 3:  # a step, the one made ahead, one that was withdrawn before them
            self._on_change("four calls are under way in the one model thread")
        self.num_calls += 1
        self.under_way += 1
        job = Job(work)
        self._queue.append(job)
        if self.under_way == 1:
            self._begin()
        return job

    def close(self) -> None:
        """Begin nothing more."""
        self.is_closed = True

    def _begin(self) -> None:
        job, seconds = self._queue[0], self._seconds()
        outcome = _outcome(job.work) if self._rng.random() < 0.5 else None
        if seconds != HANGS or not _plans(job.work):
            loop = job.loop
            assert isinstance(loop, SimulatedLoop)
            loop.call_later(max(0.0, seconds), self._end, job, outcome, _lent(job.work))

    def _end(self, job: Job[Any], outcome: tuple[Any, Any] | None, lent: list[Any]) -> None:
        self.under_way -= 1
        self._queue.popleft()
        outcome = outcome or _outcome(job.work)
        if _lent(job.work) != lent:
            self._on_change("what a step was lent changed while it ran")
        if self._queue:
            self._begin()
        job.end(*outcome)


def _outcome(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as failure:  # raised where it is waited for
        return None, failure


def _lent(work: Callable[[], Any]) -> list[Any]:
    """A copy of the arrays that a plan lends to the thread; of one made ahead, the page tables."""
    return [
        (None if row.is_ahead else row.tokens[:], row.page_ids[:])
        for plan in _plans(work)
        for row in plan.requests
    ]


def _plans(work: Callable[[], Any]) -> list[StepPlan]:
    owner = getattr(work, "__self__", None)
    args = (owner.plan,) if isinstance(owner, InFlightStep) else getattr(work, "args", ())
    return [arg for arg in args if isinstance(arg, StepPlan)]

"""The model thread of a simulation: a step runs inline and ends a random virtual time later."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

from foretoken.bench.planning.virtual_time import VirtualThread, outcome_of
from foretoken.core.engine.model_thread import Job
from foretoken.core.engine.step_executor import InFlightStep
from foretoken.core.interface.plan import StepPlan

T = TypeVar("T")
HANGS = -1.0  # seconds


class SimulatedThread(VirtualThread):
    """A virtual thread whose calls take a time that ``seconds`` tells.

    Or `HANGS`, which only steps do: nobody watches the warm-up. A call computes at its beginning or
    at its end, by lot: either way, what it was lent must not change until then.
    """

    def __init__(
        self,
        rng: random.Random,
        seconds: Callable[[], float],
        on_change: Callable[[str], None],
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(on_thread_start)
        self.num_calls = 0
        self.under_way = 0
        self._rng = rng
        self._seconds = seconds
        self._on_change = on_change

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Begin a call. Raises `EngineDead` once closed."""
        if self.under_way == 2:  # a step, and one that a cancelled engine no longer waits for
            self._on_change("three calls are under way in the one model thread")
        self.num_calls += not self.is_closed
        self.under_way += not self.is_closed
        return super().start(work)

    def _begin(self) -> None:
        job, seconds = self._queue[0], self._seconds()
        outcome = outcome_of(job.work) if self._rng.random() < 0.5 else None
        if seconds != HANGS or not _plans(job.work):
            job.loop.call_later(max(0.0, seconds), self._end, job, outcome, _lent(job.work))

    def _end(self, job: Job[Any], outcome: tuple[Any, Any] | None, lent: list[Any]) -> None:
        self.under_way -= 1
        self._queue.popleft()
        outcome = outcome or outcome_of(job.work)
        if _lent(job.work) != lent:
            self._on_change("what a step was lent changed while it ran")
        if self._queue:
            self._begin()
        job.end(*outcome)


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

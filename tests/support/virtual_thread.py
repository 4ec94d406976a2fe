"""A model thread in virtual time, and runners on the model of hashes that steps overlap in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from foretoken.core.engine.model_thread import Job
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.protocols import OnKernelsStarted, Pending, ignore_kernels
from support.fake_model import Drafter, FakeRunner, no_draft
from support.launch_behind import Finished

Seconds = Callable[[], float | None]


def a_second() -> float:
    return 1.0


class OneByOne:
    """A `StepThread`: a call computes when it begins and ends ``seconds()`` later, None: never.

    The next one begins at once, before anybody is told of the end, as in a thread.
    """

    def __init__(self, seconds: Seconds = a_second) -> None:
        self.num_begun = 0
        self._seconds = seconds
        self._jobs: deque[Job[Any]] = deque()

    def start(self, work: Callable[[], Any]) -> Job[Any]:
        self._jobs.append(job := Job(work))
        if len(self._jobs) == 1:
            self._begin()
        return job

    def close(self) -> None: ...

    def _begin(self) -> None:
        job = self._jobs[0]
        self.num_begun += 1
        outcome = _outcome(job.work)
        seconds = self._seconds()
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, self._end, job, *outcome)

    def _end(self, job: Job[Any], result: object, failure: BaseException | None) -> None:
        self._jobs.popleft()
        if self._jobs:
            self._begin()
        job.end(result, failure)


def _outcome(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except BaseException as failure:
        return None, failure


class Ahead(FakeRunner):
    """Counts the steps whose plan was made ahead. ``fault``: what a step raises, if anything."""

    def __init__(
        self,
        fault: Callable[[StepPlan], Exception | None] = lambda plan: None,
        *,
        drafter: Drafter = no_draft,
    ) -> None:
        super().__init__(4, drafter)
        self.fault = fault
        self.ahead: list[StepPlan] = []

    @property
    def num_ahead(self) -> int:
        return len(self.ahead)

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        failure = self.fault(plan)
        if failure is not None:
            raise failure
        if any(row.is_ahead for row in plan.requests):
            self.ahead.append(plan)
        return super().launch(plan, after, on_kernels_started)


class Launching(Ahead):
    """Computes as soon as it is asked for a step, and tells of it when that is waited for.

    ``is_late``: of a fault, too. ``calls`` tells in which order it was asked.
    """

    is_async = True

    def __init__(
        self,
        fault: Callable[[StepPlan], Exception | None] = lambda plan: None,
        *,
        is_late: bool = False,
        drafter: Drafter = no_draft,
    ) -> None:
        super().__init__(fault, drafter=drafter)
        self.calls: list[str] = []
        self._is_late = is_late

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Told:
        self.calls.append("launch")
        if isinstance(after, Told) and isinstance(after.outcome, Exception):
            return Told(after.outcome, self.calls)
        before = None if after is None else Finished(after.outcome)  # type: ignore[attr-defined]
        try:
            return Told(super().launch(plan, before, on_kernels_started).finish(), self.calls)
        except RuntimeError as failure:
            if not self._is_late:
                raise
            return Told(failure, self.calls)


class Told:
    """A step that was launched."""

    def __init__(self, outcome: StepOutput | Exception, calls: list[str]) -> None:
        self.outcome, self._calls = outcome, calls

    def finish(self) -> StepOutput:
        self._calls.append("finish")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

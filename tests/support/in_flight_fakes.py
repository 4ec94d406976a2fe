"""Flights of a plan or two, over runners that answer what they are told to."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.engine.model_thread import Job, StepThread
from foretoken.core.engine.step_executor import InFlightStep
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import OnKernelsStarted, Pending, ignore_kernels
from foretoken.core.interface.sampling import SamplingMetadata

PROMPT = array("q", [7, 8, 9])
SAMPLING = SamplingMetadata(params=SamplingParams(), seed=0, prompt_len=3)
FAILED = RuntimeError("the forward pass failed")


def plan_of(names: str, num_ahead: int = 0) -> StepPlan:
    """A step of so many tokens behind the prompt; all but that of the first are told later."""
    stop = len(PROMPT) + num_ahead
    rows = [
        ScheduledRequest(
            request_id=name,
            tokens=PROMPT + array("q", [0] * (num_ahead - 1)) if num_ahead else PROMPT,
            start=stop - 1,
            stop=stop,
            page_ids=array("q", [0]),
            sampling=SAMPLING,
            is_ahead=num_ahead > 0,
        )
        for name in names
    ]
    return StepPlan(requests=rows, newly_allocated_pages=array("q"), is_plain=True)


def yields(**tokens: int) -> StepOutput:
    """A token for each of these, an error for who has 0."""
    rows = [
        RequestOutput(request_id=name, token_ids=(token,))
        if token
        else RequestOutput(request_id=name, error="not finite")
        for name, token in tokens.items()
    ]
    return StepOutput(requests=rows, num_rows=len(rows))


class Launch:
    def __init__(self, device: Device, number: int, outcome: StepOutput | Exception) -> None:
        self._device, self._number, self._outcome = device, number, outcome

    def finish(self) -> StepOutput:
        self._device.calls.append(f"finish {self._number}")
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Device:
    """Launches, and keeps the order of the calls. ``refuses``: what launch number n raises."""

    is_async = True

    def __init__(
        self, *outcomes: StepOutput | Exception, refuses: dict[int, BaseException] | None = None
    ) -> None:
        self.calls: list[str] = []
        self.befores: list[object] = []
        self.launched: list[Launch] = []
        self._outcomes, self._refuses = outcomes, refuses or {}

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Launch:
        number = len(self.befores)
        self.calls.append(f"launch {number}")
        self.befores.append(after)
        if number in self._refuses:
            raise self._refuses[number]
        self.launched.append(Launch(self, number, self._outcomes[number]))
        return self.launched[-1]


class Hand:
    """A thread that makes its next call when it is told to."""

    def __init__(self) -> None:
        self.jobs: deque[Job[Any]] = deque()

    def start(self, work: Callable[[], Any]) -> Job[Any]:
        self.jobs.append(job := Job(work))
        return job

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            job = self.jobs.popleft()
            try:
                job.end(job.work(), None)
            except BaseException as failure:
                job.end(None, failure)

    def close(self) -> None: ...


def chain(runner: Any, thread: StepThread, *names: str) -> list[InFlightStep]:
    """Start one step behind the other."""
    flights: list[InFlightStep] = []
    for number, each in enumerate(names):
        after = flights[-1].launched if flights else None
        plan = plan_of(each, number)
        flights.append(InFlightStep(plan, runner, 0.0, ignore_kernels, launches_here=True))
        flights[-1].start(thread, after)
    return flights


def tokens_of(output: StepOutput) -> dict[str, list[int]]:
    return {row.request_id: list(row.token_ids) for row in output.requests}


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())

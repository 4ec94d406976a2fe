"""StepExecutor: lets a plan be computed, commits its outcome and handles failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ..errors import ForetokenError, is_out_of_memory
from ..interface.output import StepOutput
from ..interface.plan import StepPlan
from ..interface.protocols import OnKernelsStarted, Pending, StepRunner
from ..scheduling.async_scheduling import plan_next, replan
from ..scheduling.scheduler import Event, Scheduler
from ..telemetry.metrics import EngineMetrics
from .model_thread import Job, StepHung, StepThread, Watchdog
from .step_bisection import (
    StepBisection,
    drafts,
    forget_frames,
    may_have_lost_model,
)

logger = logging.getLogger(__name__)
MAX_FRUITLESS_STEPS = 3  # consecutive steps without a successful part before the model is checked
OnEvents = Callable[[list[Event]], None]


class OverlapWork:
    """Runner of the event loop's own work while the model thread computes a step.

    Only one thread at a time can hold Python's global lock. When a step begins, the model thread
    needs the lock to launch kernels, and work on the event loop would delay the step. So a large
    amount of work (``is_much``) waits for `kernels_started`. A small amount is done at once,
    because waking the event loop again would cost more. Nor does the work wait behind a step that
    the event loop launched itself. ``work`` is called once for each step, before the step ends. All
    methods except `kernels_started` are called on the event loop.
    """

    def __init__(self, work: Callable[[], None], is_much: Callable[[], bool]) -> None:
        self._work, self._is_much = work, is_much
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_due = False
        self._has_entered = False  # whether the kernels of the step have started
        self._error: BaseException | None = None  # error of `work`, for `finish` to raise

    def begin(self, *, is_notified: bool) -> None:
        """Begin a step. ``is_notified``: `kernels_started` was or will be called for the step."""
        is_late, self._has_entered = self._has_entered, False
        if is_notified and not is_late and self._is_much():
            self._loop, self._is_due = asyncio.get_running_loop(), True
        else:
            self._work()

    def kernels_started(self) -> None:
        """Record that the step's kernels start; the thread that launches the step calls this."""
        self._has_entered = True  # the event loop may call `begin` only after this
        if self._is_due and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._run_late)

    def _run_late(self) -> None:
        try:
            self.finish()
        except BaseException as error:  # `finish` raises it again at the end of the step
            self._error = error

    def finish(self) -> None:
        """End a step: do the work now if it is still due. Raises any error of the work."""
        self._has_entered = False
        if self._is_due:
            self._is_due = False
            self._work()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def cancel(self) -> None:
        """Drop work that was not done yet, because the step failed."""
        self._is_due, self._has_entered, self._error = False, False, None


def is_launched_at_once(plan: StepPlan, runner: StepRunner) -> bool:
    """Whether the launch of a plan is short and never waits for the device."""
    return runner.is_async and plan.is_short


class InFlightStep:
    """A step that is being computed, from its launch to its output.

    With ``launches_here`` the event loop itself launches the step, and the model thread only waits
    for the output: for a short launch, waking the thread and handing Python's lock over would take
    longer than the launch. Otherwise everything happens in the model thread.
    """

    def __init__(
        self,
        plan: StepPlan,
        runner: StepRunner,
        began: float,
        on_kernels_started: OnKernelsStarted,
        *,
        launches_here: bool = False,
        is_ahead: bool = False,
    ) -> None:
        self.plan = plan
        self.began = began  # seconds on the engine's clock
        self.is_ahead = is_ahead  # whether the preceding step was not over when it was planned
        self.launched: Pending | None = None  # the step, once the event loop has launched it
        self._runner = runner
        self._on_kernels_started = on_kernels_started
        self.launches_here = launches_here
        self._job: Job[StepOutput] | None = None
        self.launch_error: BaseException | None = None  # raised by a launch on the event loop

    def start(self, thread: StepThread, after: Pending | None = None) -> None:
        """Launch the step, or begin it in ``thread``.

        ``after``: the preceding step, which chooses the last token of each request on the device.
        An error of the launch is raised where the output is waited for.
        """
        if not self.launches_here:
            self._job = thread.start(self._run)
            return
        try:
            self.launched = self._runner.launch(self.plan, after, self._on_kernels_started)
        except BaseException as error:  # `_finish` raises it
            self.launch_error = error

    def outcome(self, thread: StepThread) -> Job[StepOutput]:
        """Return the call in ``thread`` whose result is the step's output."""
        if self._job is None:
            self._job = thread.start(self._finish)
        return self._job

    def _run(self) -> StepOutput:
        return self._runner.launch(self.plan, None, self._on_kernels_started).finish()

    def _finish(self) -> StepOutput:
        if self.launch_error is not None:
            raise self.launch_error
        assert self.launched is not None
        return self.launched.finish()


class StepExecutor:
    """Executor of an engine's steps, which launches the next step early if it can be planned.

    ``on_events`` gets the events of each commit. ``overlap_work`` runs while the thread computes.
    ``overlap``: whether a step may be launched before the preceding step is committed, if
    `StepRunner.is_async` is true for the runner. A step that raises an error is run again in parts,
    and only the requests whose parts fail are ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        thread: StepThread,
        watchdog: Watchdog,
        *,
        on_events: OnEvents,
        overlap_work: OverlapWork,
        clock: Callable[[], float],
        overlap: bool = False,
    ) -> None:
        self.num_failed_steps = 0  # number of runs, of steps or of parts, that raised an error
        self.num_bisections = 0  # number of steps that were run again in parts
        self._scheduler, self._metrics = scheduler, metrics
        self._thread, self._watchdog = thread, watchdog
        self._on_events, self._clock = on_events, clock
        self._overlap_work = overlap_work
        self._overlap = overlap
        self._next: InFlightStep | None = None  # the step that was planned and started ahead
        self._ended = 0.0  # time at which the last run ended
        self._num_fruitless = 0  # number of consecutive steps without a successful part

    @property
    def planned_ahead(self) -> StepPlan | None:
        """Plan of the step that was started ahead of its turn, or None."""
        return None if self._next is None else self._next.plan

    def launches_here(self, runner: StepRunner) -> bool:
        """Whether the event loop itself makes short launches."""
        return self._overlap and runner.is_async

    async def step(self, plan: StepPlan, runner: StepRunner) -> StepOutput | None:
        """Compute and commit a plan, and return the output; None if the plan was run in parts.

        Raises `StepHung`. Raises the step's error if no part succeeded and a dummy step fails, too;
        the dummy step is run after the third such step in a row, or if the GPU or a rank is lost.
        """
        in_flight, self._next = self._next, None
        if in_flight is None:
            in_flight = self._start(plan, runner)
        self._start_next(in_flight, runner)
        output = await self._run(in_flight)
        if isinstance(output, Exception):
            await self._abandon_next()
            plan = replan(self._scheduler, in_flight.plan) if in_flight.is_ahead else plan
            if plan.requests:
                await self._recover(plan, runner, output)
            else:  # the next plan needs its ids and pages, which the runner may not have read
                self._scheduler.discard_plan(plan)
            return None
        self._num_fruitless = 0
        return output

    def _start(self, plan: StepPlan, runner: StepRunner) -> InFlightStep:
        in_flight = InFlightStep(
            plan,
            runner,
            self._clock(),
            self._overlap_work.kernels_started,
            launches_here=self._overlap and is_launched_at_once(plan, runner),
        )
        self._launch(in_flight)
        return in_flight

    def _launch(self, in_flight: InFlightStep, after: Pending | None = None) -> None:
        """Start a step. Raises `StepHung` if its launch on the event loop took too long."""
        if not in_flight.launches_here:
            in_flight.start(self._thread, after)
            return
        self._watchdog.begin_launch(in_flight.began)
        in_flight.start(self._thread, after)
        self._watchdog.end_launch(in_flight.launch_error)

    def _start_next(self, in_flight: InFlightStep, runner: StepRunner) -> None:
        """Launch the step after ``in_flight``, if it can be planned before that step is over."""
        after = in_flight.launched
        if after is None:
            return
        plan = plan_next(self._scheduler, in_flight.plan, self._clock())
        if plan is not None:
            self._next = InFlightStep(
                plan,
                runner,
                self._clock(),
                self._overlap_work.kernels_started,
                launches_here=True,
                is_ahead=True,
            )
            self._launch(self._next, after)

    async def _abandon_next(self) -> None:
        """Discard the step that was launched after the failed step."""
        in_flight = self._next
        if in_flight is not None:
            output = await self._compute(in_flight, self._clock())  # a launched step must end first
            if isinstance(output, Exception):
                forget_frames(output)
            self._next = None
            self._scheduler.discard_plan(in_flight.plan)

    async def _run(self, in_flight: InFlightStep) -> StepOutput | Exception:
        began = max(in_flight.began, self._ended)
        output = await self._compute(in_flight, began)
        if not isinstance(output, Exception):
            plan, self._ended = in_flight.plan, self._clock()
            self._on_events(self._scheduler.commit(plan, output, self._ended))
            self._metrics.observe_step(
                plan,
                output,
                began=began,
                computed=self._ended,
                ended=self._clock(),
                is_ahead=in_flight.is_ahead,
            )
        return output

    async def _compute(self, in_flight: InFlightStep, began: float) -> StepOutput | Exception:
        job = in_flight.outcome(self._thread)
        self._watchdog.watch(job, began)
        try:
            try:  # the kernels of a step that was started ahead may run already
                self._overlap_work.begin(is_notified=not in_flight.is_ahead)
            finally:
                # Requests must not change while the model thread reads them.
                output = await self._outcome(job, in_flight.plan)
        except BaseException:
            self._overlap_work.cancel()
            raise
        self._overlap_work.finish()
        return output

    async def _outcome(self, job: Job[StepOutput], plan: StepPlan) -> StepOutput | Exception:
        failure: BaseException | None = None
        try:
            return await job.result()
        except StepHung as hung:
            failure = hung
            raise
        except Exception as raised:
            failure = raised
            self.num_failed_steps += 1
            return raised
        finally:
            self._watchdog.end(plan, self._clock(), failure)

    async def _recover(self, plan: StepPlan, runner: StepRunner, failure: Exception) -> None:
        self.num_bisections += 1
        logger.error("a step failed and is run again in smaller parts", exc_info=failure)
        if is_out_of_memory(failure):
            self._scheduler.shrink_chunks(plan)
        forget_frames(failure)
        bisection = StepBisection(plan, failure)
        while (part := bisection.next()) is not None:
            output = await self._run(self._start(part, runner))
            if isinstance(output, Exception):
                forget_frames(output)
                bisection.failed(part, output)
            else:
                bisection.passed()
        self._scheduler.credit_unfinished(plan)
        self._num_fruitless = 0 if bisection.num_passed else self._num_fruitless + 1
        lost = may_have_lost_model(bisection.failure) and not bisection.num_passed
        if lost or self._num_fruitless >= MAX_FRUITLESS_STEPS:
            await self._check_health(bisection, runner)
        is_left_out = bool(bisection.failing_requests or bisection.left_out)
        with_drafts = any(map(drafts, plan.requests))
        if with_drafts and not is_left_out:
            self._scheduler.speculator.broke_step()
        self._fail_requests(bisection, with_drafts=with_drafts)

    async def _check_health(self, bisection: StepBisection, runner: StepRunner) -> None:
        """Raise the latest error of the failed step, unless a dummy step succeeds.

        If the dummy step succeeds, the model works, and the failing requests caused the failures.
        If it fails, the model is lost, and no request is blamed.
        """
        plan = bisection.health_check(self._scheduler.cache.page_size)
        in_flight = self._start(plan, runner)
        if isinstance(await self._compute(in_flight, in_flight.began), Exception):
            raise bisection.failure
        self._num_fruitless = 0

    def _fail_requests(self, bisection: StepBisection, *, with_drafts: bool) -> None:
        request_ids = [scheduled.request_id for scheduled in bisection.failing_requests]
        logger.error(
            "%d parts of the failed step succeeded; these requests end with an error: %s",
            bisection.num_passed,
            request_ids,
        )
        now, failed = self._clock(), ForetokenError("the model failed in a step of this request")
        self._on_events(self._scheduler.fail(bisection.failing_plan(), now, failed))
        if bisection.left_out:
            self._on_events(
                self._scheduler.take_back_chunks(
                    bisection.left_out_plan(),
                    now,
                    failed,
                    is_explained=bisection.is_explained,
                    with_drafts=with_drafts,
                )
            )

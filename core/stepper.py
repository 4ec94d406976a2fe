"""Stepper: has a plan computed in the model thread and commits it, whatever that thread does."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .ahead import plan_ahead, replan
from .dump import StepLog
from .errors import ForetokenError
from .flight import Flight
from .launch import Grounded, StepRunner
from .metrics import EngineMetrics
from .model_thread import Job, StepThread
from .recovery import Retrial, drafts, forget_frames, is_out_of_memory, may_have_lost_gpu
from .scheduler import Event, Scheduler
from .shadow import Shadow
from .step import StepOutput, StepPlan
from .watchdog import StepHung, Watchdog

logger = logging.getLogger(__name__)
MAX_FAILURES = 3  # of steps of which nothing came through, in a row
Tell = Callable[[list[Event]], None]


class Stepper:
    """One step at a time, on behalf of an engine's loop, and the next one ahead if it is known.

    ``tell`` takes the events of what was committed; ``shadow`` works while the thread computes.
    ``overlap``: whether a step may be given to the thread before the one ahead of it is committed.
    The rows of a step that raises are run again in parts: those that fail by themselves end, the
    others never know.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        thread: StepThread,
        watchdog: Watchdog,
        *,
        tell: Tell,
        shadow: Shadow,
        clock: Callable[[], float],
        overlap: bool = False,
    ) -> None:
        self.log = StepLog()
        self.num_failed_steps = 0  # runs that raised
        self.num_bisections = 0  # steps that were run again in parts
        self._scheduler, self._metrics = scheduler, metrics
        self._thread, self._watchdog = thread, watchdog
        self._tell, self._clock = tell, clock
        self._shadow = shadow
        self._overlap = overlap
        self._ahead: Flight | None = None  # of a plan made ahead
        self._ended = 0.0  # when the last run did, on the clock
        self._num_failures = 0  # of steps of which nothing came through, in a row

    @property
    def under_way(self) -> StepPlan | None:
        """The plan that was made ahead, if there is one: the next to be stepped."""
        return None if self._ahead is None else self._ahead.plan

    def withdraw(self) -> None:
        """Somebody came: compute no step without them, if the thread has not come to it yet."""
        if self._ahead is not None and self._ahead.withdraw():
            self._drop()

    async def step(self, plan: StepPlan, runner: StepRunner) -> StepOutput | None:
        """Compute and commit a plan; None where that took several runs.

        Raises `StepHung`, and what the step raised where nothing came through for the third time
        in a row, and nothing else does either.
        """
        flight, self._ahead = self._ahead, None
        if flight is None:
            flight = self._start(plan, runner)
        self._go_ahead(flight, runner)
        output = await self._run(flight)
        if isinstance(output, Exception):
            await self._abandon()
            plan = replan(self._scheduler, flight.plan) if flight.is_ahead else plan
            if plan.rows:
                await self._recover(plan, runner, output)
            else:  # what it had to tell may not have been told
                self._scheduler.drop(plan)
            return None
        self._num_failures = 0
        return output

    def _start(self, plan: StepPlan, runner: StepRunner, after: Flight | None = None) -> Flight:
        splits = self._overlap and runner.launches
        announce = self._shadow.enter
        flight = Flight(plan, runner, self._clock(), announce, after=after, splits=splits)
        flight.start(self._thread)
        return flight

    def _go_ahead(self, flight: Flight, runner: StepRunner) -> None:
        plan = plan_ahead(self._scheduler, flight.plan, self._clock()) if self._overlap else None
        if plan is not None:
            self._ahead = self._start(plan, runner, after=flight)

    async def _abandon(self) -> None:
        """What was to follow a step that failed is not computed."""
        flight = self._ahead
        if flight is not None:
            output = await self._compute(flight, self._clock())  # to its end
            if isinstance(output, Exception):
                forget_frames(output)
            self._drop()

    def _drop(self) -> None:
        flight, self._ahead = self._ahead, None
        if flight is not None:
            self._scheduler.drop(flight.plan)

    async def _run(self, flight: Flight) -> StepOutput | Exception:
        began = max(flight.began, self._ended)
        output = await self._compute(flight, began)
        if not isinstance(output, Exception):
            plan, self._ended = flight.plan, self._clock()
            self._tell(self._scheduler.commit(plan, output, self._ended))
            self._metrics.observe_step(
                plan,
                output,
                began=began,
                computed=self._ended,
                ended=self._clock(),
                is_ahead=flight.is_ahead,
            )
        return output

    async def _compute(self, flight: Flight, began: float) -> StepOutput | Exception:
        job = flight.outcome(self._thread)
        self.log.begin(began)
        self._watchdog.watch(job)
        try:
            try:  # at a step made ahead the thread is already
                self._shadow.begin(is_told=not flight.is_ahead)
            finally:
                output = await self._outcome(job, flight.plan)  # requests must not change under it
        except BaseException:
            self._shadow.cancel()
            raise
        self._shadow.finish()
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
            self.num_failed_steps += not isinstance(raised, Grounded)
            return raised
        finally:
            self._watchdog.rest()
            self.log.end(plan, self._clock(), failure)

    async def _recover(self, plan: StepPlan, runner: StepRunner, failure: Exception) -> None:
        self.num_bisections += 1
        logger.error("a step failed; it is run again in parts", exc_info=failure)
        if is_out_of_memory(failure):
            self._scheduler.ease(plan)
        forget_frames(failure)
        retrial = Retrial(plan, failure)
        while (part := retrial.next()) is not None:
            output = await self._run(self._start(part, runner))
            if isinstance(output, Exception):
                forget_frames(output)
                retrial.failed(part, output)
            else:
                retrial.passed()
        self._scheduler.settle(plan)
        self._num_failures = 0 if retrial.num_passed else self._num_failures + 1
        lost = may_have_lost_gpu(retrial.failure) and not retrial.num_passed
        if lost or self._num_failures == MAX_FAILURES:
            await self._probe(retrial, runner)
        if any(map(drafts, plan.rows)) and not retrial.culprits:
            self._scheduler.speculator.broke_step()
        self._blame(retrial)

    async def _probe(self, retrial: Retrial, runner: StepRunner) -> None:
        """Raise the failure, unless a step of nobody's comes through.

        Then the model is well: each of these steps was of requests that fail by themselves, as one
        that is asked again and again. A GPU that is lost fails all alike: nobody is blamed for it.
        """
        plan = retrial.probe(self._scheduler.cache.page_size)
        flight = self._start(plan, runner)
        if isinstance(await self._compute(flight, flight.began), Exception):
            raise retrial.failure
        self._num_failures = 0

    def _blame(self, retrial: Retrial) -> None:
        culprits = [row.request_id for row in retrial.culprits]
        logger.error("of a failed step %d parts came through; %s end", retrial.num_passed, culprits)
        failed = ForetokenError("the model failed at a step of this request")
        self._tell(self._scheduler.fail(retrial.blamed(), self._clock(), failed))

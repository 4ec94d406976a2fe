"""Stepper: has a plan computed in the model thread and commits it, whatever that thread does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from .dump import StepLog
from .errors import ForetokenError
from .metrics import EngineMetrics
from .model_thread import Job, StepThread
from .recovery import Retrial, drafts, forget_frames, is_out_of_memory, may_have_lost_gpu
from .scheduler import Event, Scheduler
from .step import StepOutput, StepPlan
from .watchdog import StepHung, Watchdog

logger = logging.getLogger(__name__)
MAX_FAILURES = 3  # of steps of which nothing came through, in a row
Tell = Callable[[list[Event]], None]


class StepRunner(Protocol):
    """What the model thread runs."""

    def step(self, plan: StepPlan) -> StepOutput:
        """Compute one ragged batch; blocking."""


class Stepper:
    """One step at a time, on behalf of an engine's loop.

    ``tell`` takes the events of what was committed; ``meanwhile`` is called while the thread
    computes. The rows of a step that raises are run again in parts: those that fail by themselves
    end, the others never know.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        thread: StepThread,
        watchdog: Watchdog,
        *,
        tell: Tell,
        meanwhile: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.log = StepLog()
        self.num_failed_steps = 0  # runs that raised
        self.num_bisections = 0  # steps that were run again in parts
        self._scheduler, self._metrics = scheduler, metrics
        self._thread, self._watchdog = thread, watchdog
        self._tell, self._meanwhile, self._clock = tell, meanwhile, clock
        self._num_failures = 0  # of steps of which nothing came through, in a row

    async def step(self, plan: StepPlan, runner: StepRunner) -> StepOutput | None:
        """Compute and commit a plan; None where that took several runs.

        Raises `StepHung`, and what the step raised where nothing came through for the third time
        in a row, and nothing else does either.
        """
        output = await self._run(plan, runner)
        if isinstance(output, Exception):
            await self._recover(plan, runner, output)
            return None
        self._num_failures = 0
        return output

    async def _run(self, plan: StepPlan, runner: StepRunner) -> StepOutput | Exception:
        began = self._clock()
        output = await self._compute(plan, runner, began)
        if not isinstance(output, Exception):
            now = self._clock()
            self._tell(self._scheduler.commit(plan, output, now))
            self._metrics.observe_step(plan, output, began=began, computed=now, ended=self._clock())
        return output

    async def _compute(
        self, plan: StepPlan, runner: StepRunner, began: float
    ) -> StepOutput | Exception:
        job = self._thread.start(partial(runner.step, plan))
        self.log.begin(began)
        self._watchdog.watch(job)
        try:
            self._meanwhile()
        finally:
            output = await self._outcome(job, plan)  # requests must not change under it
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
            output = await self._run(part, runner)
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
        if isinstance(await self._compute(plan, runner, self._clock()), Exception):
            raise retrial.failure
        self._num_failures = 0

    def _blame(self, retrial: Retrial) -> None:
        culprits = [row.request_id for row in retrial.culprits]
        logger.error("of a failed step %d parts came through; %s end", retrial.num_passed, culprits)
        failed = ForetokenError("the model failed at a step of this request")
        self._tell(self._scheduler.fail(retrial.blamed(), self._clock(), failed))

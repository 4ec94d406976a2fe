"""Engine: the asyncio loop between callers and the model thread.

One loop, one model thread. The loop's task alone changes requests and the cache, and it is
suspended while the model thread runs a step; callers only append to the inbox and read streams.
So there are no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import Callable

from .audit import Auditor, Verdict
from .dump import Report, make_report, write_report
from .errors import EngineDead, InvalidRequest, QueueFull
from .launch import StepRunner
from .mail import Mail
from .metrics import EngineMetrics
from .model_thread import ModelThread, StepThread
from .pages import describe_cache
from .report import SpeculationLog
from .request import Request
from .scheduler import Scheduler
from .shadow import Shadow
from .step import StepOutput, StepPlan
from .stepper import Stepper
from .stream import TokenStream
from .watchdog import Supervision, Watchdog

logger = logging.getLogger(__name__)
FEW_EVENTS = 2  # are told sooner than the loop can be woken
DEFAULT_SUPERVISION = Supervision()
CLOSED, STEPS_FAILED = "the engine was closed", "steps failed; the engine stopped"


class Engine:
    """Serves requests until closed.

    The rows of a step that raises are run again in parts: those that fail by themselves end, the
    others never know. After three steps in a row of which nothing came through, or one that does
    not come back, the engine ends: every stream gets an error, and a crash dump is written.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        on_thread_start: Callable[[], None] = lambda: None,
        warm_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        make_thread: Callable[[str, Callable[[], None]], StepThread] = ModelThread,
        supervision: Supervision = DEFAULT_SUPERVISION,
        overlap: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.metrics = EngineMetrics(scheduler, self)
        self._log = SpeculationLog(self.metrics.tally, scheduler.speculator.describe, clock=clock)
        self.failure: BaseException | None = None
        self.draining = False
        self.runner = runner
        self.supervision = supervision
        self.num_crash_dumps = 0
        self._clock = clock
        self._warm_up = warm_up
        self._thread = make_thread("foretoken-model", on_thread_start)
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._round_began = 0.0
        self._mail = Mail(scheduler, self.metrics)
        self._auditor = Auditor(scheduler)
        self._watchdog = Watchdog(supervision.step_timeout)
        self._stepper = Stepper(
            scheduler,
            self.metrics,
            self._thread,
            self._watchdog,
            tell=self._mail.tell,
            shadow=Shadow(self._meanwhile, self._has_much_to_do),
            clock=clock,
            overlap=overlap,
        )

    # -- callers --------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the loop runs; false before `start`, after `close` and when steps fail."""
        task = self._task
        return task is not None and not task.done() and not task.cancelling()

    @property
    def hung(self) -> bool:
        """Whether the model thread was given up: it may compute for ever."""
        return self._watchdog.gave_up

    @property
    def readiness(self) -> str | None:
        """Why new requests had better go elsewhere; None: they need not. Cheap."""
        if self.draining:
            return "the engine is shutting down"
        if not self.alive:
            return self._obituary()
        if self._stepper.log.seconds_under_way(self._clock()) > self.supervision.ready_step_seconds:
            return "a step takes very long"
        return None

    @property
    def now(self) -> float:
        """Seconds, on the clock of arrivals, pins and losses."""
        return self._clock()

    def submit(self, request: Request) -> TokenStream:
        """Take a request; its answer arrives on the stream.

        Raises `EngineDead`, `QueueFull`, and what `Scheduler.check` raises.
        """
        if not self.alive or self.draining:
            raise EngineDead("the engine is shutting down" if self.draining else self._obituary())
        if request.request_id in self._mail.streams:
            raise InvalidRequest("request_id is in use", param="request_id")
        try:
            self.scheduler.check(request, ahead=self._mail.ahead_of(request.tenant))
        except QueueFull as full:
            full.retry_after = self._mail.retry_after()
            raise
        self._stepper.withdraw()  # or the first token would wait for one step more
        return self._mail.take(request, self._clock())

    def abort(self, request_id: str) -> None:
        """End a request between two steps; unknown and finished ones are ignored."""
        self._mail.abort(request_id)

    def flush_cache(self, *namespaces: str | None) -> int:
        """Drop cached prefixes that no request uses, and what drafts draw on.

        Of these namespaces, of all when none is named. Returns how many pages that freed.
        """
        return self.scheduler.flush(*namespaces)

    def flush_prefix(self, tokens: array[int], namespace: str | None = None) -> int:
        """Drop what begins with these tokens and is not in use, pins or not.

        Drafts of the namespace go altogether: they know no prefixes. Returns how many pages that
        freed. Raises `InvalidRequest` for tokens that do not fill a page.
        """
        return self.scheduler.flush_prefix(tokens, namespace)

    def cache_info(self, namespace: str | None = None) -> dict[str, object]:
        """Occupancy and hit counters of the prefix cache, in pages and tokens.

        ``pins`` are those of one namespace: nobody else's are told one by one.
        """
        cache = self.scheduler.cache
        cache.tick(self._clock())  # no round looks after the pins while nothing runs
        return describe_cache(cache, namespace)

    @property
    def num_failed_steps(self) -> int:
        """Runs of the model thread that raised."""
        return self._stepper.num_failed_steps

    @property
    def num_bisections(self) -> int:
        """Steps that failed and were run again in parts."""
        return self._stepper.num_bisections

    @property
    def num_audit_failures(self) -> int:
        """Audits that found something wrong."""
        return self._auditor.num_failures

    async def audit(self) -> Verdict:
        """Check every page and request between two steps; see `core.audit.inspect`.

        Raises `EngineDead`.
        """
        if not self.alive:
            raise EngineDead(self._obituary())
        verdict = self._auditor.ask()
        self._mail.stir()
        return await verdict

    def report(self, reason: str) -> Report:
        """What a crash dump says; also when the loop stands still."""
        about, now = self.supervision.about, self._clock()
        failure = self.failure
        return make_report(
            reason, self.scheduler, self._stepper.log, now, failure=failure, about=about
        )

    def dump(self, report: Report) -> None:
        """Write it where dumps go, if they go anywhere."""
        folder = self.supervision.dump_dir
        if folder is not None and write_report(report, folder) is not None:
            self.num_crash_dumps += 1

    def _obituary(self) -> str:
        return STEPS_FAILED if self.failure else "the engine is not running"

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to serve on the running event loop, once the model thread is warm.

        Raises `EngineDead` after `close`, and what the warm-up raises.
        """
        self._require_open()
        if self._task is None:
            await self._thread.start(self._warm_up).result()
            self._require_open()  # it may have been closed meanwhile
        if self._task is None:
            self._mail.idle.set()
            self._task = asyncio.create_task(self._run(), name="foretoken-engine")

    def _require_open(self) -> None:
        if self.draining:
            raise EngineDead("the engine was closed")

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Stop: refuse new requests, let those here finish for a while, abort the rest.

        Closing again waits for the first time to end.
        """
        self.draining = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(drain_seconds))
        await asyncio.shield(self._closing)

    async def _close(self, drain_seconds: float) -> None:
        if self.alive and drain_seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._mail.idle.wait(), drain_seconds)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._end_everything(None)  # a task that was never entered ended nothing
        self._thread.close()

    async def _run(self) -> None:
        """Every way out of here ends every stream: nobody waits for an engine that is gone."""
        last: EngineDead | None = EngineDead(CLOSED)
        self._round_began = self._clock()
        try:
            while True:
                await self._turn()
        except asyncio.CancelledError:
            last = None if self.draining else last
            raise
        except EngineDead:  # the interpreter is on its way out, and its model thread ended
            logger.debug("the engine ends with its model thread")
        except BaseException as failure:
            logger.critical("the engine stops", exc_info=failure)
            self.failure, last = failure, EngineDead(STEPS_FAILED)
        finally:
            self._end(last)

    def _end(self, last: EngineDead | None) -> None:
        """The streams come first: a dump may take its time."""
        report = self.report("the engine died") if self.failure or self.hung else None
        self._end_everything(last)
        if report is not None:
            self.dump(report)

    async def _turn(self) -> None:
        """Once round: inbox, plan, step. Readers are told while the model computes."""
        self._mail.read(self._clock())
        self._auditor.answer()
        plan = self._stepper.under_way or self.scheduler.schedule(self._clock())
        if not plan.rows:
            self._deliver()
            await self._rest()
            return
        output = await self._stepper.step(plan, self.runner)
        if output is not None:
            self._tell_speculator(plan, output)
        else:  # what that took is no price of the next one
            self._round_began = self._clock()

    def _has_much_to_do(self) -> bool:
        """Whether what is done in a step had better wait for its kernels."""
        return self._mail.num_untold > FEW_EVENTS or self.scheduler.speculator.has_work()

    def _meanwhile(self) -> None:
        """While the model thread computes."""
        self._deliver()
        if self.scheduler.speculator.has_work():
            self.scheduler.speculator.work()

    def _tell_speculator(self, plan: StepPlan, output: StepOutput) -> None:
        """The whole round counts, from commit to commit: the host's share is a cost as well."""
        self._log.tick()
        now = self._clock()
        self.metrics.observe_round(output, now - self._round_began)
        self.scheduler.speculator.observe_step(plan, output, now - self._round_began)
        self._round_began = now

    async def _rest(self) -> None:
        self._mail.wake.clear()  # all that came is read; what comes from here on wakes it again
        if not self.scheduler.num_requests:
            self.scheduler.speculator.work()  # it lets go of those that ended last
            self._mail.rest()
            await self._auditor.rest(self._clock(), self._mail.wake)
        await self._mail.wake.wait()
        self._round_began = self._clock()

    def _deliver(self) -> None:
        self._mail.deliver(self._clock())

    def _end_everything(self, error: EngineDead | None) -> None:
        """Aborted without an error, or failed with one; also those that are still in the inbox."""
        last = error or EngineDead(CLOSED)
        try:
            self._stepper.withdraw()
            self._mail.tell(self.scheduler.abort_all(self._clock(), error))
            self._deliver()
        except Exception:
            logger.exception("the scheduler could not let go of its requests")
        self._mail.end(last)
        self._auditor.close(last)
        self._watchdog.close()

"""Engine: the asyncio loop between callers and the model thread.

There is one event loop and one model thread. Requests and the cache change on the loop's thread
alone: in the engine's task, which is suspended while the model thread runs a step or waits for its
output, and in other calls on that loop (`submit`, `flush_cache`). So no locks are needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

from ..errors import EngineDead, InvalidRequest, QueueFull
from ..interface.extras.transfers import PageServer
from ..interface.output import StepOutput
from ..interface.plan import StepPlan
from ..interface.protocols import Companions, StepRunner
from ..interface.request import Request
from ..scheduling.request_table import SchedulerLimits
from ..scheduling.scheduler import Scheduler
from ..telemetry.cache_info import describe_cache
from ..telemetry.metrics import EngineMetrics
from ..telemetry.overview import RecentRequest, describe_engine
from ..telemetry.spec_decode_stats import EngineLog, Load
from .audit import Auditor, AuditResult
from .crash_dump import CrashReport, make_report, write_report
from .extras.tier_io import TierIO
from .extras.transfer_desk import TransferDesk
from .inbox import RequestInbox, TokenStream
from .model_thread import ModelThread, StepThread, Supervision, Watchdog
from .step_executor import OverlapWork, StepExecutor

logger = logging.getLogger(__name__)
# More undelivered events than these are delivered only after the step's kernels have started. Up to
# this number, events are delivered at once, because waking the loop later would cost more.
MAX_EVENTS_AT_ONCE = 2
DEFAULT_SUPERVISION = Supervision()
CLOSED, STEPS_FAILED = "the engine was closed", "steps failed; the engine stopped"


class Engine:
    """Engine that serves requests until it is closed.

    A step that raises an error is run again in parts, and only the requests whose parts fail are
    ended. The engine ends after three steps in a row without a successful part, or after a step
    that does not return in time: every stream gets an error, and a crash dump is written.
    """

    inbox_kind: ClassVar[type[RequestInbox]] = RequestInbox

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
        companions: Companions | None = None,
        page_server: PageServer | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.metrics = EngineMetrics(scheduler, self, gives_kv=page_server is not None)
        self._log = EngineLog(
            self.metrics.spec_stats,
            partial(Load.of, scheduler),
            scheduler.speculator.describe,
            clock=clock,
        )
        self.failure: BaseException | None = None
        self.draining = False
        self.runner = runner
        self.supervision = supervision
        self.num_crash_dumps = 0
        self._clock = clock
        self._warm_up = warm_up
        self._thread = make_thread("foretoken-model", on_thread_start)
        # Stop the thread of an engine that the program did not close.
        weakref.finalize(self, self._thread.close)
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._companions = companions
        self._lost: BaseException | None = None  # why no later step can succeed; None: they can
        self._round_began = 0.0
        self._inbox = self.inbox_kind(scheduler, self.metrics)
        self._tier_io = self._make_tier_io(make_thread)
        self._transfer_desk: TransferDesk | None = None
        if page_server is not None:
            self._transfer_desk = TransferDesk(
                scheduler.cache, page_server, clock=clock, on_end=self._inbox.notify
            )
        self._auditor = Auditor(scheduler)
        self._watchdog = self._make_watchdog()
        self._step_executor = StepExecutor(
            scheduler,
            self.metrics,
            self._thread,
            self._watchdog,
            on_events=self._inbox.queue_events,
            overlap_work=OverlapWork(self._work_while_computing, self._should_wait_for_kernels),
            clock=clock,
            overlap=overlap,
        )

    def _make_watchdog(self) -> Watchdog:
        """Return a watchdog whose thread, if it has one, does not keep this engine alive."""
        engine = weakref.ref(self)

        def report() -> None:
            if (hung := engine()) is not None:
                hung._report_hung_launch()

        watchdog = Watchdog(self.supervision.step_timeout, report)
        # The watchdog itself refers to the engine while a step runs.
        weakref.finalize(self, watchdog.launch_guard.close)
        return watchdog

    def _report_hung_launch(self) -> None:
        """Report a launch that blocks the event loop; the thread of the `LaunchGuard` calls this.

        The engine ends its streams if the launch returns. A server ends without waiting for that.
        """
        logger.critical("the launch of a step takes longer than --step-timeout")
        self.dump(self.report("the launch of a step hangs"))

    def _make_tier_io(
        self, make_thread: Callable[[str, Callable[[], None]], StepThread]
    ) -> TierIO | None:
        """Return the I/O of the tiers with a new thread; None if there are no tiers."""
        if self.scheduler.page_loads is None:
            return None
        thread = make_thread("foretoken-io", lambda: None)
        weakref.finalize(self, thread.close)
        return TierIO(
            self.scheduler.page_loads, thread, clock=self._clock, on_change=self._inbox.notify
        )

    # -- callers --------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the loop runs; false before `start`, after `close` and after failed steps."""
        task = self._task
        return task is not None and not task.done() and not task.cancelling()

    @property
    def hung(self) -> bool:
        """Whether a step did not return in time and its thread was abandoned."""
        return self._watchdog.gave_up

    @property
    def readiness(self) -> str | None:
        """Reason why the engine is not ready for new requests; None if it is ready. O(1)."""
        if self.draining:
            return "the engine is shutting down"
        if not self.alive:
            return self._death_reason()
        if self._watchdog.seconds_under_way(self._clock()) > self.supervision.ready_step_seconds:
            return "a step is taking longer than --ready-step-seconds"
        return None

    @property
    def now(self) -> float:
        """Time in seconds on the engine's clock, which times arrivals, pins and evictions."""
        return self._clock()

    @property
    def limits(self) -> SchedulerLimits:
        """Limits of a step and of the queue."""
        return self.scheduler.limits

    @property
    def load(self) -> Load:
        """Current numbers of requests and of used pages. O(1)."""
        return Load.of(self.scheduler)

    @property
    def page_size(self) -> int:
        """Number of tokens in one page of the prefix cache."""
        return self.scheduler.cache.page_size

    @property
    def num_pages(self) -> int:
        """Number of pages of the KV pool."""
        return self.scheduler.cache.num_total_pages

    def submit(self, request: Request) -> TokenStream:
        """Accept a request and return the stream of its answer.

        Raises `EngineDead`, `QueueFull`, and the errors of `Scheduler.check`.
        """
        if not self.alive or self.draining:
            raise EngineDead(
                "the engine is shutting down" if self.draining else self._death_reason()
            )
        if request.request_id in self._inbox.streams:
            raise InvalidRequest(f"request_id {request.request_id} is in use", param="request_id")
        try:
            self.scheduler.check(request, pending=self._inbox.pending_arrivals(request.tenant))
        except QueueFull as full:
            full.retry_after = self._inbox.retry_after()
            raise
        return self._inbox.accept(request, self._clock())

    def fetch(self, request: Request) -> None:
        """Load the pages of a request's `Transfer.offer` into the prefix cache; compute nothing.

        Afterwards the engine that offered the pages is notified that it may free them. Pages that
        cannot be loaded are skipped without an error.
        """
        if self.alive:
            self.scheduler.fetch(request, self._clock())

    def check(self, request: Request) -> None:
        """Raise the error for a request that `submit` would refuse even with an empty queue.

        The request is not submitted. Raises `PromptTooLong` and `InvalidRequest`.
        """
        self.scheduler.check(request, pending=None)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; an unknown or finished request is ignored."""
        self._inbox.abort(request_id)

    def expect_turn(self, session: str, label: str, namespace: str | None = None) -> None:
        """Fit the time of a session's pin to the wait with this label; see `PrefixCache.expect`."""
        cache = self.scheduler.cache
        cache.tick(self._clock())
        own = session, namespace
        is_running = any(
            (each.cache.session, each.namespace) == own for each in self.scheduler.running.values()
        )
        cache.expect(session, label, namespace=namespace, is_running=is_running)

    # Only `audit` waits. The other methods below are coroutines, too, because an engine in another
    # process has the same interface.

    async def flush_cache(self, *namespaces: str | None) -> int:
        """Drop unused cached prefixes and the tokens indexed for look-up drafts in ``namespaces``.

        Without arguments, all namespaces are flushed. Returns how many pages became free.
        """
        num_pages = self.scheduler.flush(*namespaces)
        if self._tier_io is not None:
            self._tier_io.flush(*namespaces)
        return num_pages

    async def flush_prefix(self, tokens: array[int], namespace: str | None = None) -> int:
        """Drop the unused cached pages of all prompts that begin with ``tokens``, pinned or not.

        All tokens of the namespace that are indexed for look-up drafts, and all its pages in tiers,
        are dropped, too, because they cannot be found by prefix. Returns how many pages of the pool
        became free. Raises `InvalidRequest` for tokens that do not fill a page.
        """
        num_pages = self.scheduler.flush_prefix(tokens, namespace)
        if self._tier_io is not None:
            self._tier_io.flush(namespace)
        return num_pages

    async def end_session(self, session: str) -> bool:
        """Unpin a session's pages and let them be evicted first; return whether it had any."""
        return self.scheduler.end_session(session, self._inbox.arrived)

    async def room_for(self, request: Request) -> int:  # noqa: ARG002 - an engine has one pool
        """Return how many pages no pin and no request holds."""
        cache = self.scheduler.cache
        cache.tick(self._clock())  # pins must expire even if the engine runs no steps
        return cache.num_free_pages + cache.num_evictable_pages

    async def cache_info(self, namespace: str | None = None) -> dict[str, object]:
        """Return occupancy and hits of the prefix cache and its tiers, in pages and tokens.

        ``pins`` in the result lists the pins of ``namespace`` only.
        """
        cache = self.scheduler.cache
        cache.tick(self._clock())  # pins must expire even if the engine runs no steps
        loads = self.scheduler.page_loads
        tiers = None if loads is None else loads.tiers
        return describe_cache(cache, namespace, tiers, self.scheduler.num_packed_away_tokens)

    @property
    def num_failed_steps(self) -> int:
        """Number of failed runs in the model thread, of whole steps or of parts of steps."""
        return self._step_executor.num_failed_steps

    @property
    def num_bisections(self) -> int:
        """Number of steps that failed and were run again in parts."""
        return self._step_executor.num_bisections

    @property
    def num_audit_failures(self) -> int:
        """Number of audits that found a violation."""
        return self._auditor.num_failures

    async def overview(self, finished: Iterable[RecentRequest] = ()) -> dict[str, object]:
        """Return a description of the engine for the live page.

        It includes the paths of running and ``finished`` requests through the radix tree.
        """
        return describe_engine(self.scheduler, self.metrics, finished)

    async def audit(self) -> AuditResult:
        """Check the invariants of all pages and requests before the next step.

        Returns the result of `core.engine.audit.inspect`. Raises `EngineDead`.
        """
        if not self.alive:
            raise EngineDead(self._death_reason())
        result = self._auditor.request()
        self._inbox.notify()
        return await result

    def report(self, reason: str) -> CrashReport:
        """Return a description of the engine for a crash dump.

        Another thread may call this while the event loop is stuck.
        """
        about, now = self.supervision.about, self._clock()
        return make_report(
            reason, self.scheduler, self._watchdog, now, failure=self.failure, about=about
        )

    def dump(self, report: CrashReport) -> None:
        """Write ``report`` to the folder of crash dumps, if one was set."""
        folder = self.supervision.dump_dir
        if folder is not None and write_report(report, folder) is not None:
            self.num_crash_dumps += 1

    def _death_reason(self) -> str:
        return STEPS_FAILED if self.failure else "the engine is not running"

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start serving on the running event loop, after the warm-up of the threads that launch.

        Raises `EngineDead` after `close`, and any error of the warm-up.
        """
        self._require_open()
        if self._task is None:
            await self._thread.start(self._warm_up).result()
            self._require_open()  # `close` may have been called during the warm-up
            if self._step_executor.launches_here(self.runner):
                self.runner.prepare_thread()
        if self._task is None:
            self._inbox.idle.set()
            if self._tier_io is not None:
                self._tier_io.start()
            if self._companions is not None:
                self._companions.watch(self._lose)
            self._task = asyncio.create_task(self._run(), name="foretoken-engine")
            # Silence asyncio's "Task was destroyed" if the program exits without closing.
            setattr(self._task, "_log_destroy_pending", False)  # noqa: B010 - it is not typed

    def _require_open(self) -> None:
        if self.draining:
            raise EngineDead("the engine was closed")

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Close the engine: refuse new requests, wait for running requests, then abort the rest.

        The requests have at most ``drain_seconds`` to end. A second call waits for the first one.
        """
        self.draining = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(drain_seconds))
        await asyncio.shield(self._closing)

    async def _close(self, drain_seconds: float) -> None:
        ends = self._clock() + drain_seconds
        if self.alive and drain_seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._inbox.idle.wait(), drain_seconds)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._end_everything(None)  # a task that is cancelled before its first run ends no stream
        if self._tier_io is not None:
            await self._tier_io.close(ends - self._clock())
        if self._transfer_desk is not None:
            self._transfer_desk.close()
        self._thread.close()
        if self._companions is not None:
            self._companions.unwatch()
            await asyncio.to_thread(self._companions.end)

    async def _run(self) -> None:
        """Run the loop until it is cancelled or fails; end every stream in either case."""
        last: EngineDead | None = EngineDead(CLOSED)
        self._round_began = self._clock()
        try:
            while True:
                await self._turn()
        except asyncio.CancelledError:
            last = None if self.draining else last
            raise
        except GeneratorExit:  # the program exits without closing the engine or its event loop
            raise
        except EngineDead:  # the model thread ended because the interpreter exits
            logger.debug("the engine stops: its model thread ended")
        except BaseException as failure:
            logger.critical("the engine failed and stops", exc_info=failure)
            self.failure, last = failure, EngineDead(STEPS_FAILED)
        finally:
            if not sys.is_finalizing():  # later no stream is read, and modules may be unloaded
                self._end(last)

    def _end(self, last: EngineDead | None) -> None:
        """End all streams, then write a crash dump if the engine failed, which may take a while.

        ``last``: error for the streams; None: they are aborted without an error.
        """
        report = self.report("the engine died") if self.failure or self.hung else None
        self._end_everything(last)
        if report is not None and self._companions is not None:
            self._companions.unwatch()
            self._companions.end(at_once=True)
        if report is not None:
            self.dump(report)

    async def _turn(self) -> None:
        """Run one round of the loop: read the inbox, plan a step and run it.

        Events of the previous step are delivered while the model computes.
        """
        if self._lost is not None:
            raise self._lost
        self._inbox.drain(self._clock())
        if self._auditor.open_requests:
            self._auditor.answer_requests()
        plan = self._step_executor.planned_ahead or self.scheduler.schedule(self._clock())
        if not plan.requests:
            self._deliver()
            await self._wait_for_work()
            return
        output = await self._step_executor.step(plan, self.runner)
        if output is not None:
            self._report_step(plan, output)
        else:  # the time of a step that was run in parts would distort the statistics
            self._round_began = self._clock()

    def _lose(self, failure: BaseException) -> None:
        """Record the loss of a process that every step needs; the engine ends after this step."""
        self._lost = failure
        self._inbox.notify()

    def _should_wait_for_kernels(self) -> bool:
        """Whether the loop has so much work that it should wait for the start of the kernels."""
        return (
            self._inbox.num_undelivered > MAX_EVENTS_AT_ONCE or self.scheduler.speculator.has_work()
        )

    def _work_while_computing(self) -> None:
        """Deliver events and let the speculator index tokens while the model thread computes."""
        self._deliver()
        if self.scheduler.speculator.has_work():
            self.scheduler.speculator.work()

    def _report_step(self, plan: StepPlan, output: StepOutput) -> None:
        """Report a step and the time since the previous one, which includes the event loop's."""
        self._log.tick()
        now = self._clock()
        self.metrics.observe_round(output, now - self._round_began)
        self.scheduler.speculator.observe_step(plan, output, now - self._round_began)
        self._round_began = now

    async def _wait_for_work(self) -> None:
        self._inbox.wake.clear()  # the next arrival or abort sets it again
        if not self.scheduler.num_requests:
            self.scheduler.speculator.work()  # lets the speculator drop data of ended requests
            self._inbox.mark_idle()
            await self._auditor.audit_while_idle(self._clock(), self._inbox.wake)
        # Requests whose pages are being loaded from a tier may still have a deadline.
        due = self.scheduler.request_table.next_deadline
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                self._inbox.wake.wait(), None if due is None else due - self._clock()
            )
        self._round_began = self._clock()

    def _deliver(self) -> None:
        self.scheduler.account()  # deltas are complete after it
        self._inbox.deliver(self._clock())

    def _end_everything(self, error: EngineDead | None) -> None:
        """End all requests, including those in the inbox: with ``error``, or abort them if None."""
        last = error or EngineDead(CLOSED)
        try:
            self._inbox.queue_events(self.scheduler.abort_all(self._clock(), error))
            self._deliver()
        except Exception:
            logger.exception("the scheduler could not release its requests")
        self._inbox.fail_streams(last)
        self._auditor.close(last)
        self._watchdog.close()

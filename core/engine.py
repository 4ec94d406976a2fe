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
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from .errors import EngineDead, ForetokenError, InvalidRequest, QueueFull
from .metrics import EngineMetrics
from .model_thread import Job, ModelThread, StepThread
from .pages import describe_cache
from .report import SpeculationLog
from .request import Delta, Request
from .scheduler import Event, Scheduler
from .step import StepOutput, StepPlan
from .stream import TokenStream

logger = logging.getLogger(__name__)
MAX_FAILURES = 3  # of steps, in a row
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


class StepRunner(Protocol):
    """What the model thread runs."""

    def step(self, plan: StepPlan) -> StepOutput:
        """Compute one ragged batch; blocking."""


class Engine:
    """Serves requests until closed.

    A step that raises fails the requests in it, and the next step goes on with the others. After
    three in a row the engine ends: every stream gets the error.
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
    ) -> None:
        self.scheduler = scheduler
        self.metrics = EngineMetrics(scheduler)
        self._log = SpeculationLog(self.metrics.tally, scheduler.speculator.describe, clock=clock)
        self.failure: BaseException | None = None
        self.draining = False
        self.runner = runner
        self._clock = clock
        self._warm_up = warm_up
        self._thread = make_thread("foretoken-model", on_thread_start)
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._inbox: list[tuple[Request, float]] = []  # with the time of arrival
        self._aborted: list[str] = []
        self._streams: dict[str, TokenStream] = {}
        self._undelivered: list[Event] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._round_began = 0.0
        self._num_failures = 0  # of steps, in a row
        self._finish_times: deque[float] = deque(maxlen=64)

    # -- callers --------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the loop runs; false before `start`, after `close` and when steps fail."""
        task = self._task
        return task is not None and not task.done() and not task.cancelling()

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
        if request.request_id in self._streams:
            raise InvalidRequest("request_id is in use", param="request_id")
        try:
            self.scheduler.check(request, num_ahead=len(self._inbox))
        except QueueFull as full:
            full.retry_after = self._retry_after()
            raise
        stream = self._streams[request.request_id] = TokenStream(request)
        self._inbox.append((request, self._clock()))
        self._stir()
        return stream

    def abort(self, request_id: str) -> None:
        """End a request between two steps; unknown and finished ones are ignored."""
        if request_id in self._streams:
            self._aborted.append(request_id)
            self._stir()

    def flush_cache(self, namespace: str | None = None, *, everything: bool = True) -> int:
        """Drop cached prefixes that no request uses, and what drafts would draw on.

        Returns how many pages that freed.
        """
        namespaces = () if everything else (namespace,)
        try:
            self.scheduler.speculator.flush(*namespaces)
        finally:
            num_pages = self.scheduler.cache.flush(*namespaces)
        return num_pages

    def flush_prefix(self, tokens: array[int], namespace: str | None = None) -> int:
        """Drop what begins with these tokens and is not in use, pins or not.

        Drafts of the namespace go altogether: they know no prefixes. Returns how many pages that
        freed. Raises `InvalidRequest` for tokens that do not fill a page.
        """
        cache = self.scheduler.cache
        if len(tokens) < cache.page_size:
            message = f"a prefix must fill a page of {cache.page_size} tokens, not {len(tokens)}"
            raise InvalidRequest(message, param="prefix")
        try:
            self.scheduler.speculator.flush(namespace)
        finally:
            num_pages = cache.flush_prefix(tokens, namespace=namespace)
        return num_pages

    def cache_info(self, namespace: str | None = None) -> dict[str, object]:
        """Occupancy and hit counters of the prefix cache, in pages and tokens.

        ``pins`` are those of one namespace: nobody else's are told one by one.
        """
        cache = self.scheduler.cache
        cache.tick(self._clock())  # no round looks after the pins while nothing runs
        return describe_cache(cache, namespace)

    def _obituary(self) -> str:
        return "steps failed; the engine stopped" if self.failure else "the engine is not running"

    def _retry_after(self) -> float:
        """Seconds until the queue has gone, at the rate at which requests finished lately."""
        times = self._finish_times
        if len(times) < 2 or times[-1] <= times[0]:
            return MIN_RETRY_SECONDS
        rate = (len(times) - 1) / (times[-1] - times[0])
        seconds = (len(self.scheduler.waiting) + len(self._inbox)) / rate
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))

    def _stir(self) -> None:
        self._idle.clear()
        self._wake.set()

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
            self._idle.set()
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
                await asyncio.wait_for(self._idle.wait(), drain_seconds)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._end_everything(None)  # a task that was never entered ended nothing
        self._thread.close()

    async def _run(self) -> None:
        """Every way out of here ends every stream: nobody waits for an engine that is gone."""
        last: EngineDead | None = EngineDead("the engine was closed")
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
            logger.critical("steps failed; the engine stops", exc_info=failure)
            self.failure, last = failure, EngineDead("steps failed; the engine stopped")
        finally:
            self._end_everything(last)

    async def _turn(self) -> None:
        """Once round: inbox, plan, step, commit. Readers are told while the model computes."""
        self._read_inbox()
        self._undelivered += self.scheduler.expire(self._clock())
        plan = self.scheduler.schedule(self._clock())
        if not plan.rows:
            self._deliver()
            await self._rest()
            return
        began = self._clock()
        step = self._thread.start(partial(self.runner.step, plan))
        try:
            self._deliver()
            self.scheduler.speculator.work()
        finally:
            output = await self._outcome(step)  # requests must not change under it
        now = self._clock()
        if output is None:
            failed = ForetokenError("the model failed at a step of this request")
            self._undelivered += self.scheduler.fail(plan, now, failed)
            return
        self._undelivered += self.scheduler.commit(plan, output, now)
        self.metrics.observe_step(output, now - began)
        self._log.tick()
        self._tell_speculator(plan, output)

    async def _outcome(self, step: Job[StepOutput]) -> StepOutput | None:
        """What the model thread computed; None where it failed, and not for the third time."""
        try:
            output = await step.result()
        except Exception:
            self._num_failures += 1
            if self._num_failures == MAX_FAILURES:
                raise
            logger.exception("a step failed; its requests end, the others go on")
            return None
        self._num_failures = 0
        return output

    def _tell_speculator(self, plan: StepPlan, output: StepOutput) -> None:
        """The whole round counts, from commit to commit: the host's share is a cost as well."""
        now = self._clock()
        self.scheduler.speculator.observe_step(plan, output, now - self._round_began)
        self._round_began = now

    async def _rest(self) -> None:
        if not self.scheduler.num_requests:
            self.scheduler.speculator.work()  # it lets go of those that ended last
            self._idle.set()
            self._finish_times.clear()  # a rate measured over idle time would be too low
        self._wake.clear()
        await self._wake.wait()
        self._round_began = self._clock()

    def _read_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for request, arrival_time in inbox:
            self.scheduler.add(request, arrival_time)
        aborted, self._aborted = self._aborted, []
        for request_id in aborted:
            self._undelivered += self.scheduler.abort(request_id, self._clock())

    def _deliver(self) -> None:
        events, self._undelivered = self._undelivered, []
        now = self._clock()
        for request, delta in events:
            self._streams[request.request_id].push(delta)
            self.metrics.observe_delta(request, delta, now)
            if delta.terminal:
                del self._streams[request.request_id]
                self._finish_times.append(now)

    def _end_everything(self, error: EngineDead | None) -> None:
        """Aborted without an error, or failed with one; also those that are still in the inbox."""
        try:
            self._undelivered += self.scheduler.abort_all(self._clock(), error)
            self._deliver()
        except Exception:
            logger.exception("the scheduler could not let go of its requests")
        for stream in self._streams.values():
            stream.push(Delta(error=error or EngineDead("the engine was closed")))
        self._streams.clear()
        self._inbox.clear()
        self._idle.set()

"""TierIO: makes an engine's I/O calls to the KV tiers, one at a time, in a thread of its own.

Flushes go first, then messages to other engines, look-ups, and loads of a few pages at a time for
each request in turn. Pages are saved when nothing else is to do. So neither a long load nor a save
delays a look-up for long.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from ...errors import EngineDead
from ...interface.extras.tiers import PageLoad
from ...scheduling.page_loads import PageLoads
from ..model_thread import Job, StepThread

logger = logging.getLogger(__name__)
LEAST_DRAIN_SECONDS = 1.0  # minimum time for the last saves when the engine closes
CLOSE_SECONDS = 5.0  # time limit for closing the stores after the last saves
RENEW_SECONDS = 10.0  # interval at which peers are asked to hold offered pages for longer


class Call(NamedTuple):
    """A call for the I/O thread."""

    work: Callable[[], Any]
    use: Callable[[Any], None] = lambda _: None  # called with the result, or with `if_failed`
    if_failed: Any = None


class TierIO:
    """Task that makes the I/O calls to the KV tiers while an engine serves.

    ``on_change`` is called when a request no longer waits for a look-up or a load. All methods must
    be called on the engine's event loop.
    """

    def __init__(
        self,
        page_loads: PageLoads,
        thread: StepThread,
        *,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self._loads, self._tiers = page_loads, page_loads.tiers
        self._thread, self._clock, self._on_change = thread, clock, on_change
        self._wake = asyncio.Event()
        self._flushes: deque[Sequence[str | None]] = deque()
        self._timers: dict[PageLoad, asyncio.TimerHandle] = {}
        self._task: asyncio.Task[None] | None = None
        self._job: Job[Any] | None = None  # the running job; None between two jobs
        self._ends: float | None = None  # time at which saving ends; None before `close`
        self._renewal: asyncio.TimerHandle | None = None  # timer of the next renewal of offers
        self._is_renewal_due = False

    def start(self) -> asyncio.Task[None]:
        """Start the task on the running event loop."""
        self._loads.on_order, self._loads.on_offer = self._on_order, self._on_offer
        self._tiers.watch_saves(self._wake.set)
        self._task = asyncio.create_task(self._run(), name="foretoken-tiers")
        return self._task

    def flush(self, *namespaces: str | None) -> None:
        """Drop the tiers' pages of ``namespaces``, or of all namespaces, before a later look-up."""
        self._flushes.append(namespaces)
        self._wake.set()

    async def close(self, drain_seconds: float) -> None:
        """Save pending pages for at most ``drain_seconds``, then close the stores.

        A store that does not answer in time is not closed.
        """
        patience = max(drain_seconds, LEAST_DRAIN_SECONDS)
        self._ends = self._clock() + patience
        self._wake.set()
        task = self._task or self.start()  # stores must be closed even if `start` was not called
        await asyncio.wait([task], timeout=patience + CLOSE_SECONDS)
        if not task.done():
            logger.warning("a KV tier did not answer in time and was not closed")
            self._abandon(task)
        await asyncio.wait([task])
        self._thread.close()
        self._loads.close()
        for timer in (*self._timers.values(), *([self._renewal] if self._renewal else [])):
            timer.cancel()

    def _abandon(self, task: asyncio.Task[None]) -> None:
        if self._job is not None:
            self._job.end(None, EngineDead("the engine was closed"))
        task.cancel()

    # -- the task -------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            call = self._next_call()
            if call is not None:
                await self._make(call)
            elif self._ends is not None:
                await self._make(Call(self._tiers.close))
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _make(self, call: Call) -> None:
        """Make a call in the I/O thread, and pass its result to `Call.use`.

        If the call raises an error, `Call.if_failed` is passed instead.
        """
        self._job = self._thread.start(call.work)
        try:
            result = await self._job.result()
        except EngineDead:  # `close` gave up the job
            raise asyncio.CancelledError from None
        except Exception:
            logger.exception("a call to the KV tiers failed")
            result = call.if_failed
        finally:
            self._job = None
        call.use(result)

    def _next_call(self) -> Call | None:
        if self._flushes:
            return Call(partial(self._tiers.flush, self._flushes.popleft()))
        if self._loads.meetings:
            return Call(partial(self._tiers.meet, self._loads.meetings.popleft()))
        if self._loads.ended_offers:
            return Call(partial(self._tiers.end_offer, self._loads.ended_offers.popleft()))
        if self._is_renewal_due:
            self._is_renewal_due = False
            return Call(self._tiers.renew_offers)
        while self._loads.look_ups:
            load = self._loads.look_ups.popleft()
            if not load.is_over:
                find = partial(self._tiers.find, load.tokens, load.namespace, load.first)
                return Call(find, partial(self._found, load), [])
        while self._loads.loads:
            load = self._loads.loads.popleft()
            if not load.is_over:
                return self._load_call(load)
        may_save = self._ends is None or self._clock() < self._ends
        if may_save and self._tiers.has_saves:
            return Call(self._tiers.save)
        return None

    def _load_call(self, load: PageLoad) -> Call:
        if load.lacks_state and load.state_slot is not None:
            load.is_in_thread = True
            target = load.state_slot, load.state_position
            read = partial(self._tiers.load_state, load.keys[-1], *target)
            return Call(read, partial(self._state_loaded, load), False)
        start = load.num_loaded
        page_ids = load.page_ids[start : start + self._tiers.pages_per_call]
        keys = load.keys[load.first + start : load.first + start + len(page_ids)]
        load.is_in_thread = True
        work = partial(self._tiers.load, keys, page_ids)
        return Call(work, partial(self._loaded, load, len(keys)), 0)

    def _found(self, load: PageLoad, keys: list[bytes]) -> None:
        self._disarm(load)
        if not load.is_over:
            self._loads.found(load, keys)
            self._on_change()

    def _loaded(self, load: PageLoad, num_asked: int, num_pages: int) -> None:
        self._loads.loaded(load, num_asked, num_pages, self._clock())
        if load.is_over:
            self._disarm(load)
            self._on_change()

    def _state_loaded(self, load: PageLoad, is_loaded: bool) -> None:
        self._loads.state_loaded(load, self._clock(), is_loaded=is_loaded)
        if load.is_over:
            self._disarm(load)
            self._on_change()

    # -- times ----------------------------------------------------------------------------------

    def _on_order(self, load: PageLoad) -> None:
        """Start the timeout of a look-up or load, and wake the I/O task."""
        if load not in self._timers:
            seconds = max(0.0, load.due - self._clock())
            self._timers[load] = asyncio.get_running_loop().call_later(seconds, self._due, load)
        self._wake.set()

    def _on_offer(self) -> None:
        """Wake the I/O task, and renew the offers at intervals until none is left."""
        if self._renewal is None and self._loads.num_offers:
            loop = asyncio.get_running_loop()
            self._renewal = loop.call_later(RENEW_SECONDS, self._renew)
        self._wake.set()

    def _renew(self) -> None:
        self._renewal, self._is_renewal_due = None, self._loads.num_offers > 0
        self._on_offer()

    def _due(self, load: PageLoad) -> None:
        self._timers.pop(load, None)
        if load.due > self._clock():  # the time limit of the load was extended
            self._on_order(load)
        elif not load.is_over:
            self._on_change()

    def _disarm(self, load: PageLoad) -> None:
        if (timer := self._timers.pop(load, None)) is not None:
            timer.cancel()

"""UpdatableEngine: an engine that can be paused, and whose weights can be replaced.

Both happen between two steps, in the engine's own task. Other engines run none of this code.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

from typing_extensions import override

from ....radix_cache.versioned import VersionedPrefixCache
from ...errors import EngineDead, ForetokenError, InvalidRequest
from ...interface.protocols import StepRunner
from ...interface.request import FinishReason, Request
from ...scheduling.scheduler import Scheduler
from ..engine import CLOSED, Engine
from ..inbox import RequestInbox, TokenStream
from .holding_inbox import HoldingInbox
from .versions import FIRST_VERSION, begin_span, begin_spans

logger = logging.getLogger(__name__)
PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What a pause does with running requests: end them, let them finish, or stop them until resume."""
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)

PAUSED = "pause"  # stop reason of a request that a pause ended


class _Swap(NamedTuple):
    """A replacement of weights. ``copy`` writes them, in the model thread.

    ``begins_version``: whether the target's weights change, and not only a drafter's.
    """

    copy: Callable[[], None]
    done: asyncio.Future[str]
    begins_version: bool = True
    version: str | None = None  # None: the next number


class UpdatableEngine(Engine):
    """Engine with `pause`, `resume` and `swap_weights`.

    ``weight_version``: name of the present weights. Raises ValueError for an engine that launches
    steps ahead, or for a cache that does not separate versions.
    """

    inbox_kind: ClassVar[type[RequestInbox]] = HoldingInbox
    _inbox: HoldingInbox

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        **options: Any,  # noqa: ANN401 - options of `Engine`
    ) -> None:
        if options.get("overlap"):
            raise ValueError("weights can only be replaced while no step is launched ahead")
        if not isinstance(scheduler.cache, VersionedPrefixCache):
            raise ValueError("weight updates need a VersionedPrefixCache")
        super().__init__(scheduler, runner, **options)
        self.weight_version = FIRST_VERSION
        self._cache = scheduler.cache
        self._num_updates = 0
        self.num_aborts = 0  # number of pauses that ended the accepted requests
        self._mode: PauseMode | None = None
        self._is_at_rest = False  # whether the pause has taken effect
        self._pausing: list[asyncio.Future[None]] = []  # callers of `pause` that wait
        self._swaps: list[_Swap] = []  # swaps that are not done

    # -- callers --------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Whether no steps run until `resume`."""
        return self._mode is not None and self._is_at_rest

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Run no step until `resume`; return when no step runs and none will.

        All accepted requests end with the finish reason "abort" (abort), all of them run to their
        end first (wait), or they stop where they are and go on after `resume` (keep). Later
        requests wait in the queue. A caller that is cancelled ends a pause that has not taken
        effect. Raises `InvalidRequest` for an unknown mode, and if `resume` or a pause of another
        mode comes first; raises `EngineDead`.
        """
        if mode not in PAUSE_MODES:
            raise InvalidRequest(f"mode must be one of {', '.join(PAUSE_MODES)}", param="mode")
        self._require_alive()
        if mode == self._mode and self._is_at_rest:
            return
        if mode != self._mode:
            self._end_pausing(InvalidRequest("a pause of another mode replaced this pause"))
            self._inbox.let_go()
        if mode != "keep":
            self._inbox.hold()
        self._mode, self._is_at_rest = mode, False
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pausing.append(reached)
        self._inbox.notify()
        try:
            await reached
        except asyncio.CancelledError:
            self._pausing = [each for each in self._pausing if each is not reached]
            if not self._is_at_rest and not self._pausing:
                self.resume()  # else requests would wait for a resume that may never come
            raise

    def resume(self) -> None:
        """End a pause; without a pause nothing happens."""
        self._mode, self._is_at_rest = None, False
        self._inbox.let_go()
        self._end_pausing(InvalidRequest("/resume ended this pause before it took effect"))
        self._inbox.notify()

    async def swap_weights(self, copy: Callable[[], None], version: str | None = None) -> str:
        """Call ``copy`` in the model thread between two steps, and begin a version of the weights.

        Returns the version's name: ``version``, or else the number of updates. Pages of the former
        version are not found any more. An error of ``copy`` ends the engine, because the weights
        may be written in part. Raises `EngineDead`.
        """
        return await self._swapped(copy, version=version)

    async def between_steps(self, copy: Callable[[], None]) -> None:
        """Call ``copy`` in the model thread between two steps, for weights of a drafter.

        An error of ``copy`` ends the engine. Raises `EngineDead`.
        """
        await self._swapped(copy, begins_version=False)

    async def _swapped(
        self, copy: Callable[[], None], *, begins_version: bool = True, version: str | None = None
    ) -> str:
        self._require_alive()
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._swaps.append(_Swap(copy, done, begins_version, version))
        self._inbox.notify()
        return await done

    @override
    def submit(self, request: Request) -> TokenStream:
        begin_spans(request, self.weight_version, self._num_updates)
        return super().submit(request)

    @override
    async def cache_info(self, namespace: str | None = None) -> dict[str, object]:
        return await super().cache_info(self._cache.name(namespace))

    def _require_alive(self) -> None:
        if not self.alive or self.draining:
            raise EngineDead(CLOSED if self.draining else self._death_reason())

    # -- life -----------------------------------------------------------------------------------

    @override
    async def close(self, *, drain_seconds: float = 0.0) -> None:
        if self._mode is not None:
            self._end_pausing(EngineDead(CLOSED))
            self.resume()  # else no request would end within ``drain_seconds``
        await super().close(drain_seconds=drain_seconds)

    @override
    async def _turn(self) -> None:
        while self._swaps:
            await self._swap(self._swaps[0])
        if self._may_run():
            await super()._turn()
        else:
            await self._rest()

    def _may_run(self) -> bool:
        """Whether steps may run: no pause, or one that waits for requests accepted before it."""
        if self._mode is None:
            return True
        is_waiting = self._mode == "wait" and not self._is_at_rest
        return is_waiting and (self.scheduler.num_requests > 0 or self._inbox.num_earlier > 0)

    async def _rest(self) -> None:
        """Do all that the loop does between two steps, but run no step."""
        if not self._is_at_rest:
            self._is_at_rest = True
            if self._mode == "abort":
                self._abort_accepted()
            self._inbox.let_go()
            self._end_pausing(None)
        self._inbox.drain(self._clock())
        if self._auditor.open_requests:
            self._auditor.answer_requests()
        self._deliver()
        await self._wait_for_work()

    def _abort_accepted(self) -> None:
        """End the requests that were accepted before the pause, preempted ones among them."""
        now = self._clock()
        self.num_aborts += 1
        self._inbox.drain(now)
        waiting = [each.request_id for each in self.scheduler.waiting.requests]
        for request_id in [*self.scheduler.running, *waiting]:
            events = self.scheduler.abort(request_id, now)
            for _, delta in events:
                if delta.finish_reason is FinishReason.ABORT:
                    delta.stop_reason = PAUSED
            self._inbox.queue_events(events)

    async def _swap(self, swap: _Swap) -> None:
        """Replace the weights, unless the caller has gone. An error ends the engine."""
        if not swap.done.done():
            await self._thread.start(swap.copy).result()
            if swap.begins_version:
                self._begin_version(swap.version)
            if not swap.done.done():
                swap.done.set_result(self.weight_version)
        self._swaps.pop(0)
        self._round_began = self._clock()  # the time of a swap is no time of a step

    def _begin_version(self, version: str | None) -> None:
        self._num_updates += 1
        self.weight_version = version or str(self._num_updates)
        self._cache.begin_version()
        scheduler = self.scheduler
        live = chain(scheduler.running.values(), scheduler.waiting.requests, self._inbox.arrived)
        for request in live:
            begin_span(request, self.weight_version, self._num_updates)
        logger.info("the weights have version %s", self.weight_version)

    def _end_pausing(self, error: ForetokenError | None) -> None:
        pausing, self._pausing = self._pausing, []
        for each in pausing:
            if not each.done():
                if error is None:
                    each.set_result(None)
                else:
                    each.set_exception(error)

    @override
    def _end_everything(self, error: EngineDead | None) -> None:
        super()._end_everything(error)
        last = error or EngineDead(CLOSED)
        self._end_pausing(last)
        swaps, self._swaps = self._swaps, []
        for swap in swaps:
            if not swap.done.done():
                swap.done.set_exception(last)

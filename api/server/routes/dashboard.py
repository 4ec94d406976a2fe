"""GET /ui/events: the state of the engine, for the live page.

Events have counts, sizes and request ids, never text or tokens. The engine is observed only while a
page is open.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request
from starlette.responses import Response

from ....core.interface.output import StepOutput
from ....core.interface.plan import StepPlan
from ....core.interface.request import Delta
from ....core.interface.request import Request as EngineRequest
from ....core.telemetry.observers import EngineObserver
from ....core.telemetry.overview import MAX_REQUESTS, RecentRequest
from ...serving.dialect import Endpoints, get
from ...serving.serving_context import Service
from ...serving.settings import Settings
from ...serving.sse import EventStream, event
from ...types.results import Body

EVENTS = "text/event-stream"
PERIOD_SECONDS = 1.0
STEPS_SECONDS = 0.25  # interval between events with the latest steps
MAX_STEPS = 256  # maximum number of steps per event
IDLE = "idle prefill"  # replaces the draft source for a chunk of a next turn's prompt


class Watched(EngineObserver):
    """The latest steps and finished requests. Used only in the thread of the event loop.

    A chunk that was computed in idle time is shown as a step of one token. Replicas tell their
    chunks; ``num_chunks`` returns how many an engine without replicas has computed so far.
    """

    def __init__(self, num_chunks: Callable[[], int] = lambda: 0) -> None:
        self._num_chunks, self._chunks_seen = num_chunks, num_chunks()
        self.num_steps = 0  # steps with tokens, of all replicas
        self.finished: deque[RecentRequest] = deque(maxlen=MAX_REQUESTS)
        self._steps: deque[dict[str, int]] = deque(maxlen=MAX_STEPS)
        # replica of each step; empty without a front
        self._replicas: deque[int] = deque(maxlen=MAX_STEPS)
        self._step: dict[str, int] = {}  # tokens by draft source; "" for the target model's own

    def observe_delta(self, request: EngineRequest, delta: Delta, now: float) -> None:  # noqa: ARG002
        """Count the tokens of the last step, and keep a finished request."""
        for source in delta.token_sources:
            self._step[source] = self._step.get(source, 0) + 1
        if delta.terminal:
            self.finished.append(RecentRequest.of(request))

    def observe_step(
        self,
        plan: StepPlan,  # noqa: ARG002
        output: StepOutput,  # noqa: ARG002
        *,
        began: float,  # noqa: ARG002
        ended: float,  # noqa: ARG002
    ) -> None:
        """Finish the previous step, whose tokens arrive while the next one runs."""
        self._end_step()

    def observe_replica_step(self, replica: int) -> None:
        """Finish a step of a replica, whose tokens arrive together."""
        self._end_step(replica)

    def observe_idle_chunk(self, replica: int) -> None:
        """Store a chunk that a replica has computed in idle time."""
        self._put({IDLE: 1}, replica)

    def since(self, num_steps: int) -> Body:
        """Return the steps after the first ``num_steps``, at most `MAX_STEPS`, with their
        replicas.

        Empty if there are none.
        """
        self._end_step()
        new_chunks, self._chunks_seen = self._num_chunks() - self._chunks_seen, self._num_chunks()
        if new_chunks and not self._replicas:
            for _ in range(new_chunks):
                self._put({IDLE: 1})
        if not (count := min(self.num_steps - num_steps, len(self._steps))):
            return {}
        body: Body = {"latest_steps": [*self._steps][-count:]}
        return body | ({"replicas": [*self._replicas][-count:]} if self._replicas else {})

    def _end_step(self, replica: int | None = None) -> None:
        """Store the current step, with its replica if there are several. Ignore an empty one."""
        if self._step:
            self._put(self._step, replica)
            self._step = {}

    def _put(self, step: dict[str, int], replica: int | None = None) -> None:
        self.num_steps += 1
        if replica is not None and not self._replicas:
            self._steps.clear()  # a chunk that ended while the first watcher came has no replica
        self._steps.append(step)
        if replica is not None:
            self._replicas.append(replica)


class Dashboard(Endpoints):
    """The events of the live page. All watchers share one snapshot per period."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._watched: Watched | None = None  # None without watchers
        self._num_watchers = 0
        self._latest: tuple[float, bytes] = (float("-inf"), b"")

    @classmethod
    def is_served(cls, settings: Settings) -> bool:
        """Whether the live page is served; not with ``--no-ui``."""
        return settings.ui

    @get("/ui/events", media=EVENTS, errors=(403,), is_operators=True)
    async def events(self, _request: Request) -> Response:
        """Stream the state of the engine every second, and its steps every quarter of a second."""
        limits = self.service.settings.limits
        return EventStream(self._events(), close=_nothing, ping_seconds=limits.ping_seconds)

    async def _events(self) -> AsyncGenerator[bytes]:
        watched = self.watch()
        try:
            seen, ticks = watched.num_steps, round(PERIOD_SECONDS / STEPS_SECONDS)
            while not self.service.draining:
                yield await self._snapshot(watched)
                for _ in range(ticks):
                    await asyncio.sleep(STEPS_SECONDS)
                    if steps := watched.since(seen):
                        seen = watched.num_steps
                        yield event(steps)
        finally:
            self.unwatch()

    def watch(self) -> Watched:
        """Register a watcher and return the observed data. The first one attaches the observer."""
        if self._watched is None:
            self._watched = Watched(lambda: self.service.chat.next_turns.num_chunks)
            self.service.llm.engine.metrics.observers.append(self._watched)
        self._num_watchers += 1
        return self._watched

    def unwatch(self) -> None:
        """Unregister a watcher. The last one detaches the observer."""
        self._num_watchers -= 1
        if not self._num_watchers and self._watched is not None:
            self.service.llm.engine.metrics.observers.remove(self._watched)
            self._watched = None

    async def _snapshot(self, watched: Watched) -> bytes:
        now = asyncio.get_running_loop().time()
        if now - self._latest[0] >= PERIOD_SECONDS / 2:
            llm = self.service.llm
            defaults = llm.built.sampling_defaults
            about = {"time": now, "model": self.service.model, "sampling": defaults.in_force}
            about["sampling_origin"] = defaults.origin
            about["causes"] = llm.miss_causes.counts
            body = {**about, **await llm.engine.overview(watched.finished)}
            self._latest = (now, event(body))
        return self._latest[1]


def _nothing() -> None:
    """Do nothing: a watcher holds no resource."""

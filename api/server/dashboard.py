"""GET /: a page to talk to the model and watch the engine; GET /ui/events: what the page shows.

The page is one file without a build step. It needs no key itself: it asks the user for one, keeps
it in the browser and sends it. The events have counts, sizes and ids of requests, never a text or a
token. The engine is observed only while a page is open.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Container, Iterable
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.interface.output import StepOutput
from ...core.interface.plan import StepPlan
from ...core.interface.request import Delta
from ...core.interface.request import Request as EngineRequest
from ...core.scheduling.guarded_speculator import GuardedSpeculator
from ...core.telemetry.metrics import EngineObserver
from ..serving.serving_context import Service
from ..serving.sse import EventStream, event
from ..types.results import Body
from .static_page import FOLDER, StaticPage

if TYPE_CHECKING:
    from ...core.engine.engine import Engine
    from ...radix_cache import PrefixCache
    from ...radix_cache.node import Node

PAGE = FOLDER / "index.html"
PERIOD_SECONDS = 1.0
STEPS_SECONDS = 0.25  # between two events with the steps since the last one
MAX_STEPS = 256  # in one event
MAX_BOXES = 400  # of the icicle, without the paths of the latest requests
MAX_LEVELS = 16
MAX_REQUESTS = 16  # the latest, whose paths are reported
MAX_PATH = 64  # boxes of one path


class RecentRequest(NamedTuple):
    """A request whose path through the prefix cache is told."""

    request_id: str
    tokens: array[int]  # the request's own; read only
    namespace: str | None
    prompt_len: int
    num_cached: int  # tokens of the prompt

    @classmethod
    def of(cls, request: EngineRequest) -> RecentRequest:
        """The record of a request, which does not hold the request itself."""
        cached = request.usage.cached_tokens
        about = (request.request_id, request.tokens, request.namespace)
        return cls(*about, request.prompt_len, cached)


class Watched(EngineObserver):
    """The latest steps and the latest requests that ended. Belongs to the event loop."""

    def __init__(self) -> None:
        self.num_steps = 0  # with tokens
        self.finished: deque[RecentRequest] = deque(maxlen=MAX_REQUESTS)
        self._steps: deque[dict[str, int]] = deque(maxlen=MAX_STEPS)
        self._step: dict[str, int] = {}  # tokens by drafter; "" for the target's own

    def observe_delta(self, request: EngineRequest, delta: Delta, now: float) -> None:  # noqa: ARG002
        """Count the tokens of the last step; keep what ended."""
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
        """End the step before this one: a step's tokens are delivered while the next one runs."""
        self._end_step()

    def since(self, num_steps: int) -> list[dict[str, int]]:
        """The steps after the first ``num_steps``, `MAX_STEPS` at most."""
        self._end_step()
        count = min(self.num_steps - num_steps, len(self._steps))
        return [self._steps[index] for index in range(-count, 0)]

    def _end_step(self) -> None:
        if self._step:
            self.num_steps += 1
            self._steps.append(self._step)
            self._step = {}


class Dashboard:
    """The page and its events. One snapshot a period serves all who watch."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._watched: Watched | None = None  # while somebody watches
        self._num_watchers = 0
        self._latest: tuple[float, bytes] = (float("-inf"), b"")
        self._page = StaticPage(PAGE)

    @property
    def routes(self) -> list[Route]:
        """Routes of the page; empty with ``--no-ui``."""
        if not self.service.settings.ui:
            return []
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/ui/events", self.events, methods=["GET"]),
        ]

    async def page(self, _request: Request) -> Response:
        """The live page, one file."""
        return self._page.answer()

    async def events(self, _request: Request) -> Response:
        """The state of the engine, once a second, and its steps four times a second."""
        limits = self.service.settings.limits
        return EventStream(self._events(), close=_nothing, ping_seconds=limits.ping_seconds)

    async def _events(self) -> AsyncGenerator[bytes]:
        watched = self.watch()
        try:
            seen, ticks = watched.num_steps, round(PERIOD_SECONDS / STEPS_SECONDS)
            while not self.service.draining:
                yield self._snapshot(watched)
                for _ in range(ticks):
                    await asyncio.sleep(STEPS_SECONDS)
                    if steps := watched.since(seen):
                        seen = watched.num_steps
                        yield event({"latest_steps": steps})
        finally:
            self.unwatch()

    def watch(self) -> Watched:
        """Observe the engine, from the first watcher to the last."""
        if self._watched is None:
            self._watched = Watched()
            self.service.llm.engine.metrics.observers.append(self._watched)
        self._num_watchers += 1
        return self._watched

    def unwatch(self) -> None:
        """End what one `watch` began."""
        self._num_watchers -= 1
        if not self._num_watchers and self._watched is not None:
            self.service.llm.engine.metrics.observers.remove(self._watched)
            self._watched = None

    def _snapshot(self, watched: Watched) -> bytes:
        now = asyncio.get_running_loop().time()
        if now - self._latest[0] >= PERIOD_SECONDS / 2:
            llm = self.service.llm
            sampling = llm.built.sampling_defaults.in_force
            about = {"time": now, "model": self.service.model, "sampling": sampling}
            body = {**about, **overview(llm.engine, watched.finished)}
            self._latest = (now, event(body))
        return self._latest[1]


def overview(engine: Engine, finished: Iterable[RecentRequest] = ()) -> Body:
    """Counts of an engine since its start, and its state now. O(`MAX_BOXES`)."""
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    running = map(RecentRequest.of, islice(scheduler.running.values(), MAX_REQUESTS))
    paths = [(each, path(cache, each)) for each in chain(finished, running)]
    kept = {id(node) for _, nodes in paths for node in nodes}
    boxes, places = icicle([*cache.tree.roots()], kept)
    stats = engine.metrics.spec_stats
    free, cached, pinned = cache.num_free_pages, cache.num_evictable_pages, cache.num_pinned_pages
    return {
        "running": len(scheduler.running),
        "max_running": scheduler.limits.max_running,
        "waiting": len(scheduler.waiting),
        "tokens": stats.num_tokens,
        "steps": stats.num_steps,
        "drafts": stats.num_drafts,
        "trees": stats.num_trees,
        "num_proposed": stats.num_proposed,
        "acceptance_length": stats.acceptance_length,
        "proposed": dict(stats.proposed),
        "accepted": dict(stats.accepted),
        "prefix_queries": cache.num_queries,
        "prefix_hits": cache.num_hits,
        "pages": {
            "held": max(0, cache.num_total_pages - free - cached - pinned),
            "pinned": pinned,
            "cached": cached,
            "free": free,
        },
        "parts": engine.metrics.part_seconds(),
        "row": row_price(engine),
        "tree": boxes,
        "requests": [
            {
                "id": each.request_id,
                "prompt_tokens": each.prompt_len,
                "cached_tokens": each.num_cached,
                "boxes": [places[id(node)] for node in nodes],
            }
            for each, nodes in paths
        ],
    }


def path(cache: PrefixCache, request: RecentRequest) -> list[Node]:
    """The first `MAX_PATH` nodes that hold a request's tokens. O(its tokens), at memcmp speed."""
    found = cache.tree.match(request.tokens, namespace=request.namespace)
    return [] if found.node is None else found.node.path()[1 : 1 + MAX_PATH]


def row_price(engine: Engine) -> Body | None:
    """The cost of one more row in the next step, which the controller uses; None: unknown.

    In seconds, and in tokens that the engine would serve in that time. A draft token is verified
    where the chance that it is accepted exceeds the latter.
    """
    from ...draft.speculator import DraftSpeculator

    guarded = engine.scheduler.speculator
    speculator = guarded.inner if isinstance(guarded, GuardedSpeculator) else guarded
    if not isinstance(speculator, DraftSpeculator) or not speculator.controller.costs.is_ready:
        return None
    costs, count = speculator.controller.costs, max(1, len(engine.scheduler.running))
    seconds = float(costs.row_seconds(count, 1, count)[-1])
    return {"seconds": seconds, "tokens": seconds * costs.rate(count)}


def icicle(roots: list[Node], kept: Container[int] = ()) -> tuple[list[list[int]], dict[int, int]]:
    """Boxes of a tree: place, level, width, tokens, whether in use, hits; and the box of each node.

    A parent spans its children. Boxes beyond `MAX_BOXES` or `MAX_LEVELS` are left out, unless the
    id of their node is in ``kept``, as those of all above it are.
    """
    boxes: list[list[int]] = []
    places: dict[int, int] = {}
    start = 0
    for node in (child for root in roots for child in root.children.values()):
        start += _lay(node, 0, start, boxes, places, kept)
    return boxes, places


def _lay(
    node: Node,
    level: int,
    start: int,
    boxes: list[list[int]],
    places: dict[int, int],
    kept: Container[int],
) -> int:
    """Append the boxes of a node and of what stands below it; how wide they are."""
    if (len(boxes) >= MAX_BOXES or level >= MAX_LEVELS) and id(node) not in kept:
        return 0
    box = [start, level, 0, len(node.key), int(node.ref_count > 0), node.num_hits]
    places[id(node)] = len(boxes)
    boxes.append(box)
    width = 0
    for child in node.children.values():
        width += _lay(child, level + 1, start + width, boxes, places, kept)
    box[2] = max(1, width)
    return box[2]


def _nothing() -> None:
    """Do nothing: a watcher holds no resource."""

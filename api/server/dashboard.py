"""GET /: a page to talk to the model and watch the engine; GET /ui/events: what the page shows.

The page is one file without a build step. It needs no key itself: it asks the user for one, keeps
it in the browser and sends it. The events have counts and sizes, never a text or a token.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncGenerator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.scheduling.guarded_speculator import GuardedSpeculator
from ..serving.serving_context import Service
from ..serving.sse import EventStream, event
from ..types.results import Body

if TYPE_CHECKING:
    from ...core.engine.engine import Engine
    from ...radix_cache.node import Node

PAGE = Path(__file__).parent / "ui" / "index.html"
PERIOD_SECONDS = 1.0
MAX_BOXES = 400  # of the icicle
MAX_LEVELS = 16


class Dashboard:
    """The page and its events. One snapshot a period serves all who watch."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._latest: tuple[float, bytes] = (float("-inf"), b"")

    @property
    def routes(self) -> list[Route]:
        """None with ``--no-ui``."""
        if not self.service.settings.ui:
            return []
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/ui/events", self.events, methods=["GET"]),
        ]

    async def page(self, _request: Request) -> Response:
        """The live page, one file."""
        return Response(self._html, headers=self._headers)

    async def events(self, _request: Request) -> Response:
        """The state of the engine, once a second."""
        limits = self.service.settings.limits
        return EventStream(self._events(), close=_nothing, ping_seconds=limits.ping_seconds)

    async def _events(self) -> AsyncGenerator[bytes]:
        while not self.service.draining:
            yield self._snapshot()
            await asyncio.sleep(PERIOD_SECONDS)

    def _snapshot(self) -> bytes:
        now = asyncio.get_running_loop().time()
        if now - self._latest[0] >= PERIOD_SECONDS / 2:
            llm = self.service.llm
            sampling = llm.built.sampling_defaults.in_force
            about = {"time": now, "model": self.service.model, "sampling": sampling}
            body = {**about, **overview(llm.engine)}
            self._latest = (now, event(body))
        return self._latest[1]

    @cached_property
    def _html(self) -> bytes:
        return PAGE.read_bytes()

    @cached_property
    def _headers(self) -> dict[str, str]:
        policy = (
            f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
            f"form-action 'none'; frame-ancestors 'none'; script-src '{self._hash('script')}'; "
            f"style-src '{self._hash('style')}'"
        )
        return {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    def _hash(self, tag: str) -> str:
        """What a policy calls the one inline script or style of the page."""
        found = re.search(f"<{tag}>(.*?)</{tag}>".encode(), self._html, re.DOTALL)
        digest = hashlib.sha256(found[1] if found else b"").digest()
        return f"sha256-{base64.b64encode(digest).decode()}"


def overview(engine: Engine) -> Body:
    """Counts of an engine since its start, and its state now. O(`MAX_BOXES`)."""
    scheduler, cache = engine.scheduler, engine.scheduler.cache
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
        "tree": icicle([*cache.tree.roots()]),
    }


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


def icicle(roots: list[Node]) -> list[list[int]]:
    """Boxes of a tree: place, level, width, tokens, whether in use, hits.

    A parent spans its children.

    Those beyond `MAX_BOXES` or `MAX_LEVELS` are left out.
    """
    boxes: list[list[int]] = []
    start = 0
    for node in (child for root in roots for child in root.children.values()):
        start += _lay(node, 0, start, boxes)
    return boxes


def _lay(node: Node, level: int, start: int, boxes: list[list[int]]) -> int:
    """Append the boxes of a node and of what stands below it; how wide they are."""
    if len(boxes) >= MAX_BOXES or level == MAX_LEVELS:
        return 0
    box = [start, level, 0, len(node.key), int(node.ref_count > 0), node.num_hits]
    boxes.append(box)
    width = 0
    for child in node.children.values():
        width += _lay(child, level + 1, start + width, boxes)
    box[2] = max(1, width)
    return box[2]


def _nothing() -> None:
    """Nothing is held for a watcher."""

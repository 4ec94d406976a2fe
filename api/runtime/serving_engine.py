"""ServingEngine: the engine as `api/` knows it.

`core.engine.engine.Engine` is one. Nothing outside of `api/build` reads more of an engine than
this, so that the engine may also be in another process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol

from prometheus_client.registry import Collector

from ...core.engine.inbox import TokenStream
from ...core.interface.request import Request
from ...core.telemetry.observers import EngineObserver
from ...core.telemetry.overview import RecentRequest
from ..types.results import Body


class RequestLimits(Protocol):
    """Bounds on the requests that an engine accepts at once."""

    @property
    def max_running(self) -> int:
        """Requests that take part in steps."""

    @property
    def max_queued(self) -> int:
        """Requests that wait."""


class ServingMetrics(Protocol):
    """An engine's metrics, and what follows its requests and steps."""

    @property
    def observers(self) -> list[EngineObserver]:
        """The observers, called in this order; callers add and remove their own."""

    @property
    def registry(self) -> Collector:
        """All metrics, for other formats and names."""

    async def refresh(self) -> None:
        """Fetch what other processes count, for `render` and `registry`."""

    def render(self) -> tuple[bytes, str]:
        """Body and content type, in the text format of Prometheus."""


class ServingEngine(Protocol):
    """Serves requests from `start` to `close`. Belongs to one event loop."""

    # -- its state

    @property
    def alive(self) -> bool:
        """Whether it serves; false before `start`, after `close` and when it failed."""

    @property
    def hung(self) -> bool:
        """Whether a step did not return in time and its thread was abandoned."""

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended it, if one did."""

    @property
    def draining(self) -> bool:
        """Whether `close` was called."""

    @property
    def readiness(self) -> str | None:
        """Why it cannot take new requests now; None if it can. Cheap."""

    @property
    def now(self) -> float:
        """Seconds on the clock by which arrivals, pins and evictions are timed."""

    @property
    def limits(self) -> RequestLimits:
        """Bounds on the requests that it accepts."""

    @property
    def page_size(self) -> int:
        """Tokens of a page of the prefix cache."""

    @property
    def num_pages(self) -> int:
        """Pages of the KV pool."""

    @property
    def metrics(self) -> ServingMetrics:
        """Metrics, and the observers of requests and steps."""

    # -- requests

    def submit(self, request: Request) -> TokenStream:
        """Accept a request; its answer arrives on the stream.

        Raises `EngineDead`, `Unavailable`, `QueueFull`, `PromptTooLong` and `InvalidRequest`.
        """

    def check(self, request: Request) -> None:
        """Refuse a request that `submit` would refuse even with an empty queue; submits nothing.

        Raises `PromptTooLong` and `InvalidRequest`.
        """

    def abort(self, request_id: str) -> None:
        """End a request between two steps; unknown and finished ones are ignored."""

    # -- life

    async def start(self) -> None:
        """Start serving on the running event loop. Raises `EngineDead` after `close`."""

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, wait for running ones, abort those that are left; idempotent."""

    # -- the cache. What is asked is awaited: an engine in another process answers by a message.

    async def flush_cache(self, *namespaces: str | None) -> int:
        """Drop unused cached prefixes of these namespaces, of all when none is named.

        Returns how many pages that freed.
        """

    async def flush_prefix(self, tokens: array[int], namespace: str | None = None) -> int:
        """Drop what begins with these tokens and is not in use, pins or not.

        Returns how many pages that freed. Raises `InvalidRequest` for tokens that do not fill a
        page.
        """

    async def cache_info(self, namespace: str | None = None) -> Body:
        """Occupancy and hit counters of the prefix cache and its tiers, in pages and tokens."""

    # -- reports

    async def overview(self, finished: Iterable[RecentRequest] = ()) -> Body:
        """Counts since the start and the state now, with the paths of requests in the cache.

        Paths are reported of requests that run, and of ``finished`` ones.
        """

    async def audit(self) -> Body:
        """Check every page and request between two steps. Raises `EngineDead`."""

    def report(self, reason: str) -> Body:
        """Describe the engine as a crash dump does; any thread may call it, whatever is stuck."""

    def dump(self, report: Body) -> None:
        """Write a report to the dump folder, if there is one."""

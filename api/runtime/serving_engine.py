"""ServingEngine: the engine's interface for `api/`.

`core.engine.engine.Engine` implements it. Only `api/build` uses more of an engine, so the engine
may also run in another process.
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
    """Limits on the requests that an engine accepts at once."""

    @property
    def max_running(self) -> int:
        """Maximum number of requests that are scheduled at once."""

    @property
    def max_queued(self) -> int:
        """Maximum number of queued requests."""


class ServingMetrics(Protocol):
    """An engine's metrics, and observers of its requests and steps."""

    @property
    def observers(self) -> list[EngineObserver]:
        """The observers, in the order of their calls. Callers add and remove their own."""

    @property
    def registry(self) -> Collector:
        """All metrics, for export under other names and formats."""

    async def refresh(self) -> None:
        """Fetch the counts of other processes, for `render` and `registry`."""

    def render(self) -> tuple[bytes, str]:
        """Return body and content type in the Prometheus text format."""


class ServingEngine(Protocol):
    """Serves requests from `start` to `close`. Belongs to one event loop."""

    # -- state

    @property
    def alive(self) -> bool:
        """Whether it serves: false before `start`, after `close` and after a failure."""

    @property
    def hung(self) -> bool:
        """Whether a step did not return in time and its thread was abandoned."""

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the engine, if any."""

    @property
    def draining(self) -> bool:
        """Whether `close` was called."""

    @property
    def readiness(self) -> str | None:
        """Why it cannot accept new requests now; None if it can. Cheap."""

    @property
    def now(self) -> float:
        """The engine's clock for arrivals, pins and evictions, in seconds."""

    @property
    def limits(self) -> RequestLimits:
        """Limits on the requests that it accepts."""

    @property
    def page_size(self) -> int:
        """Tokens per page of the prefix cache."""

    @property
    def num_pages(self) -> int:
        """Number of pages in the KV pool."""

    @property
    def metrics(self) -> ServingMetrics:
        """Metrics, and the observers of requests and steps."""

    # -- requests

    def submit(self, request: Request) -> TokenStream:
        """Accept a request. Return the stream on which its answer arrives.

        Raises `EngineDead`, `Unavailable`, `QueueFull`, `PromptTooLong` and `InvalidRequest`.
        """

    def check(self, request: Request) -> None:
        """Raise the error of a request that `submit` would always refuse; submit nothing.

        Raises `PromptTooLong` and `InvalidRequest`.
        """

    def abort(self, request_id: str) -> None:
        """Abort a request between two steps. Unknown and finished ones are ignored."""

    # -- start and end

    async def start(self) -> None:
        """Start serving on the running event loop. Raises `EngineDead` after `close`."""

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, wait for running ones, abort the remaining ones. Idempotent."""

    # -- cache. These methods are async since an engine in another process answers by message.

    async def flush_cache(self, *namespaces: str | None) -> int:
        """Drop unused cached prefixes of the given namespaces, or of all without arguments.

        Returns the number of pages freed.
        """

    async def flush_prefix(self, tokens: array[int], namespace: str | None = None) -> int:
        """Drop cached prefixes that begin with these tokens and are not in use, pinned or not.

        Returns the number of pages freed. Raises `InvalidRequest` if the tokens do not fill a page.
        """

    async def cache_info(self, namespace: str | None = None) -> Body:
        """Return occupancy and hit counters of the prefix cache and its tiers, in pages and
        tokens.
        """

    # -- reports

    async def overview(self, finished: Iterable[RecentRequest] = ()) -> Body:
        """Return counts since the start and the present state.

        Includes the cached paths of running requests and of the ``finished`` ones.
        """

    async def audit(self) -> Body:
        """Check every page and request between two steps and return the result. Raises
        `EngineDead`.
        """

    def report(self, reason: str) -> Body:
        """Return a description of the engine, as in a crash dump. Safe from any thread at any
        time.
        """

    def dump(self, report: Body) -> None:
        """Write a report to the dump folder, if one is configured."""

"""ServingEngine: the engine's interface for `api/`.

`core.engine.engine.Engine` implements it. Apart from `api/build`, code in `api/` uses only this
interface, so the engine may also run in another process.
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
        """The observers, in the order in which they are called.

        Other code adds its observers to the list and removes them.
        """

    @property
    def registry(self) -> Collector:
        """All metrics, for export under other names and formats."""

    async def refresh(self) -> None:
        """Fetch the counts of other processes, for `render` and `registry`."""

    def render(self) -> tuple[bytes, str]:
        """Return the metrics in the Prometheus text format, and their content type."""


class ServingEngine(Protocol):
    """An engine that serves requests from `start` to `close`. Belongs to one event loop."""

    # -- state

    @property
    def alive(self) -> bool:
        """Whether the engine serves: false before `start`, after `close` and after a failure."""

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
        """Why the engine cannot accept new requests now; None if it can. O(1)."""

    @property
    def now(self) -> float:
        """The present time on the engine's clock, in seconds."""

    @property
    def limits(self) -> RequestLimits:
        """Limits on the requests that the engine accepts."""

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
        """Abort a request between two steps. Unknown and finished requests are ignored."""

    def expect_turn(self, session: str, label: str, namespace: str | None = None) -> None:
        """Give the wait after a session's last turn a label, such as the name of a tool.

        The session's pages stay pinned for a time that fits earlier waits with the same label.
        """

    # -- start and end

    async def start(self) -> None:
        """Start serving on the running event loop. Raises `EngineDead` after `close`."""

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, wait for running ones, abort the remaining ones. Idempotent.

        Running requests have ``drain_seconds`` to finish.
        """

    # -- cache. These methods are async since an engine in another process answers by message.

    async def flush_cache(self, *namespaces: str | None) -> int:
        """Drop unused cached prefixes in ``namespaces``; all if no namespace is given.

        Return the number of pages freed.
        """

    async def flush_prefix(self, tokens: array[int], namespace: str | None = None) -> int:
        """Drop cached prefixes that begin with these tokens and are not in use, even if pinned.

        Return the number of pages freed. Raises `InvalidRequest` if the tokens do not fill a page.
        """

    async def end_session(self, session: str) -> bool:
        """Unpin a session's pages and let them be evicted first; return whether it had any.

        Pages of turns that have not ended are evicted first, too, once the turns end.
        """

    async def room_for(self, request: Request) -> int:
        """Return how many pages no pin and no request holds where `submit` would send a request.

        The request must not have been submitted.
        """

    async def cache_info(self, namespace: str | None = None) -> Body:
        """Return the occupancy and the hit counters of the prefix cache and its tiers.

        They are in pages and tokens.
        """

    # -- reports

    async def overview(self, finished: Iterable[RecentRequest] = ()) -> Body:
        """Return counters since the start of the engine, and its present state.

        They include the cached paths of running requests and of the requests in ``finished``.
        """

    async def audit(self) -> Body:
        """Check every page and request between two steps, and return the result.

        Raises `EngineDead`.
        """

    def report(self, reason: str) -> Body:
        """Return a description of the engine, as in a crash dump.

        May be called from any thread at any time.
        """

    def dump(self, report: Body) -> None:
        """Write a report to the dump folder, if one is configured."""

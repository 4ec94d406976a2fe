"""Prometheus metrics of the HTTP server: requests by route, streams, connections, event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from ...core.telemetry.families import DURATIONS, PREFIX, Histograms, counters, gauge
from ..runtime.adapters import Adapters
from ..types.request_context import RequestContext
from .event_loop_lag import LoopLag

REASONS = {  # refusal reason by error code
    "queue_full": "queue_full",
    "context_length_exceeded": "too_long",
    "deadline_exceeded": "deadline",
    "body_too_large": "too_large",
    "invalid_api_key": "unauthorized",
    "admin_key_needed": "unauthorized",
    "too_many_connections": "connections",
}
DRAINING, NOT_READY, INVALID = "draining", "not_ready", "invalid"


class ServerMetrics(Collector):
    """Metrics of the HTTP server. Readiness and draining are read at scrape time.

    Labels have few values: the templates of routes, and fixed lists of methods and reasons.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.lag = LoopLag()
        self.is_ready: Callable[[], bool] = lambda: False
        self.is_draining: Callable[[], bool] = lambda: False
        self.num_connections: Callable[[], int] = lambda: 0
        self.causes: Mapping[str, float] = {}  # causes of cache misses; set by the server
        self.adapters: Callable[[], Adapters] = Adapters  # set by the server
        self._num_open = self._num_streams = 0
        self._requests: Counter[tuple[str, str, str]] = Counter()  # route, method, status
        self._refusals: dict[str, float] = dict.fromkeys(
            [*REASONS.values(), DRAINING, NOT_READY, INVALID], 0
        )
        self._seconds = Histograms(
            "http_request_duration_seconds",
            "Seconds from the request's header to the answer's last byte",
            DURATIONS,
            "route",
        )
        for collector in (self, self._seconds, self.lag):
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)

    # methods of the protocol `request_log.Counts`

    def began(self) -> None:
        """Count a request that begins."""
        self._num_open += 1

    def responded(self, request: RequestContext) -> None:
        """Count a stream when its response headers are sent."""
        self._num_streams += request.streams

    def ended(self, request: RequestContext, seconds: float) -> None:
        """Count a request that has ended, with its duration in seconds."""
        self._num_open -= 1
        self._num_streams -= request.streams
        self._requests[request.route, request.method, str(request.status)] += 1
        self._seconds.of[request.route].observe(seconds)
        reason = self._reason(request)
        if reason is not None:
            self._refusals[reason] += 1

    def _reason(self, request: RequestContext) -> str | None:
        """Return why a request was refused before it was computed; None if it was not refused."""
        error = request.error
        if error is None or request.is_probe:
            return None
        if error.code in REASONS:
            return REASONS[error.code]
        if error.status == 503:
            return DRAINING if self.is_draining() else NOT_READY
        return INVALID if error.status < 500 else None

    # -- for Prometheus -------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. Called by the registry."""
        yield gauge("ready", "1 while /ready returns 200", self.is_ready())
        yield gauge("http_connections", "Open connections", self.num_connections())
        yield gauge("http_requests_in_flight", "HTTP requests in progress", self._num_open)
        yield gauge("http_streams", "Event streams in progress", self._num_streams)
        yield counters(
            "request_refusals",
            "HTTP requests that were rejected, by reason",
            "reason",
            self._refusals,
        )
        yield counters(
            "prefix_cache_prompts",
            "Prompts by the reason for a prefix cache miss",
            "cause",
            self.causes,
        )
        adapters = self.adapters()
        yield gauge("lora_loaded", "LoRA adapters in memory", adapters.num_loaded)
        yield counters(
            "lora_requests",
            "Requests for each LoRA adapter since it was loaded",
            "adapter",
            {each.name: each.num_requests for each in adapters.served},
        )
        yield self._by_route()

    def _by_route(self) -> Metric:
        family = CounterMetricFamily(
            f"{PREFIX}http_requests", "HTTP requests answered", labels=["route", "method", "status"]
        )
        for labels, count in self._requests.items():
            family.add_metric(labels, count)
        return family

    def render(self) -> bytes:
        """Return the metrics in the Prometheus text format; they are appended to the engine's."""
        return generate_latest(self.registry)

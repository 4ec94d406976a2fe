"""Prometheus metrics of one engine. Names follow vLLM's where it has one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .request import Delta, Request
from .scheduler import Scheduler
from .step import StepOutput

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class _Levels(Collector):
    """What the scheduler and the cache know by themselves, read when scraped."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterable[Metric]:
        """Gauges and counters as they stand now; called by the registry."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        yield from _gauge("num_requests_running", "Requests that take part in steps",
                          len(scheduler.running))  # fmt: skip
        yield from _gauge("num_requests_waiting", "Requests in the queue", len(scheduler.waiting))
        yield from _gauge("kv_cache_usage_perc", "Share of KV pages that are held", cache.usage)
        yield from _counter("prefix_cache_queries", "Prompt tokens looked up", cache.num_queries)
        yield from _counter("prefix_cache_hits", "Prompt tokens found", cache.num_hits)
        yield from _counter("num_preemptions", "Preempted requests", scheduler.num_preemptions)


def _gauge(name: str, text: str, value: float) -> Iterator[Metric]:
    yield GaugeMetricFamily(f"foretoken:{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Iterator[Metric]:
    yield CounterMetricFamily(f"foretoken:{name}", text, value=value)


class EngineMetrics:
    """Counters and histograms that the engine feeds; `render` is the body of ``/metrics``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Levels(scheduler))
        self._last_token_times: dict[str, float] = {}
        self._make_token_counters()
        self._make_histograms()

    def _make_token_counters(self) -> None:
        self._prompt_tokens = self._count("prompt_tokens", "Prompt tokens taken")
        self._generation_tokens = self._count("generation_tokens", "Tokens served")
        self._success = self._count("request_success", "Finished requests", "finished_reason")
        self._failed = self._count("request_failure", "Requests that ended with an error")
        self._drafts = self._count("spec_decode_num_drafts", "Drafts verified")
        self._proposed = self._count("spec_decode_num_draft_tokens", "Draft tokens verified")
        self._accepted = self._count("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self._accepted_at = self._count(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted by position", "position"
        )
        self._accepted_from = self._count(
            "spec_decode_num_accepted_tokens_per_source", "Accepted by source", "source"
        )

    def _make_histograms(self) -> None:
        self._first = self._time("time_to_first_token_seconds", "Arrival to first token")
        self._between = self._time("inter_token_latency_seconds", "Time between two tokens")
        self._per_token = self._time("time_per_output_token_seconds", "Mean of one answer")
        self._whole = self._time("e2e_request_latency_seconds", "Arrival to the end")
        self._queued = self._time("request_queue_time_seconds", "Arrival to the first step")
        self._steps = self._time("step_seconds", "One step of the model thread")
        self._parts = self._time("step_part_seconds", "A part of a step", "part")

    def _count(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"foretoken:{name}", text, labels, registry=self.registry)

    def _time(self, name: str, text: str, *labels: str) -> Histogram:
        full_name = f"foretoken:{name}"
        return Histogram(full_name, text, labels, buckets=_SECONDS, registry=self.registry)

    def observe_step(self, output: StepOutput, seconds: float) -> None:
        """One step of the model thread."""
        self._steps.observe(seconds)
        for part, part_seconds in output.times.items():
            self._parts.labels(part).observe(part_seconds)

    def _observe_draft(self, delta: Delta) -> None:
        self._drafts.inc()
        self._proposed.inc(delta.num_proposed)
        for position, source in enumerate(delta.accepted_sources):
            self._accepted.inc()
            self._accepted_at.labels(str(position)).inc()
            self._accepted_from.labels(source).inc()

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """Tokens that were served, and the end."""
        if delta.token_ids:
            self._observe_tokens(request, len(delta.token_ids), now)
        if delta.num_proposed:
            self._observe_draft(delta)
        if delta.terminal:
            self._last_token_times.pop(request.request_id, None)
            self._observe_end(request, delta)

    def _observe_tokens(self, request: Request, num_tokens: int, now: float) -> None:
        self._generation_tokens.inc(num_tokens)
        last = self._last_token_times.get(request.request_id)
        self._last_token_times[request.request_id] = now
        if last is None:
            self._first.observe(request.usage.time_to_first_token)
            self._queued.observe(request.usage.queue_time)
            self._prompt_tokens.inc(request.prompt_len)
            return
        for _ in range(num_tokens):  # a step's tokens share the time it took
            self._between.observe((now - last) / num_tokens)

    def _observe_end(self, request: Request, delta: Delta) -> None:
        if delta.finish_reason is None:
            self._failed.inc()
            return
        usage = request.usage
        self._success.labels(delta.finish_reason.value).inc()
        self._whole.observe(usage.total_time)
        if usage.completion_tokens > 1:
            decode_time = usage.total_time - usage.time_to_first_token
            self._per_token.observe(decode_time / (usage.completion_tokens - 1))

    def render(self) -> tuple[bytes, str]:
        """Body and content type, in the text format of Prometheus."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

"""Prometheus metrics of one engine. Names follow vLLM's where it has one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .report import Tally
from .request import Delta, Request
from .scheduler import Scheduler
from .step import StepOutput

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 65)


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
        yield from _gauge(
            "kv_cache_pinned_pages", "KV pages that pins keep", cache.num_pinned_pages
        )
        yield from _counter("prefix_cache_queries", "Prompt tokens looked up", cache.num_queries)
        yield from _counter("prefix_cache_hits", "Prompt tokens found", cache.num_hits)
        yield from _counter("num_preemptions", "Preempted requests", scheduler.num_preemptions)


def _gauge(name: str, text: str, value: float) -> Iterator[Metric]:
    yield GaugeMetricFamily(f"foretoken:{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Iterator[Metric]:
    yield CounterMetricFamily(f"foretoken:{name}", text, value=value)


class _Served(Collector):
    """The tally of tokens and speculation in Prometheus' words when scraped: steps stay cheap."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def collect(self) -> Iterable[Metric]:
        """As it stands now; called by the registry."""
        tally = self._tally
        yield from _counter("generation_tokens", "Tokens served", tally.num_tokens)
        for name, text, value in (
            ("drafts", "Drafts verified", tally.num_drafts),
            ("draft_tokens", "Draft tokens verified", tally.num_proposed),
            ("accepted_tokens", "Draft tokens served", tally.accepted.total()),
        ):
            yield from _counter(f"spec_decode_num_{name}", text, value)
        yield from self._by_label()
        lengths = _Weighted("spec_decode_acceptance_length", "Tokens of a step with a draft",
                            _LENGTHS)  # fmt: skip
        for length, count in tally.lengths.items():
            lengths.observe(length, count)
        yield from lengths.collect()

    def _by_label(self) -> Iterator[Metric]:
        tally = self._tally
        depth = max([*tally.path_lens, *tally.runs], default=0)
        for name, text, label, values in (
            ("draft_tokens_per_pos", "Leading paths that reach a position", "position",
             _reaching(tally.path_lens, depth)),
            ("accepted_tokens_per_pos", "Accepted by position", "position",
             _reaching(tally.runs, depth)),
            ("draft_tokens_per_source", "Verified by source", "source", tally.proposed),
            ("accepted_tokens_per_source", "Served by source", "source", tally.accepted),
        ):  # fmt: skip
            yield _counters(f"spec_decode_num_{name}", text, label, values)


def _reaching(lens: Mapping[int, int], depth: int) -> dict[str, int]:
    """How many of the runs with these lengths have a token at each position."""
    return {
        str(position): sum(count for length, count in lens.items() if length > position)
        for position in range(depth)
    }


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"foretoken:{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


class _Weighted(Collector):
    """A histogram that takes many equal values in one call, which the library's own cannot."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = f"foretoken:{name}", text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        """Add ``value`` so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        """As it stands now, each bucket with all that is at most its bound."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class EngineMetrics:
    """Counters and histograms that the engine feeds; `render` is the body of ``/metrics``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.registry = CollectorRegistry()
        self.tally = Tally()
        self.registry.register(_Levels(scheduler))
        self.registry.register(_Served(self.tally))
        self._last_token_times: dict[str, float] = {}
        self._make_token_counters()
        self._make_histograms()

    def _make_token_counters(self) -> None:
        self._prompt_tokens = self._count("prompt_tokens", "Prompt tokens taken")
        self._success = self._count("request_success", "Finished requests", "finished_reason")
        self._failed = self._count("request_failure", "Requests that ended with an error")

    def _make_histograms(self) -> None:
        self._first = self._time("time_to_first_token_seconds", "Arrival to first token")
        self._between = _Weighted("inter_token_latency_seconds", "Between two tokens", _SECONDS)
        self.registry.register(self._between)
        self._per_token = self._time("time_per_output_token_seconds", "Mean of one answer")
        self._whole = self._time("e2e_request_latency_seconds", "Arrival to the end")
        self._queued = self._time("request_queue_time_seconds", "Arrival to the first step")
        self._steps = self._time("step_seconds", "One step of the model thread")
        self._parts = self._time("step_part_seconds", "A part of a step", "part")
        self._step_parts: dict[str, Histogram] = {}  # by label: looking one up is dear

    def _count(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"foretoken:{name}", text, labels, registry=self.registry)

    def _time(self, name: str, text: str, *labels: str) -> Histogram:
        full_name = f"foretoken:{name}"
        return Histogram(full_name, text, labels, buckets=_SECONDS, registry=self.registry)

    def observe_step(self, output: StepOutput, seconds: float) -> None:
        """One step of the model thread."""
        self._steps.observe(seconds)
        self.tally.observe_rows(output.rows)
        for part, part_seconds in output.times.items():
            if part not in self._step_parts:
                self._step_parts[part] = self._parts.labels(part)
            self._step_parts[part].observe(part_seconds)

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """Tokens that were served, and the end."""
        if delta.token_ids:
            self._observe_tokens(request, len(delta.token_ids), now)
            self.tally.observe_delta(delta)
        if delta.terminal:
            self._last_token_times.pop(request.request_id, None)
            self._observe_end(request, delta)

    def _observe_tokens(self, request: Request, num_tokens: int, now: float) -> None:
        last = self._last_token_times.get(request.request_id)
        self._last_token_times[request.request_id] = now
        if last is None:
            self._first.observe(request.usage.time_to_first_token)
            self._queued.observe(request.usage.queue_time)
            self._prompt_tokens.inc(request.prompt_len)
            return
        self._between.observe((now - last) / num_tokens, num_tokens)  # they share the time

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

"""Prometheus metrics of one engine. Names follow vLLM's where it has one.

What a step counts is an addition to a list or a number: the library's own instruments take a lock
for each observation, a dozen a step, and the event loop is the only writer. What others count
already is read by collectors when Prometheus scrapes, at no cost to a step.
"""

from __future__ import annotations

import logging
import platform
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import ParamSpec, Protocol, TypeVar, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..._version import __version__
from ...radix_cache import PrefixCache, StateSlots
from ..errors import DeadlineExceeded
from ..interface.output import StepOutput
from ..interface.plan import StepPlan
from ..interface.request import Delta, FinishReason, Request
from ..interface.tiers import KVTiers
from ..interface.transfers import Refusal
from ..scheduling.chunk_budget import num_step_tokens
from ..scheduling.page_loads import PageLoads
from ..scheduling.scheduler import Scheduler
from .spec_decode_stats import SpecDecodeStats

logger = logging.getLogger(__name__)
PREFIX = "foretoken:"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 65)
PARTS = ("draft", "forward", "verify", "host")
DEADLINE = "deadline"
C = TypeVar("C", bound=Collector)
P = ParamSpec("P")


# -- plain numbers as families that Prometheus reads -----------------------------------------------


def gauge(name: str, text: str, value: float) -> Metric:
    """A value as it is now."""
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    """A value that only grows."""
    return CounterMetricFamily(PREFIX + name, text, value=value)


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """One such value for each value of a label."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


class Buckets:
    """The observations of one histogram, by bound. Belongs to one thread."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``value`` ``count`` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def sum(self) -> float:
        """All observations together."""
        return self._sum

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Each bucket with all that is at most its bound, and the sum."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True)), self._sum


class Histogram(Buckets, Collector):
    """A histogram without labels."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self._name, self._text = PREFIX + name, text

    def collect(self) -> Iterable[Metric]:
        """Return the histogram's present value."""
        buckets, total = self.read()
        yield HistogramMetricFamily(self._name, self._text, buckets, total)


class Histograms(Collector):
    """A histogram for each value of one label, of which there must be few."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], label: str) -> None:
        self._name, self._text, self._label = PREFIX + name, text, label
        self.of: defaultdict[str, Buckets] = defaultdict(lambda: Buckets(bounds))

    def collect(self) -> Iterator[Metric]:
        """Return the present value of each label's histogram."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        for value, each in self.of.items():
            family.add_metric([value], *each.read())
        yield family


# -- what is read at a scrape ----------------------------------------------------------------------


class Reader(Collector):
    """The metrics that a function reads when Prometheus scrapes."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return the present values; called by the registry."""
        return self._read()


class EngineHealth(Protocol):
    """An engine's counts of its own failures."""

    @property
    def num_failed_steps(self) -> int:
        """Runs of the model thread that raised."""

    @property
    def num_bisections(self) -> int:
        """Steps that were run again in parts."""

    @property
    def num_audit_failures(self) -> int:
        """Audits that found something wrong."""

    @property
    def num_crash_dumps(self) -> int:
        """Dumps that were written."""

    @property
    def alive(self) -> bool:
        """Whether its loop runs."""


def read_queue(scheduler: Scheduler) -> Iterator[Metric]:
    """Running and waiting requests."""
    limits = scheduler.limits
    running, waiting = len(scheduler.running), len(scheduler.waiting)
    yield gauge("num_requests_running", "Requests that are running", running)
    yield gauge("num_requests_waiting", "Requests that are waiting in the queue", waiting)
    yield gauge("max_requests_running", "Largest number of running requests", limits.max_running)
    yield gauge("max_requests_waiting", "Largest number of waiting requests", limits.max_queued)
    yield counter("num_preemptions", "Preempted requests", scheduler.num_preemptions)


def read_pool(cache: PrefixCache) -> Iterator[Metric]:
    """Occupancy of the KV pool. A page is either free, evictable or held."""
    total, free, evictable = (
        cache.num_total_pages, cache.num_free_pages, cache.num_evictable_pages
    )  # fmt: skip
    held = total - free - evictable
    yield gauge(
        "kv_cache_occupancy",
        "Share of KV pages in use or pinned; suited to autoscaling",
        held / total,
    )
    yield gauge("kv_cache_usage_perc", "Share of KV pages that running requests use", cache.usage)
    yield gauge("kv_cache_total_pages", "KV pages in the pool", total)
    yield gauge("kv_cache_free_pages", "KV pages in the free list", free)
    yield gauge("kv_cache_evictable_pages", "Cached KV pages that can be evicted", evictable)
    yield gauge("kv_cache_held_pages", "KV pages that running requests and pins hold", held)
    yield gauge("kv_cache_pinned_pages", "KV pages that pins hold", cache.num_pinned_pages)
    yield gauge("kv_cache_sessions", "Sessions whose last turn is pinned", cache.pins.num_sessions)
    yield counter(
        "kv_cache_session_yields",
        "Pins of sessions that gave way before their time: to a request or to the quota",
        cache.pins.num_session_yields,
    )
    yield gauge("kv_cache_page_tokens", "Tokens in one KV page", cache.page_size)
    yield _pool_config(cache)
    yield counters("kv_cache_evicted_pages", "Cached KV pages that were evicted", "cause", {
        "pressure": cache.tree.num_evicted - cache.tree.num_evicted_by_quota,
        "quota": cache.tree.num_evicted_by_quota,
    })  # fmt: skip
    yield counter(
        "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", cache.num_queries
    )
    yield counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", cache.num_hits)


def read_states(states: StateSlots) -> Iterator[Metric]:
    """Slots for recurrent states, of models that have them."""
    yield gauge("state_slots_total", "Slots for recurrent states", states.num_total)
    yield gauge(
        "state_slots_attached", "Slots that keep the state at the end of a cached page",
        len(states.attached),
    )  # fmt: skip
    yield counter("state_evictions", "Kept states that made room for others", states.num_evicted)
    yield counter(
        "state_recomputed_tokens",
        "Prompt tokens computed again although their KV was cached: no state behind them was kept",
        states.num_recomputed_tokens,
    )


def _pool_config(cache: PrefixCache) -> Metric:
    """Size of the pool as labels, which is where routers that know vLLM look for it."""
    family = GaugeMetricFamily(
        f"{PREFIX}cache_config_info",
        "Tokens in one KV page, and KV pages in the pool",
        labels=["block_size", "num_gpu_blocks"],
    )
    family.add_metric([str(cache.page_size), str(cache.num_total_pages)], 1)
    return family


def read_tiers(loads: PageLoads, page_size: int) -> Iterator[Metric]:
    """Stores of KV pages beyond the pool."""
    tiers = loads.tiers.describe()
    for name, text, read in (
        ("pages", "KV pages in the tier", lambda tier: tier.pages),
        ("capacity_pages", "KV pages that fit", lambda tier: tier.capacity_pages),
        ("queued_pages", "KV pages that wait to be saved", lambda tier: tier.queued_pages),
        ("closed", "1 while the tier is left alone", lambda tier: not tier.is_open),
    ):
        values = {str(tier.medium): float(read(tier)) for tier in tiers}
        yield _by_tier(GaugeMetricFamily, name, text, values)
    for name, text, read in (
        ("hit_tokens", "Prompt tokens that came from the tier",
         lambda tier: tier.loaded_pages * page_size),
        ("load_seconds", "Seconds that loads took", lambda tier: tier.load_seconds),
        ("saved_pages", "KV pages that were written", lambda tier: tier.saved_pages),
        ("times_closed", "Times that the tier failed or was late", lambda tier: tier.times_closed),
    ):  # fmt: skip
        values = {str(tier.medium): float(read(tier)) for tier in tiers}
        yield _by_tier(CounterMetricFamily, name, text, values)
    dropped = CounterMetricFamily(
        f"{PREFIX}kv_tier_dropped_pages",
        "KV pages that the tier did not keep, by cause",
        labels=["tier", "cause"],
    )
    for tier in tiers:
        for cause, count in tier.dropped_pages.items():
            dropped.add_metric([tier.medium, cause], count)
    yield dropped
    yield counter("kv_tier_late", "Loads that requests did not wait for", loads.num_late)


def read_transfers(cache: PrefixCache, tiers: KVTiers | None) -> Iterator[Metric]:
    """Pages of prompts that go from one engine to another."""
    transfers = cache.transfers
    yield gauge("kv_transfer_held", "Prompts whose KV pages another server is to read",
                len(transfers))  # fmt: skip
    yield gauge("kv_transfer_held_pages", "KV pages of them", transfers.num_pages)
    yield counters("kv_transfer_ended", "Prompts whose KV pages are held no longer", "cause",
                   transfers.ended)  # fmt: skip
    peers = (None if tiers is None else tiers.refused_offers) or {}
    yield counters(
        "kv_transfer_refused", "kv_transfer_params that were of no use, by cause", "cause",
        {cause: transfers.refused[cause] + peers.get(cause, 0) for cause in get_args(Refusal)},
    )  # fmt: skip


def _by_tier(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(f"{PREFIX}kv_tier_{name}", text, labels=["tier"])
    for medium, value in values.items():
        family.add_metric([medium], value)
    return family


def read_drafters(scheduler: Scheduler) -> Iterator[Metric]:
    """Whether each drafter was given up."""
    family = GaugeMetricFamily(
        f"{PREFIX}drafter_disabled",
        "1 for a drafter that was switched off after repeated failures",
        labels=["source"],
    )
    for name, works in scheduler.speculator.drafters().items():
        family.add_metric([name], not works)
    yield family


def read_faults(engine: EngineHealth) -> Iterator[Metric]:
    """Failures of the engine, and whether it is alive."""
    yield gauge("engine_alive", "1 while the engine's loop runs", engine.alive)
    yield counter("failed_steps", "Model steps that raised an exception", engine.num_failed_steps)
    yield counter("bisections", "Failed steps that were run again in smaller parts",
                  engine.num_bisections)  # fmt: skip
    yield counter("audit_failures", "Audits of the KV pages that failed", engine.num_audit_failures)
    yield counter("crash_dumps", "Crash dumps written", engine.num_crash_dumps)


def read_build() -> Iterator[Metric]:
    """Versions of this build, as labels of a gauge that is always 1."""
    family = GaugeMetricFamily(
        f"{PREFIX}build_info", "Versions of foretoken and Python", labels=["version", "python"]
    )
    family.add_metric([__version__, platform.python_version()], 1)
    yield family


def read_tokens(spec_stats: SpecDecodeStats) -> Iterator[Metric]:
    """Statistics of tokens and speculation."""
    yield counter("generation_tokens", "Output tokens served", spec_stats.num_tokens)
    for name, text, value in (
        ("drafts", "Drafts verified, one per request and step", spec_stats.num_drafts),
        ("draft_tokens", "Draft tokens verified", spec_stats.num_proposed),
        ("accepted_tokens", "Draft tokens accepted and served", spec_stats.accepted.total()),
    ):
        yield counter(f"spec_decode_num_{name}", text, value)
    yield from _by_label(spec_stats)
    lengths = Histogram("spec_decode_acceptance_length", "Tokens served by a step with a "
    "draft, per request",
                        LENGTHS)  # fmt: skip
    for length, count in spec_stats.lengths.items():
        lengths.observe(length, count)
    yield from lengths.collect()


def _by_label(spec_stats: SpecDecodeStats) -> Iterator[Metric]:
    depth = max([*spec_stats.path_lens, *spec_stats.runs], default=0)
    for name, text, label, values in (
        ("draft_tokens_per_pos", "Drafts whose first path reaches the position", "position",
         _reaching(spec_stats.path_lens, depth)),
        ("accepted_tokens_per_pos", "Drafts accepted up to the position", "position",
         _reaching(spec_stats.runs, depth)),
        ("draft_tokens_per_source", "Draft tokens verified, by "
        "drafter", "source", spec_stats.proposed),
        ("accepted_tokens_per_source", "Draft tokens accepted and served, by "
        "drafter", "source", spec_stats.accepted),
    ):  # fmt: skip
        yield counters(f"spec_decode_num_{name}", text, label, values)


def _reaching(lens: Mapping[int, int], depth: int) -> dict[str, int]:
    """How many of the runs with these lengths have a token at each position."""
    return {
        str(position): sum(count for length, count in lens.items() if length > position)
        for position in range(depth)
    }


# -- what an engine counts ------------------------------------------------------------------------


class EngineObserver:
    """Follows requests and steps; this one does nothing, subclasses do.

    Called by the engine, on the event loop, between two steps. Times are seconds on the engine's
    clock. It must be quick. If a method raises, that is counted, and logged the first time; the
    engine goes on.
    """

    def begin(self, request: Request, now: float) -> None:
        """A request was accepted. Called in the caller's own context, unlike the other methods."""

    def observe_step(
        self, plan: StepPlan, output: StepOutput, *, began: float, ended: float
    ) -> None:
        """A step, from its plan's start in the model thread to the end of its commit."""

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """Tokens that were served, and the end: then ``delta.terminal`` holds."""

    def observe_replica_step(self, replica: int) -> None:
        """All deltas of a step of this replica, by its number, were observed; only in a front."""


class Observers:
    """Observers of requests and steps. A call that fails is counted, and logged the first time."""

    def __init__(self, count_failure: Callable[[], None]) -> None:
        self.members: list[EngineObserver] = []
        self._count_failure = count_failure
        self._failed: set[str] = set()  # methods whose failure was logged

    def begin(self, request: Request, now: float) -> None:
        """A request was accepted."""
        for observer in self.members:
            self._notify(observer.begin, request, now)

    def observe_step(
        self, plan: StepPlan, output: StepOutput, *, began: float, ended: float
    ) -> None:
        """A step has ended."""
        for observer in self.members:
            self._notify(observer.observe_step, plan, output, began=began, ended=ended)

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """Tokens were served, or a request ended."""
        for observer in self.members:
            self._notify(observer.observe_delta, request, delta, now)

    def observe_replica_step(self, replica: int) -> None:
        """The deltas of a step of a replica were observed."""
        for observer in self.members:
            self._notify(observer.observe_replica_step, replica)

    def _notify(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call an observer's method; no step and no request depends on it."""
        try:
            call(*args, **kwargs)
        except Exception:
            self._count_failure()
            name = getattr(call, "__qualname__", repr(call))
            if name not in self._failed:
                self._failed.add(name)
                logger.exception("%s raised an exception; later ones are only counted", name)


class EngineMetrics:
    """Counters and histograms that the engine feeds; `render` is the body of ``/metrics``.

    ``gives_kv``: other engines read pages of this one.
    """

    def __init__(
        self, scheduler: Scheduler, engine: EngineHealth | None = None, *, gives_kv: bool = False
    ) -> None:
        self.registry = CollectorRegistry()
        self.spec_stats = SpecDecodeStats()
        for read in (
            partial(read_queue, scheduler),
            partial(read_pool, scheduler.cache),
            partial(read_tokens, self.spec_stats),
            partial(read_drafters, scheduler),
            read_build,
        ):
            self._add(Reader(read))
        if (states := scheduler.cache.states) is not None:
            self._add(Reader(partial(read_states, states)))
        loads = scheduler.page_loads
        if loads is not None:
            self._add(Reader(partial(read_tiers, loads, scheduler.cache.page_size)))
        tiers = None if loads is None else loads.tiers
        if gives_kv or (tiers is not None and tiers.refused_offers is not None):
            self._add(Reader(partial(read_transfers, scheduler.cache, tiers)))
        if engine is not None:
            self._add(Reader(partial(read_faults, engine)))
        self._last_token_times: dict[str, float] = {}
        failures = self._count(
            "observer_failures", "Calls of observers (logs, traces) that raised an exception"
        )
        self._observers = Observers(failures.inc)
        self.observers = self._observers.members  # are called with the same events
        self._make_request_metrics()
        self._make_step_metrics()

    def _make_request_metrics(self) -> None:
        self._prompt_tokens = self._count("prompt_tokens", "Prompt tokens of admitted requests")
        self._success = self._count("request_success", "Finished requests", "finished_reason")
        self._failed = self._count("request_failure", "Requests that ended with an error")
        self._aborted = self._count("request_aborts", "Requests that were aborted", "cause")
        for cause in ("caller", DEADLINE):
            self._aborted.labels(cause)
        self._first = self._time(
            "time_to_first_token_seconds", "Seconds from arrival to the first token"
        )
        self._between = self._time(
            "inter_token_latency_seconds", "Seconds between two tokens of a request"
        )
        self._per_token = self._time(
            "time_per_output_token_seconds",
            "Mean seconds per output token of a request, the first excluded",
        )
        self._whole = self._time(
            "e2e_request_latency_seconds", "Seconds from arrival to the last token"
        )
        self._queued = self._time(
            "request_queue_time_seconds", "Seconds from arrival to the first step"
        )
        self._prefill = self._time(
            "request_prefill_time_seconds", "Seconds from the first step to the first token"
        )
        self._decode = self._time(
            "request_decode_time_seconds", "Seconds from the first token to the last"
        )
        self._prompt_lens = self._add(
            Histogram("request_prompt_tokens", "Prompt tokens of a finished request", TOKENS)
        )
        self._answer_lens = self._add(
            Histogram("request_generation_tokens", "Output tokens of a finished request", TOKENS)
        )

    def _make_step_metrics(self) -> None:
        self._steps = self._time("step_seconds", "Seconds of a step in the model thread")
        self._parts = self._add(
            Histograms(
                "step_part_seconds",
                "Seconds of each part of an engine iteration",
                SECONDS,
                "part",
            )
        )
        for part in PARTS:
            self._parts.of[part]  # there from the start: a rate needs a zero to begin with
        self._ahead = self._count("steps_ahead", "Steps planned while the step before them ran")
        self._images = self._count("images_computed", "Images that the image tower computed")
        self._step_tokens = {"prefill": 0, "decode": 0}
        self._add(Reader(self._read_step_tokens))
        self._batch = self._add(Histogram("step_num_requests", "Requests in each step", COUNTS))
        self._batch_tokens = self._add(
            Histogram("step_num_tokens", "Tokens computed in each step, without drafts", COUNTS)
        )

    def _read_step_tokens(self) -> Iterator[Metric]:
        tokens = self._step_tokens | {"draft": self.spec_stats.num_proposed}
        yield counters("step_tokens", "Tokens computed in steps", "kind", tokens)

    def _count(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _time(self, name: str, text: str) -> Histogram:
        return self._add(Histogram(name, text, SECONDS))

    def _add(self, collector: C) -> C:
        self.registry.register(collector)
        return collector

    def observe_arrival(self, request: Request, now: float) -> None:
        """A request was accepted. Called in the caller's own context, unlike the other methods."""
        self._observers.begin(request, now)

    def observe_step(
        self,
        plan: StepPlan,
        output: StepOutput,
        *,
        began: float,
        computed: float,
        ended: float,
        is_ahead: bool = False,
    ) -> None:
        """One step: given to the model thread, back from it, committed.

        ``is_ahead``: it was planned before the step ahead of it was committed.
        """
        self._steps.observe(computed - began)
        if is_ahead:
            self._ahead.inc()
        self._observe_batch(plan)
        if output.num_images:
            self._images.inc(output.num_images)
        self.spec_stats.observe_requests(output.requests)
        for part, part_seconds in output.times.items():
            self._parts.of[part].observe(part_seconds)
        self._observers.observe_step(plan, output, began=began, ended=ended)

    def _observe_batch(self, plan: StepPlan) -> None:
        num_requests, num_tokens = len(plan.requests), num_step_tokens(plan.requests)
        num_prefill = 0
        if num_tokens > num_requests:  # else every request has a single token
            lens = [scheduled.stop - scheduled.start for scheduled in plan.requests]
            num_prefill = sum(each for each in lens if each > 1)
        self._step_tokens["prefill"] += num_prefill
        self._step_tokens["decode"] += num_tokens - num_prefill
        self._batch.observe(num_requests)
        self._batch_tokens.observe(num_tokens)

    def part_seconds(self) -> dict[str, float]:
        """Seconds that each part of a round took since the start."""
        return {part: self._parts.of[part].sum for part in PARTS}

    def observe_round(self, output: StepOutput, seconds: float) -> None:
        """The whole round of that step: what the model thread did not take is the host's."""
        self._parts.of["host"].observe(max(0.0, seconds - sum(output.times.values())))

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """Tokens that were served, and the end."""
        if delta.token_ids:
            self._observe_tokens(request, len(delta.token_ids), now)
            self.spec_stats.observe_delta(delta)
        if delta.pooled is not None:
            self._observe_prompt(request)
        if delta.terminal:
            self._last_token_times.pop(request.request_id, None)
            self._observe_end(request, delta)
        self._observers.observe_delta(request, delta, now)

    def _observe_tokens(self, request: Request, num_tokens: int, now: float) -> None:
        last = self._last_token_times.get(request.request_id)
        self._last_token_times[request.request_id] = now
        if last is None:
            self._first.observe(request.usage.time_to_first_token)
            self._observe_prompt(request)
            return
        self._between.observe((now - last) / num_tokens, num_tokens)  # they share the time

    def _observe_prompt(self, request: Request) -> None:
        self._queued.observe(request.usage.queue_time)
        self._prompt_tokens.inc(request.prompt_len)

    def _observe_end(self, request: Request, delta: Delta) -> None:
        if isinstance(delta.error, DeadlineExceeded) or delta.stop_reason == DEADLINE:
            self._aborted.labels(DEADLINE).inc()
        elif delta.finish_reason is FinishReason.ABORT:
            self._aborted.labels("caller").inc()
        elif delta.finish_reason is None:
            self._failed.inc()
        if delta.finish_reason is not None:
            self._observe_answer(request, delta.finish_reason)

    def _observe_answer(self, request: Request, reason: FinishReason) -> None:
        usage = request.usage
        self._success.labels(reason.value).inc()
        self._whole.observe(usage.total_time)
        self._prompt_lens.observe(request.prompt_len)
        self._answer_lens.observe(usage.completion_tokens)
        if usage.completion_tokens == 0:
            return
        decode_time = usage.total_time - usage.time_to_first_token
        self._prefill.observe(usage.time_to_first_token - usage.queue_time)
        self._decode.observe(decode_time)
        if usage.completion_tokens > 1:
            self._per_token.observe(decode_time / (usage.completion_tokens - 1))

    async def refresh(self) -> None:
        """Do nothing: all that `render` writes is counted in this process."""

    def render(self) -> tuple[bytes, str]:
        """Body and content type, in the text format of Prometheus."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

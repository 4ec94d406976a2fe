"""Collectors: values that are read when Prometheus scrapes, at no cost to a step."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..._version import __version__
from ...radix_cache import PrefixCache
from ..scheduling.scheduler import Scheduler
from .prometheus import PREFIX, Histogram, counter, counters, gauge
from .spec_decode_stats import SpecDecodeStats

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 65)


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


class QueueCollector(Collector):
    """Running and waiting requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        """As it stands now; called by the registry."""
        scheduler = self._scheduler
        limits = scheduler.limits
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        yield gauge("num_requests_running", "Requests that are running", running)
        yield gauge("num_requests_waiting", "Requests that are waiting in the queue", waiting)
        yield gauge(
            "max_requests_running", "Largest number of running requests", limits.max_running
        )
        yield gauge("max_requests_waiting", "Largest number of waiting requests", limits.max_queued)
        yield counter("num_preemptions", "Preempted requests", scheduler.num_preemptions)


class PoolCollector(Collector):
    """Occupancy of the KV pool. A page is either free, evictable or held."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """As it stands now; called by the registry."""
        cache = self._cache
        total, free, evictable = (
            cache.num_total_pages, cache.num_free_pages, cache.num_evictable_pages
        )  # fmt: skip
        held = total - free - evictable
        yield gauge(
            "kv_cache_occupancy",
            "Share of KV pages in use or pinned; suited to autoscaling",
            held / total,
        )
        yield gauge(
            "kv_cache_usage_perc", "Share of KV pages that running requests use", cache.usage
        )
        yield gauge("kv_cache_total_pages", "KV pages in the pool", total)
        yield gauge("kv_cache_free_pages", "KV pages in the free list", free)
        yield gauge("kv_cache_evictable_pages", "Cached KV pages that can be evicted", evictable)
        yield gauge("kv_cache_held_pages", "KV pages that running requests and pins hold", held)
        yield gauge("kv_cache_pinned_pages", "KV pages that pins hold", cache.num_pinned_pages)
        yield gauge("kv_cache_page_tokens", "Tokens in one KV page", cache.page_size)
        yield counters("kv_cache_evicted_pages", "Cached KV pages that were evicted", "cause", {
            "pressure": cache.tree.num_evicted - cache.tree.num_evicted_by_quota,
            "quota": cache.tree.num_evicted_by_quota,
        })  # fmt: skip
        yield counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", cache.num_queries
        )
        yield counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache", cache.num_hits
        )


class FaultCollector(Collector):
    """Failures of the engine, and whether it is alive."""

    def __init__(self, engine: EngineHealth) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """As it stands now; called by the registry."""
        engine = self._engine
        yield gauge("engine_alive", "1 while the engine's loop runs", engine.alive)
        yield counter(
            "failed_steps", "Model steps that raised an exception", engine.num_failed_steps
        )
        yield counter("bisections", "Failed steps that were run again in smaller parts",
                      engine.num_bisections)  # fmt: skip
        yield counter(
            "audit_failures", "Audits of the KV pages that failed", engine.num_audit_failures
        )
        yield counter("crash_dumps", "Crash dumps written", engine.num_crash_dumps)


class BuildCollector(Collector):
    """Which build this is: a gauge that is always 1, for its labels."""

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        family = GaugeMetricFamily(
            f"{PREFIX}build_info", "Versions of foretoken and Python", labels=["version", "python"]
        )
        family.add_metric([__version__, platform.python_version()], 1)
        yield family


class TokenCollector(Collector):
    """Statistics of tokens and speculation as Prometheus families."""

    def __init__(self, spec_stats: SpecDecodeStats) -> None:
        self._spec_stats = spec_stats

    def collect(self) -> Iterable[Metric]:
        """As it stands now; called by the registry."""
        spec_stats = self._spec_stats
        yield counter("generation_tokens", "Output tokens served", spec_stats.num_tokens)
        for name, text, value in (
            ("drafts", "Drafts verified, one per request and step", spec_stats.num_drafts),
            ("draft_tokens", "Draft tokens verified", spec_stats.num_proposed),
            ("accepted_tokens", "Draft tokens accepted and served", spec_stats.accepted.total()),
        ):
            yield counter(f"spec_decode_num_{name}", text, value)
        yield from self._by_label()
        lengths = Histogram("spec_decode_acceptance_length", "Tokens served by a step with a "
        "draft, per request",
                            LENGTHS)  # fmt: skip
        for length, count in spec_stats.lengths.items():
            lengths.observe(length, count)
        yield from lengths.collect()

    def _by_label(self) -> Iterator[Metric]:
        spec_stats = self._spec_stats
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

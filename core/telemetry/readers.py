"""Metrics from counts that other parts keep; they are read only when Prometheus scrapes."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Protocol, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..._version import __version__
from ...radix_cache import PrefixCache, StateSlots
from ..interface.extras.tiers import KVTiers
from ..interface.extras.transfers import Refusal
from ..scheduling.page_loads import PageLoads
from ..scheduling.scheduler import Scheduler
from .families import PREFIX, Histogram, counter, counters, gauge
from .spec_decode_stats import SpecDecodeStats

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 65)


class EngineHealth(Protocol):
    """Protocol of an engine's counts of its failures."""

    @property
    def num_failed_steps(self) -> int:
        """Number of failed runs in the model thread, of whole steps or of parts of steps."""

    @property
    def num_bisections(self) -> int:
        """Number of steps that failed and were run again in parts."""

    @property
    def num_audit_failures(self) -> int:
        """Number of audits that found a violation."""

    @property
    def num_crash_dumps(self) -> int:
        """Number of crash dumps that were written."""

    @property
    def alive(self) -> bool:
        """Whether the engine's loop runs."""


def read_queue(scheduler: Scheduler) -> Iterator[Metric]:
    """Yield the numbers of running and waiting requests."""
    limits = scheduler.limits
    running, waiting = len(scheduler.running), len(scheduler.waiting)
    yield gauge("num_requests_running", "Requests that are running", running)
    yield gauge("num_requests_waiting", "Requests that are waiting in the queue", waiting)
    yield gauge(
        "max_requests_running", "Limit of running requests (--max-running)", limits.max_running
    )
    yield gauge(
        "max_requests_waiting", "Limit of waiting requests (--max-queued)", limits.max_queued
    )
    yield counter("num_preemptions", "Preempted requests", scheduler.num_preemptions)


def read_pool(cache: PrefixCache) -> Iterator[Metric]:
    """Yield the occupancy of the KV pool. A page is either free, evictable or held."""
    total, free, evictable = (
        cache.num_total_pages, cache.num_free_pages, cache.num_evictable_pages
    )  # fmt: skip
    held = total - free - evictable
    yield gauge(
        "kv_cache_occupancy",
        "Share of KV pages that cannot be evicted, from 0 to 1; suited to autoscaling",
        held / total,
    )
    yield gauge(
        "kv_cache_usage_perc",
        "Share of KV pages that running requests use, from 0 to 1",
        cache.usage,
    )
    yield gauge("kv_cache_total_pages", "KV pages in the pool", total)
    yield gauge("kv_cache_free_pages", "KV pages in the free list", free)
    yield gauge("kv_cache_evictable_pages", "Cached KV pages that can be evicted", evictable)
    yield gauge("kv_cache_held_pages", "KV pages that running requests and pins hold", held)
    yield gauge("kv_cache_pinned_pages", "KV pages that pins hold", cache.num_pinned_pages)
    yield gauge("kv_cache_sessions", "Sessions whose last turn is pinned", cache.pins.num_sessions)
    yield counter(
        "kv_cache_session_yields",
        "Session pins removed before they expired, to make room for a request or for other pins",
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
    """Yield the use of the slots for recurrent states, for models that have them."""
    yield gauge("state_slots_total", "Slots in the pool of recurrent states", states.num_total)
    yield gauge(
        "state_slots_attached", "Slots that cache the state at the end of a cached KV page",
        len(states.attached),
    )  # fmt: skip
    yield counter("state_evictions", "Cached states that were evicted", states.num_evicted)
    yield counter(
        "state_recomputed_tokens",
        "Prompt tokens computed again although their KV was cached, for lack of a cached state",
        states.num_recomputed_tokens,
    )


def _pool_config(cache: PrefixCache) -> Metric:
    """Return a gauge whose labels have the pool's size, as in vLLM, for routers that read it."""
    family = GaugeMetricFamily(
        f"{PREFIX}cache_config_info",
        "Tokens in one KV page, and KV pages in the pool",
        labels=["block_size", "num_gpu_blocks"],
    )
    family.add_metric([str(cache.page_size), str(cache.num_total_pages)], 1)
    return family


def read_tiers(loads: PageLoads, page_size: int) -> Iterator[Metric]:
    """Yield the state of the stores of KV pages outside the pool."""
    tiers = loads.tiers.describe()
    for name, text, read in (
        ("pages", "KV pages in the tier", lambda tier: tier.pages),
        ("capacity_pages", "KV pages that fit into the tier", lambda tier: tier.capacity_pages),
        (
            "queued_pages",
            "KV pages waiting to be saved in the tier",
            lambda tier: tier.queued_pages,
        ),
        (
            "closed",
            "1 while the tier is not used because it failed or was late",
            lambda tier: not tier.is_open,
        ),
    ):
        values = {str(tier.medium): float(read(tier)) for tier in tiers}
        yield _by_tier(GaugeMetricFamily, name, text, values)
    for name, text, read in (
        ("hit_tokens", "Prompt tokens loaded from the tier",
         lambda tier: tier.loaded_pages * page_size),
        ("load_seconds", "Seconds spent loading from the tier", lambda tier: tier.load_seconds),
        ("saved_pages", "KV pages saved in the tier", lambda tier: tier.saved_pages),
        ("times_closed", "Times that the tier was closed because it failed or was late",
         lambda tier: tier.times_closed),
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
    yield counter(
        "kv_tier_late",
        "Loads that took too long, so that the request computed the tokens instead",
        loads.num_late,
    )


def read_transfers(cache: PrefixCache, tiers: KVTiers | None) -> Iterator[Metric]:
    """Yield the transfers of prompts' pages from one engine to another."""
    transfers = cache.transfers
    yield gauge("kv_transfer_held", "Prompts whose KV pages are held for another server to read",
                len(transfers))  # fmt: skip
    yield gauge(
        "kv_transfer_held_pages", "KV pages held for other servers to read", transfers.num_pages
    )
    yield counters(
        "kv_transfer_ended",
        "Prompts whose KV pages are no longer held, by cause",
        "cause",
        transfers.ended,
    )
    peers = (None if tiers is None else tiers.refused_offers) or {}
    yield counters(
        "kv_transfer_refused", "Requests whose kv_transfer_params could not be used, by cause",
        "cause",
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
    """Yield whether each drafter was turned off."""
    family = GaugeMetricFamily(
        f"{PREFIX}drafter_disabled",
        "1 for a drafter that was disabled after repeated failures",
        labels=["source"],
    )
    for name, works in scheduler.speculator.drafters().items():
        family.add_metric([name], not works)
    yield family


def read_faults(engine: EngineHealth) -> Iterator[Metric]:
    """Yield the failures of the engine, and whether it is alive."""
    yield gauge("engine_alive", "1 while the engine's loop runs", engine.alive)
    yield counter("failed_steps", "Model steps that raised an exception", engine.num_failed_steps)
    yield counter("bisections", "Failed steps that were run again in smaller parts",
                  engine.num_bisections)  # fmt: skip
    yield counter("audit_failures", "Audits of the KV pages that failed", engine.num_audit_failures)
    yield counter("crash_dumps", "Crash dumps written", engine.num_crash_dumps)


def read_build() -> Iterator[Metric]:
    """Yield the versions of this build, as labels of a gauge that is always 1."""
    family = GaugeMetricFamily(
        f"{PREFIX}build_info", "Versions of foretoken and Python", labels=["version", "python"]
    )
    family.add_metric([__version__, platform.python_version()], 1)
    yield family


def read_tokens(spec_stats: SpecDecodeStats) -> Iterator[Metric]:
    """Yield the statistics of tokens and speculation."""
    yield counter("generation_tokens", "Output tokens served", spec_stats.num_tokens)
    for name, text, value in (
        ("drafts", "Drafts verified, one per request and step", spec_stats.num_drafts),
        ("draft_tokens", "Draft tokens verified", spec_stats.num_proposed),
        ("accepted_tokens", "Draft tokens accepted and served", spec_stats.accepted.total()),
    ):
        yield counter(f"spec_decode_num_{name}", text, value)
    yield from _by_label(spec_stats)
    lengths = Histogram("spec_decode_acceptance_length", "Output tokens of a request per step with "
    "a draft",
                        LENGTHS)  # fmt: skip
    for length, count in spec_stats.lengths.items():
        lengths.observe(length, count)
    yield from lengths.collect()


def _by_label(spec_stats: SpecDecodeStats) -> Iterator[Metric]:
    depth = max([*spec_stats.path_lens, *spec_stats.runs], default=0)
    for name, text, label, values in (
        ("draft_tokens_per_pos", "Drafts whose first path has a token at the position", "position",
         _reaching(spec_stats.path_lens, depth)),
        ("accepted_tokens_per_pos", "Drafts whose token at the position was accepted", "position",
         _reaching(spec_stats.runs, depth)),
        ("draft_tokens_per_source", "Draft tokens verified, by "
        "drafter", "source", spec_stats.proposed),
        ("accepted_tokens_per_source", "Draft tokens accepted and served, by "
        "drafter", "source", spec_stats.accepted),
    ):  # fmt: skip
        yield counters(f"spec_decode_num_{name}", text, label, values)


def _reaching(lens: Mapping[int, int], depth: int) -> dict[str, int]:
    """Return, for each position below ``depth``, how many runs are longer than the position.

    ``lens``: number of runs by their length.
    """
    return {
        str(position): sum(count for length, count in lens.items() if length > position)
        for position in range(depth)
    }

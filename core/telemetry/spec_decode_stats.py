"""Counts of steps, drafts and their tokens, for the metrics and a log line per minute."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from ..interface.output import RequestOutput
from ..interface.request import Delta
from ..scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SpecDecodeStats:
    """Counts of steps, drafts and tokens since the start.

    A step counts once for each request that gets tokens from it. A draft is the whole tree that was
    verified for one request; its leading path is its longest path. Subtracting an earlier
    `SpecDecodeStats` yields the counts since then.
    """

    num_tokens: int = 0
    num_steps: int = 0
    num_proposed: int = 0
    num_trees: int = 0  # number of drafts with more than one path
    proposed: Counter[str] = field(default_factory=Counter)  # number of draft tokens by source
    accepted: Counter[str] = field(default_factory=Counter)  # number of accepted ones by source

    # Numbers of drafts by length of the leading path, by accepted tokens, by tokens of the step.
    path_lens: Counter[int] = field(default_factory=Counter)
    runs: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)

    @property
    def num_drafts(self) -> int:
        """Number of steps that verified a draft."""
        return self.lengths.total()

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens from a step that verified a draft; 0 without such a step."""
        num_tokens = sum(length * count for length, count in self.lengths.items())
        return num_tokens / max(1, self.num_drafts)

    def observe_requests(self, outputs: Iterable[RequestOutput]) -> None:
        """Count the drafts that a step verified."""
        for output in outputs:
            draft = output.draft
            if draft.token_ids:
                height = draft.height if draft.parents else len(draft.token_ids)
                self.path_lens[height] += 1
                self.num_trees += bool(draft.parents) and not draft.is_chain

    def observe_delta(self, delta: Delta) -> None:
        """Count the tokens that a step served to one request."""
        if not delta.token_ids:
            return
        self.num_tokens += len(delta.token_ids)
        self.num_steps += 1
        if delta.num_proposed:
            self.num_proposed += delta.num_proposed
            self.proposed.update(delta.proposed_sources)
            self.accepted.update(delta.accepted_sources)
            self.runs[len(delta.accepted_sources)] += 1
            self.lengths[len(delta.token_ids)] += 1

    def __sub__(self, before: SpecDecodeStats) -> SpecDecodeStats:
        names = [each.name for each in fields(self)]
        return SpecDecodeStats(
            **{name: getattr(self, name) - getattr(before, name) for name in names}
        )


class Load(NamedTuple):
    """Load of a scheduler: its current requests and used pages, and tokens since the start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # fraction of the pages that are in use
    num_queries: int = 0  # number of prompt tokens that were looked up in the cache
    num_hits: int = 0  # number of looked-up tokens that were cached

    @classmethod
    def of(cls, scheduler: Scheduler) -> Load:
        """Return the current load of a scheduler."""
        cache = scheduler.cache
        return cls(
            len(scheduler.running),
            len(scheduler.waiting),
            cache.usage,
            cache.num_queries,
            cache.num_hits,
        )


class EngineLog:
    """Writer of a log line with the tokens served in every ``interval_s`` seconds.

    At level DEBUG it also logs drafts. When a line is due, it calls ``load`` for the current load,
    and ``describe`` for the state of the controller of drafts.
    """

    def __init__(
        self,
        spec_stats: SpecDecodeStats,
        load: Callable[[], Load],
        describe: Callable[[], Mapping[str, object]] = dict,
        *,
        interval_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec_stats = spec_stats
        self._load = load
        self._describe = describe
        self._interval_s = interval_s
        self._clock = clock
        self._began = self._last_tick = clock()
        self._before = SpecDecodeStats()
        self._load_before = Load()

    def tick(self) -> None:
        """Write a line if it is due. The engine calls this in every step, so it is fast."""
        now, last = self._clock(), self._last_tick
        self._last_tick = now
        if now - last > 2 * self._interval_s:  # idle time does not count
            self._report(max(1.0, last - self._began))
            self._began = now
        elif now - self._began >= self._interval_s:
            self._report(now - self._began)
            self._began = now

    def _report(self, seconds: float) -> None:
        recent = self._spec_stats - self._before
        if not recent.num_tokens:
            return
        self._before = self._spec_stats - SpecDecodeStats()  # subtraction makes a copy
        logger.info("%s", ", ".join(self._load_parts(recent, seconds)))
        if logger.isEnabledFor(logging.DEBUG):
            parts = "; ".join(self._parts(recent))
            logger.debug("speculation in the last %.0f s: %s", seconds, parts)

    def _load_parts(self, recent: SpecDecodeStats, seconds: float) -> Iterator[str]:
        load, before = self._load(), self._load_before
        self._load_before = load
        yield f"running {load.num_running}, waiting {load.num_waiting}"
        yield f"{recent.num_tokens / seconds:.0f} tok/s, KV {load.kv_usage:.0%}"
        if num_queries := load.num_queries - before.num_queries:
            yield f"prefix hits {(load.num_hits - before.num_hits) / num_queries:.0%}"
        yield f"{recent.num_tokens / recent.num_steps:.1f} tokens per step"

    def _parts(self, recent: SpecDecodeStats) -> Iterator[str]:
        per_step = recent.num_tokens / recent.num_steps
        yield f"{recent.num_tokens} tokens in {recent.num_steps} steps ({per_step:.2f} per step)"
        yield from _draft_parts(recent)
        if decision := self._decision():
            yield f"controller: {decision}"

    def _decision(self) -> str:
        try:
            return ", ".join(f"{name}={value}" for name, value in self._describe().items())
        except Exception:  # a failure to log must not end the engine
            logger.exception("the state of the speculation controller could not be logged")
            return ""


def _draft_parts(recent: SpecDecodeStats) -> Iterator[str]:
    if not recent.num_drafts:
        yield "no drafts"
        return
    trees = f", {recent.num_trees} of them trees" if recent.num_trees else ""
    yield f"acceptance length {recent.acceptance_length:.2f} over {recent.num_drafts} drafts{trees}"
    rate = recent.accepted.total() / recent.num_proposed
    yield f"acceptance rate {rate:.0%}: {by_source(recent.proposed, recent.accepted)}"
    shares = {source: count / recent.num_tokens for source, count in recent.accepted.items()}
    shares["the target itself"] = 1 - sum(shares.values())
    yield "tokens from " + ", ".join(f"{source} {share:.0%}" for source, share in shares.items())


def by_source(proposed: Mapping[str, int], accepted: Mapping[str, int]) -> str:
    """Return a text with the numbers of accepted and proposed draft tokens by source."""
    return ", ".join(
        f"{source} {accepted.get(source, 0)} of {count}" for source, count in proposed.items()
    )

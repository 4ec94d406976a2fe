"""Leaks and drift: the arithmetic of what a server holds and how long it takes, over time.

Only moments at which it was idle are compared: nothing runs, all clients have gone. What is
filled on first use (thread pools, tables, the allocator's arenas) fills in the first half of a
process's life, so the second half is what is judged. What remembers prompts up to a bound is
emptied at the beginning of each cycle.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from .book import Latency
from .server import Footprint

MIN_SAMPLES = 12  # fewer say nothing
MIB = 2**20
# The allocator keeps arenas and returns them late: memory of an idle server that leaks nothing
# wanders by a few MiB. A leak of 100 bytes a request is 10 MiB in the half of an hour's soak.
MEMORY_BOUND = 8 * MIB
NEW_THREADS = 2  # pools make threads when all they have are busy at once, up to their bound
MAX_DRIFT = 2.0


class Growth(msgspec.Struct, frozen=True):
    """Development of a quantity of one process."""

    name: str
    first: float  # at the first idle moment
    last: float
    grown: float  # over the second half
    bound: float
    is_leak: bool


def growth(idle: Sequence[Footprint]) -> list[Growth]:
    """Return the growth of one process; nothing if it had too few idle moments to tell."""
    if len(idle) < MIN_SAMPLES:
        return []
    found = [_trend("memory", idle, lambda sample: sample.memory, MEMORY_BOUND)]
    return [
        *found,
        _steps("threads", idle, lambda sample: sample.threads, NEW_THREADS),
        _steps("descriptors", idle, lambda sample: sample.descriptors, 0),
        _steps("sockets", idle, lambda sample: sample.sockets, 0),
    ]


def _trend(
    name: str, idle: Sequence[Footprint], value: Callable[[Footprint], int], bound: float
) -> Growth:
    """A leak is a line that rises: single high values are noise."""
    half = idle[len(idle) // 2 :]
    times, values = [sample.at for sample in half], [value(sample) for sample in half]
    grown = slope(times, values) * (times[-1] - times[0])
    return Growth(name, value(idle[0]), value(idle[-1]), grown, bound, grown > bound)


def _steps(
    name: str, idle: Sequence[Footprint], value: Callable[[Footprint], int], bound: int
) -> Growth:
    """Whole things: the second half may never hold more than the first did, and ``bound``."""
    middle = len(idle) // 2
    before, after = max(map(value, idle[:middle])), max(map(value, idle[middle:]))
    grown = after - before
    return Growth(name, value(idle[0]), value(idle[-1]), grown, bound, grown > bound)


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The median slope of all pairs (Theil and Sen), which outliers do not move."""
    points = list(zip(times, values, strict=True))
    slopes = [
        (later[1] - point[1]) / (later[0] - point[0])
        for at, point in enumerate(points)
        for later in points[at + 1 :]
        if later[0] > point[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


class Drift(msgspec.Struct, frozen=True):
    """A latency in the first and in the last quarter of the cycles, at the same load."""

    wave: str
    measure: str
    first_ms: float
    last_ms: float
    num_first: int
    num_last: int

    @property
    def ratio(self) -> float:
        """Above 1: slower."""
        return self.last_ms / self.first_ms if self.first_ms else 1.0


def drifts(latencies: Sequence[Latency], waves: Sequence[str], cycles: int) -> list[Drift]:
    """Medians, which a busy machine moves least; nothing where a quarter has no canary."""
    quarter = max(1, cycles // 4)
    found = []
    for wave in waves:
        own = [each for each in latencies if each.wave == wave]
        first = [each for each in own if each.cycle < quarter]
        last = [each for each in own if each.cycle >= cycles - quarter]
        if cycles < 2 or not first or not last:
            continue
        for name, values in (("ttft", _ttfts), ("itl", _gaps)):
            early, late = values(first), values(last)
            if early and late:
                medians = 1e3 * statistics.median(early), 1e3 * statistics.median(late)
                found.append(Drift(wave, name, *medians, len(early), len(late)))
    return found


def _ttfts(latencies: Sequence[Latency]) -> list[float]:
    return [each.ttft for each in latencies]


def _gaps(latencies: Sequence[Latency]) -> list[float]:
    return [gap for each in latencies for gap in each.gaps]

"""Counters, gauges and histograms as plain numbers, exported as Prometheus metric families.

To record a value adds it to a number or a list. The instruments of prometheus_client would take a
lock for each of about a dozen values per step, although the event loop is the only writer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

PREFIX = "foretoken:"
# Upper bounds of the buckets of histograms of durations, in seconds.
DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a metric family with one gauge, whose value is ``value`` now."""
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    """Return a metric family with one counter, a value that never decreases."""
    return CounterMetricFamily(PREFIX + name, text, value=value)


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a metric family with a counter for each value of a label."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


class Buckets:
    """Counts of one histogram's observations by bucket. Only one thread may use it."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Record ``count`` observations of ``value``."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def sum(self) -> float:
        """Sum of all observations."""
        return self._sum

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return (bound, number of observations up to it) for each bucket, and the sum."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True)), self._sum


class Histogram(Buckets, Collector):
    """Histogram without labels."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self._name, self._text = PREFIX + name, text

    def collect(self) -> Iterable[Metric]:
        """Return the metric family with the histogram's current counts."""
        buckets, total = self.read()
        yield HistogramMetricFamily(self._name, self._text, buckets, total)


class Histograms(Collector):
    """One histogram for each value of a label; the label must have few values."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], label: str) -> None:
        self._name, self._text, self._label = PREFIX + name, text, label
        self.of: defaultdict[str, Buckets] = defaultdict(lambda: Buckets(bounds))

    def collect(self) -> Iterator[Metric]:
        """Return the metric family with the current counts of all histograms."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        for value, each in self.of.items():
            family.add_metric([value], *each.read())
        yield family


class Reader(Collector):
    """Collector of metrics that calls a function each time Prometheus scrapes."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return the metric families with current values; the Prometheus registry calls this."""
        return self._read()

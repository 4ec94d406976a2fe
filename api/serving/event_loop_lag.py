"""LoopLag: the delay of the event loop, measured by a timer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ...core.telemetry.families import Histogram, gauge

INTERVAL_SECONDS = 0.1
_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class LoopLag(Collector):
    """A histogram of how late a timer fires, and the largest delay since the last scrape.

    Anything that delays this timer also delays every stream and every new connection. The timer
    fires ten times per second and costs a few microseconds each time.
    """

    def __init__(
        self,
        interval_s: float = INTERVAL_SECONDS,
        *,
        clock: Callable[[], float] = time.monotonic,  # uvloop's clock has a resolution of 1 ms
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._lag = Histogram(
            "event_loop_lag_seconds", "Delay of an event loop timer, in seconds", _BOUNDS
        )
        self._worst = 0.0  # seconds, since the last scrape

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, and reset the largest delay."""
        yield from self._lag.collect()
        worst, self._worst = self._worst, 0.0
        yield gauge(
            "event_loop_lag_max_seconds",
            "Largest event loop lag since the last scrape, in seconds",
            worst,
        )

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the running event loop inside the block."""
        self._set(asyncio.get_running_loop())
        try:
            yield
        finally:
            self._timer.cancel()

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        due = self._clock() + self._interval_s
        self._timer = loop.call_later(self._interval_s, self._fire, loop, due)

    def _fire(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        lag = max(0.0, self._clock() - due)  # a timer may be early by its resolution
        self._lag.observe(lag)
        self._worst = max(self._worst, lag)
        self._set(loop)

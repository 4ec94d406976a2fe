"""The lag of the event loop, on a clock that is set by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from foretoken.api.serving.event_loop_lag import LoopLag


def samples(lag: LoopLag) -> dict[str, float]:
    """Return the samples that a scrape finds, by the ends of their names."""
    found = [sample for family in lag.collect() for sample in family.samples]
    names = [sample.name.removeprefix("foretoken:event_loop_lag_") for sample in found]
    return dict(zip(names, (sample.value for sample in found), strict=True))


def measure(*readings: float) -> LoopLag:
    """A timer every tenth of a second; the clock says these, one after the other."""
    times: Iterator[float] = iter(readings)
    over = asyncio.Event()

    def clock() -> float:
        try:
            return next(times)
        except StopIteration:
            over.set()
            return 0.0

    lag = LoopLag(interval_s=0.0, clock=clock)

    async def run() -> None:
        with lag.measured():
            await over.wait()

    asyncio.run(run())
    return lag


def test_a_timer_that_fires_late_is_lag_and_an_early_one_is_none() -> None:
    # due at 1.0, seen at 1.25; due at 2.0, seen at 1.5; due at 3.0, seen at 3.0
    found = samples(measure(1.0, 1.25, 2.0, 1.5, 3.0, 3.0))
    assert found["seconds_sum"] == 0.25
    assert found["seconds_count"] == 3
    assert found["max_seconds"] == 0.25


def test_the_worst_begins_anew_with_each_scrape() -> None:
    lag = measure(1.0, 1.5)
    assert samples(lag)["max_seconds"] == 0.5
    again = samples(lag)
    assert again["max_seconds"] == 0.0
    assert again["seconds_sum"] == 0.5


def test_nothing_is_measured_after_the_block() -> None:
    lag = LoopLag(interval_s=0.0)

    async def run() -> None:
        with lag.measured():
            pass
        for _ in range(9):  # a timer that is due would fire in one of these turns
            await asyncio.sleep(0)

    asyncio.run(run())
    assert samples(lag)["seconds_count"] == 0

"""Upkeep: a speculator's reading of what was said, at a time when it delays no step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BEGIN_AT = 0.3  # of a step: by then the model thread is in its kernels, and needs no lock
LEAST_STEP = 0.0015  # seconds: a loop's timers end by the millisecond
MEAN_RATE = 0.1  # of a new value in a running mean


class Upkeep:
    """Calls ``work`` for each step that is begun if it ``is_due``, before the next one is planned.

    Python lets one thread run at a time. At the beginning of a step that is the model thread, which
    prepares its kernels: whatever the loop does then the step waits for. So the work is left to a
    timer, where steps are long enough for one.
    """

    def __init__(self, work: Callable[[], None], is_due: Callable[[], bool]) -> None:
        self._work, self._is_due = work, is_due
        self._step_s = 0.0  # running mean, of the short ones
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A step begins, on the running loop."""
        self.finish()
        if not self._is_due():
            return
        if self._step_s < LEAST_STEP:
            self._work()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(BEGIN_AT * self._step_s, self.finish)

    def finish(self) -> None:
        """What was left to the timer is done now, if it is not yet."""
        if self.cancel():
            self._work()

    def cancel(self) -> bool:
        """Whether something was left to the timer. It is not done any more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        return timer is not None

    def observe(self, seconds: float) -> None:
        """So long took a step. Where steps differ, the short ones must not wait for the work."""
        self._step_s = min(seconds, self._step_s + MEAN_RATE * (seconds - self._step_s))

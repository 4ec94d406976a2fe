"""Shadow: what the event loop does for others while the model thread computes.

Python lets one thread run at a time. At the beginning of a step that must be the model thread,
which prepares its kernels: whatever the loop does then, the step waits for. So the loop waits to be
told that the kernels begin, and does its work behind them. That it is told costs something, too:
two threads' time to wake one. So what is little is done at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Shadow:
    """Calls ``work`` once for each step that is begun, before it is over; at once if it is little.

    Belongs to the event loop, but for `enter`.
    """

    def __init__(self, work: Callable[[], None], is_much: Callable[[], bool]) -> None:
        self._work, self._is_much = work, is_much
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_due = False
        self._has_entered = False  # the kernels of the step that is to begin, or has begun
        self._failure: BaseException | None = None

    def begin(self, *, is_told: bool) -> None:
        """A step begins, on the running loop. ``is_told``: `enter` will be called in it."""
        is_late, self._has_entered = self._has_entered, False
        if is_told and not is_late and self._is_much():
            self._loop, self._is_due = asyncio.get_running_loop(), True
        else:
            self._work()

    def enter(self) -> None:
        """The kernels begin. Called in the model thread."""
        self._has_entered = True  # `begin` may come later
        if self._is_due and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._told)

    def _told(self) -> None:
        try:
            self.finish()
        except BaseException as failure:  # raised where somebody waits for the step
            self._failure = failure

    def finish(self) -> None:
        """The step is over: work now, if nobody told of it. Raises what the work raised."""
        self._has_entered = False
        if self._is_due:
            self._is_due = False
            self._work()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def cancel(self) -> None:
        """What is due is not done any more."""
        self._is_due, self._has_entered, self._failure = False, False, None

"""LaunchGuard: watches launches that the event loop makes itself.

While such a launch hangs, no timer of the event loop fires, so the `Watchdog` cannot give it up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

BEATS = 8  # number of ticks after which a launch hangs


class LaunchGuard:
    """Thread that calls ``on_hung`` once if a launch takes longer than ``seconds``; 0: no limit.

    The thread begins with the first launch. It counts ticks and reads no clock, so a suspended
    machine counts as at most one tick. It cannot interrupt the launch, which hangs in a driver:
    ``on_hung``, which it calls, can only report it. `has_hung` stays true, so that the event loop
    gives up the step if the launch returns after all.
    """

    def __init__(self, seconds: float, on_hung: Callable[[], None]) -> None:
        self.has_hung = False
        self._period = seconds / BEATS
        self._on_hung = on_hung
        self._num_launches = 0
        self._is_launching = False
        self._seen = 0  # value of `_num_launches` at the last tick
        self._num_beats = 0  # number of ticks since the first tick during this launch
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def begin(self) -> None:
        """Begin to watch a launch, which the calling thread makes next."""
        self._num_launches += 1
        self._is_launching = True
        if self._thread is None and self._period > 0:
            self._thread = threading.Thread(
                target=self._watch, name="foretoken-launches", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """End watching: the launch returned or raised an error."""
        self._is_launching = False

    def close(self) -> None:
        """Let the thread end; call it only while no launch is watched."""
        self._ended.set()

    def beat(self) -> None:
        """Count a tick; the thread calls this `BEATS` times in the time limit."""
        is_same = self._is_launching and self._seen == self._num_launches
        self._num_beats = self._num_beats + 1 if is_same else 0
        self._seen = self._num_launches
        if self._num_beats >= BEATS and not self.has_hung:
            self.has_hung = True
            self._on_hung()

    def _watch(self) -> None:
        while not self._ended.wait(self._period) and not self.has_hung:
            self.beat()

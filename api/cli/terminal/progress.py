"""Progress on stderr: of loading a model, and of a long computation.

While a model loads, a terminal shows a bar; a final line follows in any case. Nothing is printed in
the first two seconds, so that quick commands print only their answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable

from ....core.config import format_size
from ....core.startup import COMPILING, LOADING, STARTUP, log_seconds, on_progress
from ...build.model_files import name_and_bytes
from ...runtime.interrupts import ending_at_once
from ..clock import BEGAN

PATIENCE = 2.0  # seconds before any progress is shown
TICK = 0.1  # seconds between updates of the progress bar
LINE_SECONDS = 10.0  # interval between progress lines that cannot be overwritten
WIDTH = 24  # width of the bar in characters
CLEAR = "\r\x1b[K"  # clears the line


def print_startup_steps() -> None:
    """Print the seconds that each startup step takes, from now on."""
    logger = logging.getLogger(STARTUP)
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    log_seconds("imports of the command", time.perf_counter() - BEGAN)


async def watch_loading(model: str | None, loading: Awaitable[None]) -> None:
    """Await ``loading`` and show its progress. Ctrl-C ends the process at once, with status 130."""
    found = name_and_bytes(model)
    name = f"{found[0]} ({format_size(found[1])})" if found else str(model)
    watch = _Watch(name, is_local=found is not None)
    before = on_progress.set(watch.note)
    try:
        with ending_at_once():
            await watch.over(loading)
    finally:
        on_progress.reset(before)
    log_seconds("total", time.perf_counter() - BEGAN)


class _Watch:
    """Shows the progress of loading one model.

    ``is_local``: the model needs no download; downloads show their own progress bars.
    """

    def __init__(self, model: str, *, is_local: bool) -> None:
        self._model = model
        self._began = time.monotonic()
        self._step, self._share = LOADING, 0.0
        self._is_loading = is_local
        self._is_shown = False
        self._is_rewritten = _is_rewritable()

    def note(self, step: str, share: float) -> None:
        """Record the completed fraction of a step; a callback for `on_progress`."""
        begins = step == COMPILING and step != self._step
        self._step, self._share, self._is_loading = step, share, True
        if begins and not self._is_rewritten:
            self._write(f"{COMPILING}, once for this version and CPU\n")

    async def over(self, loading: Awaitable[None]) -> None:
        """Await the load. The bar is replaced by a final line, or by the error if it fails."""
        ticker = asyncio.create_task(self._tick())
        try:
            await loading
        except BaseException:
            self._write(CLEAR if self._is_shown else "")
            raise
        finally:
            ticker.cancel()
        if self._seconds >= PATIENCE and self._is_loading:
            begin = CLEAR if self._is_shown else ""
            self._write(f"{begin}{LOADING} {self._model} ... {self._seconds:.1f} s\n")

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    async def _tick(self) -> None:
        # Without a terminal too: Python handles a SIGINT that comes just before the event loop
        # begins to wait only when the loop wakes.
        while True:
            await asyncio.sleep(TICK)
            if self._is_rewritten and self._is_loading and self._seconds >= PATIENCE:
                self._is_shown = True
                what = f"{LOADING} {self._model}" if self._step == LOADING else self._step
                self._write(f"{CLEAR}{what} {bar(self._share)} {self._seconds:.1f} s")

    def _write(self, text: str) -> None:
        if text and sys.stderr is not None:
            print(text, end="", file=sys.stderr, flush=True)


class Progress:
    """Shows the completed fraction of a computation and the estimated seconds left."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._is_rewritten = _is_rewritable()
        self._began = clock()
        self._next = self._began + PATIENCE

    def note(self, share: float) -> None:
        """Show the completed fraction, above 0 to 1, unless the last line is recent."""
        now = self._clock()
        is_last = share >= 1 and self._is_rewritten
        if sys.stderr is None or (now < self._next and not is_last):
            return
        left = (now - self._began) * (1 - share) / share
        line = f"{self._what} {bar(share)} about {left:.0f} s left"
        if self._is_rewritten:
            print(CLEAR + ("" if is_last else line), end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
        self._next = now + (TICK if self._is_rewritten else LINE_SECONDS)


def bar(share: float) -> str:
    """Return a progress bar such as ``[######------------------]  25 %``."""
    full = int(share * WIDTH)
    return f"[{'#' * full}{'-' * (WIDTH - full)}] {share:4.0%}"


def _is_rewritable() -> bool:
    """Whether a progress line can be overwritten.

    It can on a terminal, unless log lines about the startup may come between.
    """
    if sys.stderr is None or logging.getLogger(STARTUP).isEnabledFor(logging.DEBUG):
        return False
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

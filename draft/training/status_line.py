"""A line on a terminal that shows the progress of a long command."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_INTERVAL = 0.2  # seconds


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces the line on standard error, at most every 0.2 seconds.

    The function shows nothing if standard error is not a terminal.
    """
    shown: float | None = None

    def show(text: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if sys.stderr.isatty() and (shown is None or now - shown >= _INTERVAL):
            shown = now
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{text[:width]:{width}}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown is not None:
            print(file=sys.stderr)

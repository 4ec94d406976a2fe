"""Ctrl-C while a command loads a model."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let SIGINT end the process as SIGTERM does, in place of raising KeyboardInterrupt.

    A model is loaded in a thread, which cannot be cancelled: the process would wait for it, for
    minutes where the model is large. For commands alone, whose process has nothing to finish yet.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # which gets no signals
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""Ctrl-C while a command starts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that Ctrl-C has ended."""


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let SIGINT end the process with status 130, in place of raising KeyboardInterrupt.

    A model is loaded in a thread, which cannot be cancelled: the process would wait for it, for
    minutes where the model is large. While modules are imported, the exception would show a
    traceback of theirs. For commands alone, whose process has nothing to finish yet. A SIGINT that
    is ignored, as behind a shell's ``&``, stays so.
    """
    is_main = threading.current_thread() is threading.main_thread()  # others get no signals
    if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(_number: int, _frame: FrameType | None) -> None:
    if os.isatty(2):  # behind a bar, say
        os.write(2, b"\n")
    os._exit(INTERRUPTED)

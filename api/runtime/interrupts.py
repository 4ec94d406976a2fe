"""Handling of Ctrl-C while a command starts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a command that was ended by Ctrl-C."""


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let SIGINT end the process with status 130 instead of raising KeyboardInterrupt.

    Used by commands until there is work to finish. The model is loaded in a thread that cannot be
    cancelled, so the process would otherwise wait for it, for minutes with a large model. During
    imports the exception would print a long traceback. A SIGINT that is ignored, as after a shell's
    ``&``, stays ignored.
    """
    # only the main thread handles signals
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(_number: int, _frame: FrameType | None) -> None:
    if os.isatty(2):  # a progress bar may have left an incomplete line
        os.write(2, b"\n")
    os._exit(INTERRUPTED)

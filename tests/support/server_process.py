"""A real server in a process of its own, on a free port of the loopback interface."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from support.forked import Forked, command

START_SECONDS = 120.0


class Server:
    """A running ``foretoken serve``."""

    def __init__(self, process: Forked | subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url  # without /v1

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def running(
    args: Sequence[str] = (),
    *,
    model: str = "builtin",
    variables: Mapping[str, str] | None = None,
    started_by: Sequence[str] | None = None,
) -> Iterator[Server]:
    """Start a server, wait until it says that it is ready, end it in any case.

    It is forked (`support.forked`), or a new process of the command ``started_by``.
    """
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})}
    reading, writing = os.pipe()
    process: Forked | subprocess.Popen[bytes]
    with open(os.devnull) as nothing:
        streams = {"stdin": nothing, "stdout": writing, "stderr": writing}
        if started_by is None:
            words = ("serve", model, "--port", "0", *args)
            process = Forked(command, *words, env=env, **streams)  # type: ignore[arg-type]
        else:
            process = subprocess.Popen(started_by, start_new_session=True, env=env, **streams)  # type: ignore[call-overload]
    os.close(writing)
    try:
        yield Server(process, _ready_url(reading))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(reading)


def _ready_url(reading: int) -> str:
    """The address in the line that a server prints once it takes requests."""
    deadline, printed = time.monotonic() + START_SECONDS, ""
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            # Not readline: of two lines that come together it would keep the second from select.
            piece = os.read(reading, 2**16).decode(errors="replace")
            printed += piece
            if found := re.search(r"http://127\.0\.0\.1:\d+(?=\s)", printed):
                return found[0]
            if not piece:
                break
    raise AssertionError(f"the server did not start:\n{printed}")

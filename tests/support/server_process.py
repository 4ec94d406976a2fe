"""A real server in a process of its own, on a free port of the loopback interface."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

START_SECONDS = 120.0


class Server:
    """A running ``foretoken serve``."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url  # without /v1

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def running(
    args: Sequence[str] = (), *, model: str = "builtin", command: Sequence[str] | None = None
) -> Iterator[Server]:
    """Start a server, wait until it says that it is ready, end it in any case."""
    serve = [sys.executable, "-m", "foretoken.api.cli.commands", "serve", model, "--port", "0"]
    command = command or [*serve, *args]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield Server(process, _ready_url(process))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _ready_url(process: subprocess.Popen[str]) -> str:
    """The address in the line that a server prints once it takes requests."""
    assert process.stdout is not None
    deadline, printed = time.monotonic() + START_SECONDS, ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            # Not readline: of two lines that come together it would keep the second from select.
            piece = os.read(process.stdout.fileno(), 2**16).decode(errors="replace")
            printed += piece
            if found := re.search(r"http://127\.0\.0\.1:\d+(?=\s)", printed):
                return found[0]
            if not piece:
                break
    raise AssertionError(f"the server did not start:\n{printed}")

"""The server under test: a process as a user starts it, and what it holds of the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .wire import Address

START_SECONDS = 120.0
MAX_LINES = 200
_TCP = re.compile(r"http://([\d.]+):(\d+)(?=\s|$)")
_UNIX = re.compile(r"unix:(\S+)")
_TROUBLE = re.compile(r"\b(ERROR|CRITICAL|Traceback)\b|\"level\": ?\"(error|critical)\"")


class Footprint(msgspec.Struct, frozen=True):
    """Resources of a process. Memory: bytes that it allocated, not what it mapped from files."""

    at: float  # time.monotonic
    memory: int
    threads: int
    descriptors: int
    sockets: int


def footprint(pid: int) -> Footprint:
    """Out of /proc, which Linux has; raises OSError once the process is gone."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed while we look
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return Footprint(
        at=time.monotonic(),
        memory=2**10 * int(status["RssAnon"].split()[0]),
        threads=int(status["Threads"]),
        descriptors=len(found),
        sockets=sum(name.startswith("socket:") for name in found),
    )


class Server:
    """``foretoken serve``: one process after the other at one address."""

    def __init__(self, args: Sequence[str], *, uds: str | None = None) -> None:
        self.address: Address = uds or ("127.0.0.1", 0)
        self.lines: deque[str] = deque(maxlen=MAX_LINES)  # what they printed
        self.troubles: list[str] = []  # lines that tell of an error
        self._args = list(args)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._told = asyncio.Event()

    @property
    def pid(self) -> int:
        """Id of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit status of the process; None while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> float:
        """Start one and wait until it listens; the seconds that took. SystemExit if it never does.

        From the second one on it is bound to the port that the first one found.
        """
        begin = time.monotonic()
        await self._end_of_output()  # of the one before: what it still said is not ours
        self._told = asyncio.Event()
        self._process = await asyncio.create_subprocess_exec(
            *[
                sys.executable,
                "-m",
                "foretoken.api.cli.commands",
                "serve",
                "builtin",
                *self._args,
                *self._where(),
            ],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        self._reading = asyncio.create_task(self._read(self._process))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await self._told.wait()
        if self._process.returncode is not None or not self._told.is_set():
            raise SystemExit(f"the server did not start:\n{''.join(self.lines)}")
        return time.monotonic() - begin

    def _where(self) -> list[str]:
        if isinstance(self.address, str):
            return ["--uds", self.address]
        return ["--port", str(self.address[1])]

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for raw in process.stdout:
            line = raw.decode("utf-8", "replace")
            self.lines.append(line)
            if _TROUBLE.search(line):
                self.troubles.append(line.rstrip())
            if not self._told.is_set() and self._is_notified(line):
                self._told.set()
        await process.wait()
        self._told.set()  # the end: it will not come any more

    def _is_notified(self, line: str) -> bool:
        if isinstance(self.address, str):
            return _UNIX.search(line) is not None
        found = _TCP.search(line)
        if found is not None:
            self.address = (found[1], int(found[2]))
        return found is not None

    def footprint(self) -> Footprint:
        """Return the footprint of the process that runs now."""
        return footprint(self.pid)

    def signal(self, number: signal.Signals) -> None:
        """Send it, if the process is still there."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def ended(self, seconds: float) -> int | None:
        """The exit status (negative: the signal that ended it), or None after so long."""
        assert self._process is not None
        try:
            async with asyncio.timeout(seconds):
                return await self._process.wait()
        except TimeoutError:
            return None

    async def kill(self) -> None:
        """End it in any case."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            await self._process.wait()
        await self._end_of_output()

    async def _end_of_output(self) -> None:
        if self._reading is not None:
            await self._reading

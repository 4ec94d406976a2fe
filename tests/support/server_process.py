"""A real server in a process of its own, on a free port of the loopback interface.

With the variable TEST_FRONT=1 it is a front with one replica: what is promised of a
server holds for both.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence

from foretoken.api.cli.serve import FRONT_ENGINE_OPTIONS
from foretoken.core.config import EngineConfig
from foretoken.core.options.settings import settings_of
from support.forked import Forked, command

START_SECONDS = 120.0
FRONT = "TEST_FRONT"


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
    is_front: bool = False,
) -> Iterator[Server]:
    """Start a server, wait until it says that it is ready, end it in any case.

    It is forked (`support.forked`), or a new process of the command ``started_by``.
    """
    if started_by is None and (is_front or os.environ.get(FRONT) == "1"):
        with running_front(args, model=model, variables=variables) as (server, _):
            yield server
    else:
        with _process(args, model=model, variables=variables, started_by=started_by) as server:
            yield server


@contextlib.contextmanager
def _process(
    args: Sequence[str],
    *,
    model: str,
    variables: Mapping[str, str] | None,
    started_by: Sequence[str] | None = None,
) -> Iterator[Server]:
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


@contextlib.contextmanager
def running_front(
    args: Sequence[str] = (),
    *,
    num_replicas: int = 1,
    model: str = "builtin",
    variables: Mapping[str, str] | None = None,
) -> Iterator[tuple[Server, list[Forked]]]:
    """Start a front and its replicas; each has those of the flags that are its own."""
    own, engine = split_flags(args)
    address = f"tcp://127.0.0.1:{free_port()}"
    replicas: list[Forked] = []
    try:
        for _ in range(num_replicas):
            replicas.append(start_replica(address, engine, model=model, variables=variables))
        with front_at(
            address, own, num_replicas=num_replicas, model=model, variables=variables
        ) as server:
            yield server, replicas
    finally:
        for each in replicas:
            each.kill()
            each.wait()


def start_replica(
    address: str,
    args: Sequence[str] = (),
    *,
    model: str = "builtin",
    variables: Mapping[str, str] | None = None,
) -> Forked:
    """A replica that dials a front; whoever started it ends it."""
    words = ("replica", model, "--front", address, "--log-level", "error", *args)
    with open(os.devnull, "w+") as nothing:
        streams = {"stdin": nothing, "stdout": nothing, "stderr": sys.stderr.fileno()}
        return Forked(command, *words, env={**os.environ, **(variables or {})}, **streams)


@contextlib.contextmanager
def front_at(
    address: str,
    args: Sequence[str] = (),
    *,
    num_replicas: int = 1,
    model: str = "builtin",
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a front, and wait until its replicas are there."""
    words = ("--front", address, "--replicas", str(num_replicas), *args)
    with _process(words, model=model, variables=variables) as server:
        _await_replicas(server)
        yield server


def _await_replicas(server: Server) -> None:
    """Wait for all of them: the front tells its address when it has the first one."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{server.url}/ready", timeout=START_SECONDS).close()
            return
        except urllib.error.HTTPError as refused:
            with refused:
                if refused.code != 503:
                    return  # it needs a key, which is not known here
            time.sleep(0.05)
    raise AssertionError("the replicas did not start")


def split_flags(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of a front, and those of its replicas."""
    engines = {each.flag: each for each in settings_of(EngineConfig).values()}
    own: list[str] = []
    engine: list[str] = []
    rest = list(args)
    while rest:
        words = [rest.pop(0)]
        setting = engines.get(words[0].partition("=")[0])
        if setting is not None and not (setting.is_switch or "=" in words[0]):
            words.append(rest.pop(0))
        if setting is not None and setting.name != "lora":
            engine += words
        if setting is None or setting.name in FRONT_ENGINE_OPTIONS:
            own += words
    return own, engine


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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

"""One process: the app on uvicorn, signals, draining, the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from .._version import __version__
from .app import create_app
from .connection import connection_class
from .host import Host
from .prewarm import Warm, prewarm
from .service import Settings

logger = logging.getLogger(__name__)
MAX_HEADER_BYTES = 64 * 2**10
MAX_CONNECTIONS = 1024
KEEP_ALIVE_SECONDS = 75
FLUSH_SECONDS = 5  # for answers that are complete but not all sent
WATCH_SECONDS = 1.0
SOCKET_MODE = 0o600  # other users of the machine have no business here
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where to listen, how loudly to log, how long to drain (seconds)."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    log_level: str = "info"
    drain_seconds: float = 30.0
    prewarm: Sequence[Warm] = ()  # computed before it listens
    settings: Settings = field(default_factory=Settings)


def run(llm: Host, listen: Listen) -> int:
    """Serve until a signal; the process's exit code. Blocking."""
    logging.basicConfig(level=listen.log_level.upper(), format="%(levelname)s %(name)s %(message)s")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(llm, listen))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None  # not made for every platform: asyncio's own loop serves too
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(llm: Host, listen: Listen) -> int:
    config = uvicorn_config(llm, listen)
    try:
        sock = _bind(config)  # a port that is taken shows before the model is loaded
    except SystemExit:  # uvicorn's way to say so; it has logged why
        return 1
    try:
        await llm.start()
        return await _serve_on(sock, llm, listen, config)
    finally:
        _unbind(sock, listen.uds)


def _bind(config: uvicorn.Config) -> socket.socket:
    if config.uds is None:
        return config.bind_socket()
    if _is_stale(Path(config.uds)):
        Path(config.uds).unlink(missing_ok=True)
    sock = config.bind_socket()
    Path(config.uds).chmod(SOCKET_MODE)  # nobody is in yet: it does not listen
    return sock


def _unbind(sock: socket.socket, uds: str | None) -> None:
    sock.close()
    if uds is not None:
        Path(uds).unlink(missing_ok=True)


def _is_stale(path: Path) -> bool:
    """Whether a server that was killed left this socket; another kind of file is nobody's."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a server that is busy would keep us waiting
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


async def _serve_on(sock: socket.socket, llm: Host, listen: Listen, config: uvicorn.Config) -> int:
    server = _Server(config, lambda address: _announce(llm, listen, address))
    keeper = _Keeper(llm, server, listen.drain_seconds)
    try:
        with keeper.signals():
            await prewarm(llm, listen.prewarm)
            await server.serve([sock])
    finally:
        await keeper.end()
        await llm.close()
    return keeper.exit_code


def uvicorn_config(llm: Host, listen: Listen) -> uvicorn.Config:
    """The app behind uvicorn, with every limit on what a client may hold."""
    settings = listen.settings
    protocol = connection_class(
        header_seconds=settings.header_seconds, write_seconds=settings.write_seconds
    )
    return uvicorn.Config(
        create_app(llm, settings),
        host=listen.host,
        port=listen.port,
        uds=listen.uds,
        http=protocol,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_level="warning" if listen.log_level == "info" else listen.log_level,
        access_log=listen.log_level == "debug",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )


def _announce(llm: Host, listen: Listen, address: str) -> None:
    name = listen.settings.served_name or llm.built.name
    print(f"foretoken {__version__} serves {name} on {address}", file=sys.stderr, flush=True)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with a word when it listens."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[str], None]) -> None:
        super().__init__(config)
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the keeper's."""
        yield

    async def startup(self, sockets: Any = None) -> None:  # noqa: ANN401 - uvicorn's signature
        """Listen, then say where."""
        await super().startup(sockets)
        if not self.should_exit:
            self._announce(self._address())

    def _address(self) -> str:
        if self.config.uds:
            return f"unix:{self.config.uds}"
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Keeper:
    """Ends the server: drained on the first signal, now on the second, and when the engine dies."""

    def __init__(self, llm: Host, server: uvicorn.Server, drain_seconds: float) -> None:
        self.exit_code = 0
        self._llm = llm
        self._server = server
        self._drain_seconds = drain_seconds
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handle them, and watch the engine, inside the block."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        self._spawn(self._watch())
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _on_signal(self, number: int) -> None:
        if self._llm.draining:
            logger.warning("second signal: leaving at once")
            os._exit(128 + number)
        logger.info("draining for up to %s s", self._drain_seconds)
        self._spawn(self._drain())

    async def _drain(self) -> None:
        """Keep listening meanwhile, so that /ready says 503 and new requests are told so."""
        try:
            await self._llm.close(drain_seconds=self._drain_seconds)
        finally:
            self._server.should_exit = True

    async def _watch(self) -> None:
        """A server whose engine is dead must not linger: somebody will start it anew."""
        while self._llm.engine.alive or self._llm.draining:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(WATCH_SECONDS)
        logger.critical("the engine is dead: leaving")
        self.exit_code = 1
        self._server.should_exit = True

    async def end(self) -> None:
        """Stop watching; a drain that runs is finished."""
        watch, *drains = self._tasks
        watch.cancel()
        await asyncio.gather(watch, *drains, return_exceptions=True)

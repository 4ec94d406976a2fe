"""The server process: the application on uvicorn, signals, draining, the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import gc
import importlib
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from ..._version import __version__
from ...core.errors import EngineDead, InvalidRequest
from ..runtime.engine_client import EngineClient
from ..runtime.interrupts import ending_at_once
from ..sdk.async_llm import AsyncLLM
from ..serving.serving_context import chat_client
from ..serving.settings import Listen
from .app import create_app
from .guards.connection import connection_class, reserve_files
from .lifecycle import STUCK, Supervisor
from .observation.logs import announcement
from .observation.observability import Observing
from .prewarm import Warm, prewarm, read_prewarm
from .sockets.protocol import socket_options
from .unix_socket import SOCKET_MODE, owned, remove

logger = logging.getLogger(__name__)
FLUSH_SECONDS = 5  # time limit for complete answers to be sent
STDERR = 2


def run(llm: EngineClient, listen: Listen, observing: Observing | None = None) -> int:
    """Serve until a signal. Return the exit status. Blocking.

    Raises `InvalidRequest` for a file in the options that cannot be read.
    """
    seconds = listen.drain_seconds
    on_drain = f"waiting up to {seconds} s for running requests (--drain-seconds)"
    supervisor = Supervisor(llm, drain_seconds=seconds, on_drain=on_drain)
    return run_loop(_serve(llm, listen, observing or Observing(), supervisor), supervisor.close)


def run_loop(serving: Coroutine[Any, Any, int], close: Callable[[], None]) -> int:
    """Run ``serving`` in an event loop, call ``close`` and return the exit status.

    Ends the process if a thread is stuck.
    """
    faulthandler.enable(file=STDERR)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = runner.run(serving)
    finally:
        close()
    if code == STUCK:  # a normal exit would wait for the stuck thread or crash in it
        logging.shutdown()
        os._exit(code)
    return code


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None  # uvloop is not available on every platform
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(
    llm: EngineClient, listen: Listen, observing: Observing, supervisor: Supervisor
) -> int:
    warms = read_prewarm(listen.prewarm) if listen.prewarm else ()
    reserve_files(listen.settings.limits)
    config = uvicorn_config(llm, listen, observing)
    with contextlib.ExitStack() as closing:
        try:
            # report a port in use before the slow loading of the model
            sock = _bind(config, closing)
        except OSError as error:
            logger.error("%s", _why_not_bound(error, listen))
            return 1
        # Only a front ends normally on a signal, since it must stop the replicas that it started.
        with ending_at_once() if isinstance(llm, AsyncLLM) else contextlib.nullcontext():
            await llm.prepare()
        gc.freeze()  # each full collection of the loaded objects would take 0.1 s
        listener = _Listener(config, listen, sock)
        observing.metrics.num_connections = listener.num_connections
        try:
            with supervisor.watching(listener.stop):
                served = await _serve_on(listener, llm, listen, observing, supervisor, warms)
        finally:
            await listener.end()
            await supervisor.end()
            await llm.close()
        return supervisor.exit_code if served else 1


async def _serve_on(
    listener: _Listener,
    llm: EngineClient,
    listen: Listen,
    observing: Observing,
    supervisor: Supervisor,
    warms: Sequence[Warm],
) -> bool:
    """Serve until a signal. Return False if another program uses the port."""
    if not llm.ready:
        if not await listener.start():
            return False
        logger.info("listening on %s: requests get 503 until replicas connect", listener.address)
    try:
        await llm.start()
    except EngineDead:
        if not llm.draining:
            raise
        return True  # a signal arrived before the first replica
    async with observing.serving(llm, _name(llm, listen)):
        try:
            await prewarm(llm, chat_client(llm, listen.settings), warms)
            if llm.draining:
                return True
            if not await listener.start():
                return False
            _announce(llm, listen, listener.address)
            await listener.serve()
            return True
        finally:
            await supervisor.end()
            await llm.close()


def _bind(config: uvicorn.Config, closing: contextlib.ExitStack) -> socket.socket:
    """Return a socket bound to the configured address. ``closing`` closes it.

    Raises OSError if the address cannot be bound, whereas uvicorn would end the process.
    """
    address: str | tuple[str, int]
    if config.uds is not None:
        closing.enter_context(owned(Path(config.uds)))
        family, address = socket.AF_UNIX, config.uds
    else:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        address = (config.host, config.port)
    sock = closing.enter_context(socket.socket(family))
    # A fixed port may be reused while old connections linger. Not for port 0: the system could then
    # choose a port that another server has bound but does not listen on yet.
    if config.uds is None and config.port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    if config.uds is not None:
        path = Path(config.uds)
        path.chmod(SOCKET_MODE)  # the socket does not listen yet, so no client has connected
        closing.callback(remove, path, path.stat())
    return sock


def _why_not_bound(error: OSError, listen: Listen) -> str:
    if error.errno != errno.EADDRINUSE:
        return f"cannot listen on {listen.uds or listen.host}: {error.strerror or error}"
    if listen.uds is not None:
        return f"{listen.uds} is used by another server or is not a socket; choose another --uds"
    return f"port {listen.port} is in use by another program; choose another with --port N (0: any)"


def uvicorn_config(
    llm: EngineClient, listen: Listen, observing: Observing | None = None
) -> uvicorn.Config:
    """Return uvicorn's configuration for the application, with limits on clients.

    Raises `InvalidRequest` for an unusable certificate or key.
    """
    settings = listen.settings
    context = None if listen.ssl_certfile is None else _tls(listen.ssl_certfile, listen.ssl_keyfile)
    return uvicorn.Config(
        create_app(llm, settings, observing),
        host=listen.host,
        port=listen.port,
        uds=listen.uds,
        http=connection_class(settings.limits),
        h11_max_incomplete_event_size=settings.limits.max_header_bytes,
        **socket_options(settings.limits),
        lifespan="on",
        log_level="warning" if listen.log_level == "info" else listen.log_level,
        log_config=None,  # use the process's logging
        access_log=False,  # `logs.log_request` replaces it
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        ssl_context_factory=None if context is None else lambda _config, _default: context,
    )


def _tls(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    """Return a TLS context with the certificate. Raises `InvalidRequest`, which names the file."""
    for name, file in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile or certfile)):
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{name}: {file}: {error.strerror}", param=name) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password callback OpenSSL would ask on the terminal.
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except ssl.SSLError as error:
        reason = (error.reason or "no PEM").lower().replace("_", " ")
        files = certfile if keyfile is None else f"{certfile} with {keyfile}"
        message = f"ssl_certfile: {files}: {reason}; the key must have no password"
        raise InvalidRequest(message, param="ssl_certfile") from None
    return context


def _announce(llm: EngineClient, listen: Listen, address: str) -> None:
    name = _name(llm, listen)
    lines = [f"foretoken {__version__} serves {name} on {address}"]
    if listen.settings.ui and listen.uds is None:
        lines.append(f"open {address}/ to chat")
    for line in lines:
        print(announcement(line, listen.log_format), file=sys.stderr, flush=True)


def _name(llm: EngineClient, listen: Listen) -> str:
    return next(iter(listen.settings.served_names), llm.built.name)


class _Listener:
    """A bound socket and the uvicorn server that serves it."""

    def __init__(self, config: uvicorn.Config, listen: Listen, sock: socket.socket) -> None:
        self._listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._server = _Server(config, self._listening.set_result)
        self._listen, self._sock = listen, sock
        self._serving: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The address of the socket. Available after `start`."""
        return self._listening.result()

    def num_connections(self) -> int:
        """Return the number of open connections."""
        return len(self._server.server_state.connections)

    async def start(self) -> bool:
        """Start to serve, unless started already. Log an error and return False if it fails."""
        if self._serving is None:
            try:
                self._sock.listen()
            except OSError as error:
                logger.error("%s", _why_not_bound(error, self._listen))
                return False
            self._serving = asyncio.create_task(self._server.serve([self._sock]))
            either = (self._serving, self._listening)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._listening.done():
                self._serving.result()  # raises the server's error
        return True

    def stop(self) -> None:
        """Make `serve` return once all answers are sent."""
        self._server.should_exit = True

    async def serve(self) -> None:
        """Serve until `stop`."""
        if self._serving is not None:
            await self._serving

    async def end(self) -> None:
        """Stop, and wait until the server has ended."""
        self.stop()
        await self.serve()


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers, and with a callback that gets its address."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[str], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, since `Supervisor` handles signals."""
        yield

    async def startup(self, sockets: Any = None) -> None:  # noqa: ANN401 - uvicorn's signature
        """Listen, then report the address."""
        await super().startup(sockets)
        self._on_listening(self._address())

    def _address(self) -> str:
        if self.config.uds:
            return f"unix:{self.config.uds}"
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

"""One process: the app on uvicorn, signals, draining, the exit code."""

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
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from ..._version import __version__
from ...core.errors import InvalidRequest
from ..runtime.engine_client import EngineClient
from ..serving.serving_context import chat_client
from ..serving.settings import Listen
from .app import create_app
from .guards.connection import connection_class, reserve_files
from .lifecycle import STUCK, Supervisor
from .observation.logs import announcement
from .observation.observability import Observing
from .prewarm import prewarm, read_prewarm
from .unix_socket import SOCKET_MODE, owned, remove

logger = logging.getLogger(__name__)
FLUSH_SECONDS = 5  # for answers that are complete but not all sent
STDERR = 2


def run(llm: EngineClient, listen: Listen, observing: Observing | None = None) -> int:
    """Serve until a signal; the process's exit code. Blocking.

    Raises `InvalidRequest` for a file of the options that cannot be read.
    """
    seconds = listen.drain_seconds
    on_drain = f"waiting up to {seconds} s for running requests (--drain-seconds)"
    supervisor = Supervisor(llm, drain_seconds=seconds, on_drain=on_drain)
    return run_loop(_serve(llm, listen, observing or Observing(), supervisor), supervisor.close)


def run_loop(serving: Coroutine[Any, Any, int], close: Callable[[], None]) -> int:
    """Run ``serving`` in an event loop, then call ``close``; the exit code that it returns.

    Ends the process itself where a thread is stuck.
    """
    faulthandler.enable(file=STDERR)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = runner.run(serving)
    finally:
        close()
    if code == STUCK:  # a thread that never ends would be waited for, or be torn to pieces
        logging.shutdown()
        os._exit(code)
    return code


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None  # not made for every platform: asyncio's own loop serves too
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
            sock = _bind(config, closing)  # a port that is taken shows before the model is loaded
        except OSError as error:
            logger.error("%s", _why_not_bound(error, listen))
            return 1
        await llm.start()
        gc.freeze()  # what is loaded stays: to look through it took 0.1 s again and again
        async with observing.serving(llm, _name(llm, listen)):
            server = _Server(config, lambda address: _announce(llm, listen, address))
            observing.metrics.num_connections = lambda: len(server.server_state.connections)
            warm_up = partial(prewarm, llm, chat_client(llm, listen.settings), warms)
            listening = partial(_listens, sock, listen)
            served = await _serve_on(sock, server, llm, warm_up, listening, supervisor)
            return supervisor.exit_code if served else 1


def _bind(config: uvicorn.Config, closing: contextlib.ExitStack) -> socket.socket:
    """The socket that will listen, until ``closing`` ends.

    Raises OSError; uvicorn's own way would end the process.
    """
    address: str | tuple[str, int]
    if config.uds is not None:
        closing.enter_context(owned(Path(config.uds)))
        family, address = socket.AF_UNIX, config.uds
    else:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        address = (config.host, config.port)
    sock = closing.enter_context(socket.socket(family))
    # A named port may be taken while old connections linger. For port 0 that would let the
    # system name a port that is bound and does not listen yet: another server's, loading.
    if config.uds is None and config.port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    if config.uds is not None:
        path = Path(config.uds)
        path.chmod(SOCKET_MODE)  # nobody is in yet: it does not listen
        closing.callback(remove, path, path.stat())
    return sock


def _listens(sock: socket.socket, listen: Listen) -> bool:
    """Listen; False, and a line in the log, where another program was faster on the same port."""
    try:
        sock.listen()
    except OSError as error:
        logger.error("%s", _why_not_bound(error, listen))
        return False
    return True


def _why_not_bound(error: OSError, listen: Listen) -> str:
    if error.errno != errno.EADDRINUSE:
        return f"cannot listen on {listen.uds or listen.host}: {error.strerror or error}"
    if listen.uds is not None:
        return f"{listen.uds} is in use by another server, or no socket; choose another --uds"
    return f"port {listen.port} is in use by another program; choose another with --port N (0: any)"


async def _serve_on(
    sock: socket.socket,
    server: _Server,
    llm: EngineClient,
    warm_up: Callable[[], Awaitable[int]],
    listening: Callable[[], bool],
    supervisor: Supervisor,
) -> bool:
    """Serve until a signal. False: another program has the port, and nobody was served."""
    try:
        with supervisor.watching(server.stop):
            await warm_up()
            if not listening():
                return False
            await server.serve([sock])
            return True
    finally:
        await supervisor.end()
        await llm.close()


def uvicorn_config(
    llm: EngineClient, listen: Listen, observing: Observing | None = None
) -> uvicorn.Config:
    """The app behind uvicorn, with every limit on what a client may hold.

    Raises `InvalidRequest` for a certificate or a key that cannot be used.
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
        ws="none",
        lifespan="off",
        log_level="warning" if listen.log_level == "info" else listen.log_level,
        log_config=None,  # as all else is logged
        access_log=False,  # `logs.log_request` is ours
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        ssl_context_factory=None if context is None else lambda _config, _default: context,
    )


def _tls(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    """Context with the server's certificate. Raises `InvalidRequest` naming the file."""
    for name, file in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile or certfile)):
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{name}: {file}: {error.strerror}", param=name) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would read one from the terminal.
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


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with a word when it listens."""

    def __init__(self, config: uvicorn.Config, on_kernels_started: Callable[[str], None]) -> None:
        super().__init__(config)
        self._announce = on_kernels_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: `Supervisor` handles signals."""
        yield

    async def startup(self, sockets: Any = None) -> None:  # noqa: ANN401 - uvicorn's signature
        """Listen, then say where."""
        await super().startup(sockets)
        if not self.should_exit:
            self._announce(self._address())

    def stop(self) -> None:
        """End `serve`, once answers are sent."""
        self.should_exit = True

    def _address(self) -> str:
        if self.config.uds:
            return f"unix:{self.config.uds}"
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

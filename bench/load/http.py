"""A small HTTP/1.1 client for load, which reads bytes in the event loop as they arrive.

One connection serves one request at a time and is kept for the next, as clients do. The only
retried requests are those on a kept connection that the server had closed in the meantime. Answers
are parsed by httptools, not by h11, because a client that costs as much as the server would measure
itself.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httptools

FIRST_FINAL = 200  # The lowest status that is not interim.
OnBody = Callable[[float, bytes], None]
"""Called with the arrival time of a piece of the body, and the piece."""


def request_bytes(method: str, path: str, fields: Mapping[str, str], body: bytes | None) -> bytes:
    """Return the bytes of a request; a body is JSON."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


class Failure(Exception):  # noqa: N818 - it is counted, not handled
    """A request that was not served; errors are counted by ``kind``."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind, self.message = kind, message


class AnswerParser:
    """Incremental parser of an HTTP answer."""

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.can_reuse = False  # Whether the connection may serve another request.
        self.fields: dict[str, str] = {}  # Header fields, with names in lower case.
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body in these bytes. Raises `Failure` if they are not HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Failure("invalid HTTP", str(error)) from None
        piece = b"".join(self._body)
        self._body.clear()
        return piece

    def end(self) -> None:
        """Note the end of the connection. Raises `Failure` unless the body ends with it."""
        framing = {"content-length", "transfer-encoding"}
        self.done = self.done or bool(self.status and not framing & self.fields.keys())
        if not self.done:
            raise Failure(
                "connection cut", "the server closed the connection before the answer was complete"
            )

    # -- what httptools calls -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Forget the fields of an interim answer, such as 100."""
        self.fields = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header field."""
        self.fields[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Keep the status, unless it is an interim one."""
        status = self._parser.get_status_code()
        self.status = status if status >= FIRST_FINAL else 0

    def on_body(self, piece: bytes) -> None:
        """Keep a piece of the body."""
        self._body.append(piece)

    def on_message_complete(self) -> None:
        """Mark the answer as complete, unless it was an interim one."""
        self.done = self.status > 0
        self.can_reuse = self.done and self._parser.should_keep_alive()


class _Connection(asyncio.Protocol):
    """Serves one exchange after another."""

    def __init__(self) -> None:
        self.fresh = True  # Whether the connection has not served a request yet.
        self.lost = False
        self._transport: asyncio.Transport | None = None
        self._parser = AnswerParser()
        self._on_body: OnBody | None = None
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._waiter is None or self._waiter.done():
            return
        try:
            piece = self._parser.feed(data)
            if piece and self._on_body is not None:
                self._on_body(now, piece)
        except Exception as error:  # Every error is passed to the request's task.
            self._waiter.set_exception(error)
            return
        if self._parser.done:
            self._waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._waiter is None or self._waiter.done():
            return
        try:
            if exc is not None:
                raise Failure("connection cut", str(exc))
            self._parser.end()
            self._waiter.set_result(None)
        except Failure as failure:
            self._waiter.set_exception(failure)

    async def exchange(self, request: bytes, on_body: OnBody, parser: AnswerParser) -> None:
        """Send a request, and wait for the end of the answer."""
        assert self._transport is not None
        self._parser, self._on_body = parser, on_body
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._waiter
        finally:
            self._waiter = self._on_body = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Http:
    """Connections to one server."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        """Parse ``url``, which may end in a version such as /v1.

        Raises ValueError if ``url`` is not an address.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url} is not an address; use one such as http://127.0.0.1:8000")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        path = parts.path.rstrip("/")
        version = re.search(r"/v\d+$", path)
        self._version = version[0] if version else ""
        self._base = path.removesuffix(self._version)
        self._fields = {"host": parts.netloc}
        if key is not None:
            self._fields["authorization"] = f"Bearer {key}"
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, on_body: OnBody) -> int:
        """Send a POST and return its status; the body goes to ``on_body``. Raises `Failure`."""
        request = request_bytes("POST", self._full(path), self._fields, body)
        return await self._ask(request, on_body)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Send a GET and return status and body. Raises `Failure`."""
        pieces: list[bytes] = []
        request = request_bytes("GET", self._full(path), self._fields, None)
        status = await self._ask(request, lambda _, piece: pieces.append(piece))
        return status, b"".join(pieces)

    async def post_whole(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a POST and return status and body. Raises `Failure`."""
        pieces: list[bytes] = []
        status = await self.post(path, body, lambda _, piece: pieces.append(piece))
        return status, b"".join(pieces)

    def _full(self, path: str) -> str:
        """Return ``path`` below the server's address, whose version replaces /v1."""
        is_versioned = path.startswith("/v1/") and self._version
        return self._base + (self._version + path[3:] if is_versioned else path)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _ask(self, request: bytes, on_body: OnBody) -> int:
        while True:
            connection, parser = await self._connection(), AnswerParser()
            try:
                await connection.exchange(request, on_body, parser)
            except Failure:
                connection.close()
                if connection.fresh or parser.status:
                    raise
                continue  # The server had closed the kept connection.
            except BaseException:
                connection.close()
                raise
            connection.fresh = False
            if parser.can_reuse and not connection.lost:
                self._idle.append(connection)
            else:
                connection.close()
            return parser.status

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                return connection
        loop = asyncio.get_running_loop()
        try:
            return (await loop.create_connection(_Connection, self.host, self.port, ssl=self._ssl))[
                1
            ]
        except OSError as error:
            raise Failure("no connection", str(error)) from None

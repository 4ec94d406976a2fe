"""A small HTTP/1.1 client for load: bytes are looked at as they arrive, in the event loop itself.

One connection serves one request at a time and is kept for the next, as clients do. Nothing is
retried but a request on a kept connection that the server had closed in the meantime. Answers are
parsed here, not by h11: a chunk takes a quarter of its time and a whole answer far less, and a
client that costs as much as the server would measure itself.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"
MAX_HEAD_BYTES = 64 * 2**10
OnBody = Callable[[float, bytes], None]
"""Told when a piece of the body came, and the piece."""


def request_bytes(method: str, path: str, fields: Mapping[str, str], body: bytes | None) -> bytes:
    """A well-formed request, as it goes over the wire; a body is JSON."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


class Failure(Exception):  # noqa: N818 - it is counted, not handled
    """A request that was not served; ``kind`` is what errors are counted by."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind, self.message = kind, message


class AnswerParser:
    """An HTTP answer out of bytes, however they were cut on their way."""

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.keeps = False  # the connection may serve another request
        self.fields: Mapping[str, str] = {}  # of the header, their names in lower case
        self._buffer = bytearray()
        self._left: int | None = None  # of the body or the chunk; None: until the end
        self._chunked = False
        self._in_chunk = False

    def feed(self, data: bytes) -> bytes:
        """The body that these bytes bring; raises `Failure` for what is no HTTP."""
        self._buffer += data
        if not self.status and not self._read_head():
            return b""
        return self._chunks() if self._chunked else self._plain()

    def end(self) -> None:
        """The connection is over; raises `Failure` unless that is how the body ends."""
        if self.status and not self._chunked and self._left is None:
            self.done = True
        if not self.done:
            raise Failure("connection cut", "the server ended it before the answer was whole")

    def _read_head(self) -> bool:
        end = self._buffer.find(HEAD_END)
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise Failure("no HTTP", "a header without an end")
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + len(HEAD_END)]
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise Failure("no HTTP", lines[0][:80])
        fields = {k.strip().lower(): v.strip() for k, _, v in (x.partition(":") for x in lines[1:])}
        if rest[:3] == "100":
            return self._read_head()
        self._open_body(int(rest[:3]), version, fields)
        return True

    def _open_body(self, status: int, version: str, fields: Mapping[str, str]) -> None:
        self.status, self.fields = status, fields
        self._chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        if not self._chunked and "content-length" in fields:
            self._left = int(fields["content-length"])
        closes = fields.get("connection", "").lower() == "close"
        framed = self._chunked or self._left is not None
        self.keeps = framed and version == "HTTP/1.1" and not closes
        self.done = self._left == 0 and not self._chunked

    def _plain(self) -> bytes:
        piece = bytes(self._buffer)
        self._buffer.clear()
        if self._left is not None:
            self._left -= len(piece)
            self.done = self._left <= 0
        return piece

    def _chunks(self) -> bytes:
        pieces = []
        while not self.done and (piece := self._chunk()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    def _chunk(self) -> bytes | None:
        """The next piece; None where its bytes are not there yet."""
        if not self._in_chunk and not self._open_chunk():
            return None
        size = self._left or 0
        if len(self._buffer) < size + 2:
            return None
        piece = bytes(self._buffer[:size])
        del self._buffer[: size + 2]
        self._in_chunk, self.done = False, size == 0
        return piece

    def _open_chunk(self) -> bool:
        line, found, _ = self._buffer.partition(b"\r\n")
        if not found:
            return False
        try:
            self._left = int(line.partition(b";")[0], 16)
        except ValueError:
            raise Failure("no HTTP", "a chunk without a size") from None
        del self._buffer[: len(line) + 2]
        self._in_chunk = True
        return True


class _Connection(asyncio.Protocol):
    """Serves one exchange after the other."""

    def __init__(self) -> None:
        self.fresh = True  # served nothing yet
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
        except Exception as error:  # whatever it is, the request's task is to hear of it
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
        """Send, and wait for the end of the answer."""
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
        """``url`` may end in /v1 or not; ValueError for what is no address."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url} is not an address such as http://127.0.0.1:8000")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._fields = {"host": parts.netloc}
        if key is not None:
            self._fields["authorization"] = f"Bearer {key}"
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, on_body: OnBody) -> int:
        """Status of the answer; the body goes to ``on_body``. Raises `Failure`."""
        request = request_bytes("POST", f"{self._base}{path}", self._fields, body)
        return await self._ask(request, on_body)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        pieces: list[bytes] = []
        request = request_bytes("GET", f"{self._base}{path}", self._fields, None)
        status = await self._ask(request, lambda _, piece: pieces.append(piece))
        return status, b"".join(pieces)

    async def post_whole(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body."""
        pieces: list[bytes] = []
        status = await self.post(path, body, lambda _, piece: pieces.append(piece))
        return status, b"".join(pieces)

    def close(self) -> None:
        """End the idle connections."""
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
                continue  # a kept connection that was closed at the other end
            except BaseException:
                connection.close()
                raise
            connection.fresh = False
            if parser.keeps and not connection.lost:
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

"""Connections that behave as badly as they are told to: slow, deaf, cut, or well.

Sockets of the operating system on purpose: what is in its buffers is part of what is tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from foretoken.bench.load import http
from foretoken.bench.load.http import AnswerParser, Failure, OnBody

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""
Ended = Literal["whole", "cut", "hang", "refused"]
SMALL_BUFFER = 2048  # bytes the kernel takes for a client that reads slowly
PIECE = 2**16
OK = 200
MAX_KEPT = 2**22  # bytes of an answer


@dataclass(frozen=True, slots=True)
class Pace:
    """Pace at which a client reads: bytes, then a pause, until a time of the loop; then all."""

    piece: int
    pause: float  # seconds
    until: float

    def now(self) -> tuple[int, float]:
        """Bytes and pause."""
        is_slow = asyncio.get_running_loop().time() < self.until
        return (self.piece, self.pause) if is_slow else (PIECE, 0.0)


@dataclass(slots=True)
class Reply:
    """One answer; ``ended`` tells whether all of it came."""

    ended: Ended
    status: int = 0  # 0: not a byte of it
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    sent: float = 0.0  # when the request was, on time.perf_counter
    seconds: float = 0.0
    keeps: bool = False  # the connection may serve another request
    why: str = ""


class Link:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, address: Address, *, small: bool = False) -> Link:
        """Connect; ``small`` has the kernel hold next to nothing. Raises OSError."""
        unix = isinstance(address, str)
        sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        sock.setblocking(False)
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        try:
            await asyncio.get_running_loop().sock_connect(sock, address)
            limit = SMALL_BUFFER if small else PIECE
            opening = asyncio.open_unix_connection if unix else asyncio.open_connection
            return cls(*await opening(sock=sock, limit=limit))
        except BaseException:
            sock.close()
            raise

    async def send(self, data: bytes, *, piece: int = 0, pause: float = 0.0) -> None:
        """All of it at once, or ``piece`` bytes every ``pause`` seconds. Raises OSError."""
        size = piece or len(data) or 1
        for at in range(0, len(data), size):
            self._writer.write(data[at : at + size])
            await self._writer.drain()
            if piece:
                await asyncio.sleep(pause)

    async def reply(self, on_body: OnBody | None = None, pace: Pace | None = None) -> Reply:
        """Read one answer to its end. Words of a 200 go to ``on_body`` where there is one."""
        parser, kept, begin = AnswerParser(), bytearray(), time.perf_counter()
        ended, why = await self._receive(parser, kept, on_body, pace)
        return Reply(
            ended=ended,
            status=parser.status,
            fields=parser.fields,
            body=bytes(kept),
            sent=begin,
            seconds=time.perf_counter() - begin,
            keeps=parser.can_reuse and ended == "whole",
            why=why,
        )

    async def _receive(
        self, parser: AnswerParser, kept: bytearray, on_body: OnBody | None, pace: Pace | None
    ) -> tuple[Ended, str]:
        try:
            async for data in self._pieces(pace):
                piece = parser.feed(data)
                if on_body is not None and parser.status == OK:
                    on_body(time.perf_counter(), piece)
                elif len(kept) < MAX_KEPT:
                    kept += piece
                if parser.done:
                    return "whole", ""
            parser.end()
        except (OSError, Failure) as error:
            return "cut", str(error)
        return "whole", ""

    async def _pieces(self, pace: Pace | None) -> AsyncIterator[bytes]:
        """Yield the bytes that come, until the other end is done. Raises OSError."""
        piece, pause = PIECE, 0.0
        while True:
            if pace is not None:
                piece, pause = pace.now()
            if not (data := await self._reader.read(piece)):
                return
            yield data
            await asyncio.sleep(pause)

    def close(self) -> None:
        """Leave at once, whatever is on its way."""
        self._writer.transport.abort()


def request_bytes(method: str, path: str, body: object = None, *, key: str | None) -> bytes:
    """A request of the soak; a body that is not bytes is written as JSON."""
    data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
    fields = {"host": "soak"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    return http.request_bytes(method, path, fields, data)


async def ask(
    address: Address,
    request: bytes,
    *,
    limit: float,
    link: Link | None = None,
    on_body: OnBody | None = None,
    keep: Callable[[Link], None] | None = None,
) -> Reply:
    """One request and its answer within ``limit`` seconds; never raises for what the server does.

    A kept ``link`` that the server had closed is replaced once, as clients do. ``keep`` is handed
    the connection where it may serve again.
    """
    try:
        async with asyncio.timeout(limit):
            if link is not None:
                reply = await _once(link, request, on_body, keep)
                if reply.status or reply.ended != "cut":
                    return reply
            try:
                fresh = await Link.open(address)
            except OSError as error:
                return Reply("refused", why=str(error))
            return await _once(fresh, request, on_body, keep)
    except TimeoutError:
        return Reply("hang", why=f"no end within {limit:g} s")


async def _once(
    link: Link, request: bytes, on_body: OnBody | None, keep: Callable[[Link], None] | None
) -> Reply:
    reply: Reply | None = None
    try:
        with contextlib.suppress(OSError):  # it may have answered before it stopped reading
            await link.send(request)
        reply = await link.reply(on_body)
        return reply
    finally:
        if keep is not None and reply is not None and reply.keeps:
            keep(link)
        else:
            link.close()

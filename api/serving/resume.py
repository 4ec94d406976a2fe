"""Event streams that a client can resume after its connection broke.

Enabled by ``--resume-seconds``. Each event then has an ``id``. A client that repeats its request
with the header ``Last-Event-ID`` gets the events after that one; generation continues meanwhile.
Only the API key that started a stream can resume it, with the same cache salt.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from ..types.request_context import caller, is_cancelled, note_error, owner_of, random_id
from ..types.shares import Owner, Shares
from .errors import ApiError, to_api_error
from .sse import Reply

logger = logging.getLogger(__name__)
STREAM_BYTES = 2**20  # limit on the kept events of a stream
MAX_STREAMS = 64
END = b"\n\n"


class ResumableStream:
    """The events of one answer, read by a task of its own. The latest events are kept.

    An answer without a reader is aborted after ``seconds``. A finished stream is dropped after the
    same time.
    """

    def __init__(
        self,
        reply: Reply,
        owner: Owner,
        on_error: Callable[[ApiError], bytes],
        forget: Callable[[], None],
        seconds: float,
    ) -> None:
        self.name = reply.name or random_id()
        self.owner = owner
        self._reply, self._on_error = reply, on_error
        self._forget, self._seconds = forget, seconds
        self._kept: deque[bytes] = deque()
        self._num_bytes = 0
        self._first = 0  # number of the first kept event
        self._next = 0  # number of the event that the reader gets next
        self._reader: Reader | None = None  # the current reader; None without a connection
        self._ended = self._is_forgotten = False
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._run())

    def has(self, number: int) -> bool:
        """Whether an event with this number is kept or comes next."""
        return self._first <= number <= self._first + len(self._kept)

    def attach(self, start: int) -> Reader:
        """Return a reader of the events from number ``start`` on. It replaces the current
        reader.
        """
        self._reader, self._next = Reader(self), start
        self._stop_timer()
        self._notify()
        return self._reader

    def release(self, reader: Reader) -> None:
        """Detach a reader whose client has left. The answer is dropped after ``seconds``, or at
        once if the client has cancelled it.
        """
        if self._reader is not reader:
            return
        self._reader = None
        self._notify()
        if self._is_forgotten or is_cancelled():
            self.end()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self.end)

    def end(self) -> None:
        """Forget the stream, and abort the answer if it has no reader."""
        self._stop_timer()
        self._is_forgotten = True
        self._forget()
        if self._reader is None:
            self._task.cancel()

    async def read(self, reader: Reader) -> AsyncGenerator[bytes]:
        """Yield the events until the stream ends or another reader replaces this one."""
        while self._reader is reader:
            if self._next < self._first + len(self._kept):
                event = self._kept[self._next - self._first]
                self._next += 1
                self._notify()
                yield event
            elif self._ended:
                return
            else:
                await self._wait()

    async def _run(self) -> None:
        try:
            async with aclosing(self._reply.events()) as events:
                async for body in events:
                    await self._keep(body)
        except Exception as error:
            answer = to_api_error(error)
            note_error(answer)
            if answer.status == 500:
                logger.error("a stream failed", exc_info=error)
            await self._keep(self._on_error(answer))
        finally:
            self._reply.close()
            self._ended = True
            self._notify()

    async def _keep(self, body: bytes) -> None:
        """Number and keep the events. Drop the oldest ones, but wait for the reader to get them
        first.
        """
        for event in body.split(END)[:-1]:
            number = self._first + len(self._kept)
            self._kept.append(b"id: %s:%d\n%b%b" % (self.name.encode(), number, event, END))
            self._num_bytes += len(self._kept[-1])
        self._notify()
        while self._num_bytes > STREAM_BYTES:
            while self._reader is not None and self._next <= self._first:
                await self._wait()
            self._num_bytes -= len(self._kept.popleft())
            self._first += 1

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self) -> None:
        await self._changed.wait()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Reader(Reply):
    """One connection that receives a stream."""

    def __init__(self, stream: ResumableStream) -> None:
        self._stream = stream

    def events(self) -> AsyncGenerator[bytes]:
        """Yield the events that the connection has not received."""
        return self._stream.read(self)

    def close(self) -> None:
        """Detach the connection, which has received everything or was closed."""
        self._stream.release(self)


class ResumableStreams:
    """The resumable streams of a server, by name.

    If their events exceed a total size, the stream that `Shares` chooses is ended.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._streams: dict[str, ResumableStream] = {}
        self._shares: Shares[str] = Shares(MAX_STREAMS * STREAM_BYTES)

    def __len__(self) -> int:
        return len(self._streams)

    def begin(
        self, reply: Reply, on_error: Callable[[ApiError], bytes], salt: str | None = None
    ) -> Reader:
        """Start a stream of an answer and return its first reader.

        ``salt``: the cache salt of the request. The reply is closed when the stream ends.
        """
        stream = ResumableStream(
            reply, owner_of(salt), on_error, lambda: self._forget(stream), self.seconds
        )
        reader = stream.attach(0)
        self._streams[stream.name] = stream
        self._shares.add(caller(), stream.name, STREAM_BYTES)
        while (excess := self._shares.excess()) is not None:
            self._streams[excess].end()
        return reader

    def resume(self, last_event_id: str, salt: str | None = None) -> Reader:
        """Return a reader of the events after ``last_event_id``. Raises `ApiError` 404."""
        name, _, number = last_event_id.partition(":")
        is_number = number.isascii() and number.isdigit() and len(number) < 16
        return self.attach(name, int(number) + 1 if is_number else -1, salt)

    def attach(self, name: str, start: int, salt: str | None = None) -> Reader:
        """Return a reader of a stream's events from number ``start`` on. Raises `ApiError` 404."""
        stream = self._streams.get(name)
        if stream is None or stream.owner != owner_of(salt) or not stream.has(start):
            message = "no stream can be resumed from this Last-Event-ID or id (--resume-seconds)"
            raise ApiError(404, message, code="stream_not_found")
        return stream.attach(start)

    def _forget(self, stream: ResumableStream) -> None:
        if self._streams.pop(stream.name, None) is not None:
            self._shares.remove(stream.name)

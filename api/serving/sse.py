"""Server-sent events, and cancellation when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...core.errors import DeadlineExceeded
from ..types.request_context import TOO_LATE, note_error
from .errors import ApiError, ClientGone, to_api_error

logger = logging.getLogger(__name__)
encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
PING_SECONDS = 10.0
EVENT_STREAM = "text/event-stream; charset=utf-8"
HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def event(payload: object) -> bytes:
    """Return an event whose data is JSON."""
    return b"data: %b\n\n" % encode(payload)


def named_event(payload: Struct) -> bytes:
    """Return an event named after the struct's tag; some clients ignore events without a name."""
    name = str(payload.__struct_config__.tag).encode()
    return b"event: %b\ndata: %b\n\n" % (name, encode(payload))


def error_event(error: ApiError) -> bytes:
    """Return OpenAI's error event, for an error after the HTTP status was sent."""
    return event(error.body)


class UnlessGone:
    """A context manager that cancels its block when the client leaves or the time is over.

    Raises `ClientGone` or `DeadlineExceeded`. A single task watches the connection until the block
    ends. The body must have been read before.
    """

    def __init__(self, receive: Receive, seconds: float | None = None) -> None:
        self._receive = receive
        self._timeout = asyncio.timeout(seconds)
        self._is_gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            # A cancelled task keeps its traceback, which refers to this block. If the block kept
            # the task, the cycle would hold the whole request until the next garbage collection.
            self._watcher = None
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise ClientGone if self._is_gone else DeadlineExceeded(TOO_LATE) from None

    def stop_timer(self) -> None:
        """Stop the timer: the engine enforces the deadline from now on."""
        self._timeout.reschedule(None)

    async def _watch(self) -> None:
        await gone(self._receive)
        self._is_gone = True
        if not self._timeout.expired():
            self._timeout.reschedule(0)  # a time in the past cancels the block at once


class Reply:
    """A running answer. Its owner must `close` it in a ``finally``."""

    @property
    def name(self) -> str | None:
        """The id by which clients know the answer, if its events are numbered from 0."""
        return None

    async def whole(self) -> object:
        """Return the answer as one JSON body."""
        raise NotImplementedError

    def events(self) -> AsyncGenerator[bytes]:
        """Yield the answer as server-sent events."""
        raise NotImplementedError

    def close(self) -> None:
        """Abort the generations that still run. May be called twice."""


class ReadyReply(Reply):
    """An answer that is complete before it is sent. ``events``: the answer as a stream."""

    def __init__(self, body: object, events: Iterable[bytes] = ()) -> None:
        self._body, self._events = body, events

    async def whole(self) -> object:
        """Return the body."""
        return self._body

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events."""
        for each in self._events:
            yield each


class EventStream(Response):
    """A response that sends events as they arrive. ``close`` is always called at the end.

    ``ping``: the keep-alive event. ``on_error``: encodes an error as an event of the API.

    starlette's StreamingResponse leaves the generator open if the client disconnects during a send,
    and does not notice a disconnect while nothing is sent.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        close: Callable[[], None],
        ping_seconds: float = PING_SECONDS,
        ping: bytes = PING,
        on_error: Callable[[ApiError], bytes] = error_event,
        media_type: str = EVENT_STREAM,
    ) -> None:
        super().__init__(headers={"content-type": media_type, **HEADERS})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._ping_seconds = ping_seconds
        self._sign_of_life, self._on_error = ping, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the events until they end or the client leaves, whichever is first."""
        try:
            async with UnlessGone(receive):
                await self.send_all(send)
        except ClientGone:
            pass  # the client is gone, so no error can be sent
        finally:
            self._close()

    async def send_all(self, send: Send) -> None:
        """Send the events until they end."""
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            pings = asyncio.create_task(self._ping(send))
            try:
                async for body in events:
                    await _write(send, body)
            except Exception as error:
                # The status was sent already, so the error is sent as an event, for which
                # clients raise an exception.
                answer = to_api_error(error)
                note_error(answer)
                if answer.status == 500:
                    logger.error("a stream failed", exc_info=error)
                await _write(send, self._on_error(answer))
            finally:
                pings.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        """Send keep-alive events periodically, since a long prefill sends no others."""
        while True:
            await asyncio.sleep(self._ping_seconds)
            await _write(send, self._sign_of_life)


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def gone(receive: Receive) -> None:
    """Return when the client has disconnected. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass

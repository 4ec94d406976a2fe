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
    """One event that carries JSON."""
    return b"data: %b\n\n" % encode(payload)


def named_event(payload: Struct) -> bytes:
    """One event whose name is the tag of a struct; some clients ignore events without a name."""
    name = str(payload.__struct_config__.tag).encode()
    return b"event: %b\ndata: %b\n\n" % (name, encode(payload))


def error_event(error: ApiError) -> bytes:
    """OpenAI's error inside a stream, after the HTTP status was sent."""
    return event(error.body)


class UnlessGone:
    """Cancels the block when the client leaves or the time is over.

    Raises `ClientGone` and `DeadlineExceeded`. One task for a whole request: it watches until the
    block is left. The body must have been read before.
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
            # A cancelled task keeps its traceback, and so this block: a block that kept the task
            # would hold the whole request in memory until the next collection of garbage.
            self._watcher = None
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise ClientGone if self._is_gone else DeadlineExceeded(TOO_LATE) from None

    def wait_on(self) -> None:
        """Stop the timer: the engine enforces the deadline from here on."""
        self._timeout.reschedule(None)

    async def _watch(self) -> None:
        await gone(self._receive)
        self._is_gone = True
        if not self._timeout.expired():
            self._timeout.reschedule(0)  # long ago: the block is cancelled at once


class Reply:
    """A running answer. Its owner must `close` it in a ``finally``."""

    async def whole(self) -> object:
        """Return the answer as one JSON body."""
        raise NotImplementedError

    def events(self) -> AsyncGenerator[bytes]:
        """Yield the answer as server-sent events."""
        raise NotImplementedError

    def close(self) -> None:
        """Abort what still runs; may be called twice."""


class ReadyReply(Reply):
    """An answer that is complete before it is sent; ``events``: the same as a stream."""

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
    """Sends events when they arrive; ``close`` is called in any case.

    ``ping``: the keep-alive event; ``on_error``: the error event of the API.

    starlette's StreamingResponse leaves the generator open when the client goes during a send, and
    does not notice one that goes while nothing is sent.
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
        """Serve until the events end or the client leaves, whichever is first."""
        try:
            async with UnlessGone(receive):
                await self.send_all(send)
        except ClientGone:
            pass  # there is nobody to tell
        finally:
            self._close()

    async def send_all(self, send: Send) -> None:
        """Serve until the events end."""
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            pings = asyncio.create_task(self._ping(send))
            try:
                async for body in events:
                    await _write(send, body)
            except Exception as error:
                # The status line is gone: what remains is an event that clients raise as an error.
                answer = to_api_error(error)
                note_error(answer)
                if answer.status == 500:
                    logger.error("a stream failed", exc_info=error)
                await _write(send, self._on_error(answer))
            finally:
                pings.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        """Send keep-alive events while there are no others, as in a long prefill."""
        while True:
            await asyncio.sleep(self._ping_seconds)
            await _write(send, self._sign_of_life)


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def gone(receive: Receive) -> None:
    """Return when the client has closed its connection; the body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass

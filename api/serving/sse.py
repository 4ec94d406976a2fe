"""Server-sent events that notice when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...core.errors import DeadlineExceeded
from ..types.request_context import TOO_LATE, note_error
from .errors import ApiError, ClientGone, to_api_error

logger = logging.getLogger(__name__)
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
PING_SECONDS = 10.0
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def event(payload: object) -> bytes:
    """One event that carries JSON."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """OpenAI's error, after the status line is gone."""
    return event(error.body)


class EventStream(Response):
    """Sends events as they come; ``close`` is called in any case.

    ``ping`` and ``on_error`` are how the dialect says that it lives, and that it failed.

    starlette's StreamingResponse leaves the generator open when the client goes during a send, and
    does not notice one that goes while nothing is sent: here a watcher ends the sender at once.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        close: Callable[[], None],
        ping_seconds: float = PING_SECONDS,
        ping: bytes = PING,
        on_error: Callable[[ApiError], bytes] = error_event,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._ping_seconds = ping_seconds
        self._sign_of_life, self._on_error = ping, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Serve until the events end or the client leaves, whichever is first."""
        tasks = [
            asyncio.create_task(self._send_all(send)),
            asyncio.create_task(gone(receive)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(tasks)
            await self._events.aclose()
            self._close()
        if not tasks[0].cancelled():
            tasks[0].result()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pings = asyncio.create_task(self._ping(send))
        try:
            async with aclosing(self._events) as events:
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
            await _end([pings])
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        """Keep the connection warm while nothing comes, as in a long prefill."""
        while True:
            await asyncio.sleep(self._ping_seconds)
            await _write(send, self._sign_of_life)


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def gone(receive: Receive) -> None:
    """Return when the client has closed its connection; the body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, T], seconds: float | None = None
) -> T:
    """Do the work, or cancel it when the client leaves first or the time is over.

    Raises `ClientGone` and `DeadlineExceeded`. The body must have been read before.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(gone(receive))
    try:
        both = [task, watcher]
        await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone if watcher.done() else DeadlineExceeded(TOO_LATE)
    finally:
        await _end([task, watcher])


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel and wait, so that no ``finally`` is left to run later."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

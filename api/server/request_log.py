"""Visit: one HTTP request under way, for the logs, the metrics and the traces.

Routes and the engine know nothing of it. What they do within a request notes itself here by way of
a context variable, as the caller is known (`owners.CALLER`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ..serving.errors import ApiError

from ..types.request_context import VISIT, Visit

CLIENT_CLOSED = 499  # as proxies log it: nobody was left to be answered
SERVER_ERROR = 500
BROKEN_OFF = "broken_off"  # in a scope's state: what the connection itself told the client


class Counts(Protocol):
    """Who counts visits."""

    def began(self) -> None:
        """One more is under way."""

    def responded(self, visit: Visit) -> None:
        """The header of its answer goes out."""

    def ended(self, visit: Visit, seconds: float) -> None:
        """All is sent, or nobody listens any more."""


def no_span(_visit: Visit) -> AbstractContextManager[None]:
    """Of a server that traces nothing."""
    return contextlib.nullcontext()


class Visits:
    """The outermost layer: makes the visit and tells those who count, log and trace it."""

    def __init__(
        self,
        app: ASGIApp,
        counts: Counts,
        *,
        log: Callable[[Visit, float], None] | None = None,  # with the seconds that it took
        span: Callable[[Visit], AbstractContextManager[None]] = no_span,
    ) -> None:
        self.app = app
        self._counts, self._log, self._span = counts, log, span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        visit = Visit(scope)
        token = VISIT.set(visit)
        began = time.perf_counter()
        self._counts.began()
        try:
            with self._span(visit):
                await self._pass_on(visit, receive, send)
        finally:
            seconds = time.perf_counter() - began
            self._counts.ended(visit, seconds)
            if self._log is not None:
                self._log(visit, seconds)  # within the visit, so that the line has its id
            VISIT.reset(token)

    async def _pass_on(self, visit: Visit, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                visit.streams = _is_event_stream(message)
                self._counts.responded(visit)
            await send(message)

        try:
            await self.app(visit.scope, receive, watched)
        except Exception:
            visit.status = visit.status or SERVER_ERROR
            raise
        finally:
            broken_off: ApiError | None = visit.scope.get("state", {}).get(BROKEN_OFF)
            if broken_off is not None:
                visit.status, visit.error = broken_off.status, broken_off
            visit.status = visit.status or CLIENT_CLOSED


def _is_event_stream(message: Message) -> bool:
    headers = dict(message["headers"])
    return bytes(headers.get(b"content-type", b"")).startswith(b"text/event-stream")

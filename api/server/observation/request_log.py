"""RequestLog: the outermost layer. It makes the context of a request, names its answer, tells
those who count, log and trace it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response

from ...dialects import api_of
from ...types.request_context import CONTEXT, RequestContext, header, random_id
from ..error_forms import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ...serving.errors import ApiError

CLIENT_CLOSED = 499  # as proxies log it: the client closed before it was answered
SERVER_ERROR = 500
BROKEN_OFF = "broken_off"  # in a scope's state: the answer that the connection itself sent
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class Counts(Protocol):
    """Counter of requests."""

    def began(self) -> None:
        """One more is under way."""

    def responded(self, context: RequestContext) -> None:
        """The header of its answer goes out."""

    def ended(self, context: RequestContext, seconds: float) -> None:
        """The answer is sent whole, or the client has left."""


def no_span(_context: RequestContext) -> AbstractContextManager[None]:
    """Span of a server that traces nothing."""
    return contextlib.nullcontext()


class RequestLog:
    """Gives each answer its ``x-request-id`` and reports the request."""

    def __init__(
        self,
        app: ASGIApp,
        counts: Counts,
        *,
        log: Callable[[RequestContext, float], None] | None = None,  # with the seconds it took
        span: Callable[[RequestContext], AbstractContextManager[None]] = no_span,
    ) -> None:
        self.app = app
        self._counts, self._log, self._span = counts, log, span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = RequestContext(scope)
        context.request_id = identify(scope)
        token = CONTEXT.set(context)
        began = time.perf_counter()
        self._counts.began()
        try:
            with self._span(context):
                await self._pass_on(context, receive, send)
        finally:
            seconds = time.perf_counter() - began
            self._counts.ended(context, seconds)
            if self._log is not None:
                self._log(context, seconds)  # within the context, so that the line has its id
            CONTEXT.reset(token)

    async def _pass_on(self, context: RequestContext, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                context.streams = header(message, b"content-type").startswith("text/event-stream")
                message["headers"] = [*message["headers"], *_names(context.scope)]
                self._counts.responded(context)
            await send(message)

        try:
            await self.app(context.scope, receive, watched)
        except Exception:
            context.status = context.status or SERVER_ERROR
            raise
        finally:
            broken_off: ApiError | None = context.scope["state"].get(BROKEN_OFF)
            if broken_off is not None:
                context.status, context.error = broken_off.status, broken_off
            context.status = context.status or CLIENT_CLOSED


def refusal_of(scope: Scope, error: ApiError) -> Response:
    """Answer a request that no other layer has seen."""
    identify(scope)
    answer = error_response(scope, error)
    answer.raw_headers += _names(scope)
    return answer


def identify(scope: Scope) -> str:
    """Return the id of a request: the client's ``x-request-id`` if valid, else a new one."""
    state: dict[str, str] = scope.setdefault("state", {})
    if "request_id" not in state:
        given = header(scope, b"x-request-id")
        is_valid = given and _REQUEST_ID.fullmatch(given)
        state["request_id"] = given if is_valid else f"req_{random_id()}"
    return state["request_id"]


def _names(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Header fields of the answer that carry the request's id."""
    request_id = identify(scope).encode("latin-1")
    fields = [(b"x-request-id", request_id)]
    if (name := api_of(scope).id_header) is not None:
        fields.append((name, request_id))
    return fields

"""RequestLog: the outermost layer, which creates the context of a request and reports it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response

from ...dialects import api_of
from ...types.request_context import CONTEXT, RequestContext, header, random_id
from ..error_forms import error_response

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ...serving.errors import ApiError

CLIENT_CLOSED = 499  # status that proxies log if the client disconnects before the answer
SERVER_ERROR = 500
CONNECTION_ERROR = "connection_error"  # scope state: an error that the connection has sent
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class Counts(Protocol):
    """Counts requests."""

    def began(self) -> None:
        """Count a request that begins."""

    def responded(self, context: RequestContext) -> None:
        """Count an answer whose headers are being sent."""

    def ended(self, context: RequestContext, seconds: float) -> None:
        """Count a request whose answer was sent or whose client has left."""


class RequestLog:
    """Adds ``x-request-id`` to each answer and reports requests to counters, log and traces."""

    def __init__(
        self,
        app: ASGIApp,
        counts: Counts,
        *,
        log: Callable[[RequestContext, float], None] | None = None,  # gets the duration in seconds
        span: Callable[[RequestContext], AbstractContextManager[None]]
        | None = None,  # opens a trace
    ) -> None:
        self.app = app
        self._counts, self._log, self._span = counts, log, span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and report it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = RequestContext(scope)
        context.request_id = identify(scope)
        token = CONTEXT.set(context)
        began = time.perf_counter()
        self._counts.began()
        try:
            if self._span is None:
                await self._pass_on(context, receive, send)
            else:
                with self._span(context):
                    await self._pass_on(context, receive, send)
        finally:
            seconds = time.perf_counter() - began
            self._counts.ended(context, seconds)
            if self._log is not None:
                # inside the context, so that the line has the request's id
                self._log(context, seconds)
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
            error: ApiError | None = context.scope["state"].get(CONNECTION_ERROR)
            if error is not None:
                context.status, context.error = error.status, error
            context.status = context.status or CLIENT_CLOSED


def refusal_of(scope: Scope, error: ApiError) -> Response:
    """Return the answer to a request that no other layer has seen."""
    identify(scope)
    answer = error_response(scope, error)
    answer.raw_headers += _names(scope)
    return answer


def identify(scope: Scope) -> str:
    """Return the id of a request: a valid ``x-request-id`` of the client, else a new id."""
    state: dict[str, str] = scope.setdefault("state", {})
    if "request_id" not in state:
        given = header(scope, b"x-request-id")
        is_valid = given and _REQUEST_ID.fullmatch(given)
        state["request_id"] = given if is_valid else f"req_{random_id()}"
    return state["request_id"]


def _names(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the response headers that carry the request's id."""
    request_id = identify(scope).encode("latin-1")
    fields = [(b"x-request-id", request_id)]
    if (name := api_of(scope).id_header) is not None:
        fields.append((name, request_id))
    return fields

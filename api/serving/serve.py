"""The endpoint of every generating route."""

from __future__ import annotations

from functools import partial
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from .dialect import Dialect, RequestBody
from .errors import ClientGone, JsonResponse
from .sse import EventStream, Reply

B = TypeVar("B", bound=RequestBody)


class Serve(Generic[B]):
    """The endpoint of a dialect, as an ASGI application."""

    def __init__(self, dialect: Dialect[B]) -> None:
        self._dialect, self._service = dialect, dialect.service
        # /openapi.json is built from these two attributes.
        self.__doc__ = dialect.__doc__
        self.operation = {each.path: each for each in dialect.operations()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as one body or as a stream. Abort it if the client leaves."""
        request = Request(scope, receive)
        body = await self._service.read(request, partial(self._dialect.read_request, request))
        is_stream = bool(body.stream) and self._dialect.event is not None
        has_begun, submit = False, self._dialect.submit
        try:
            async with self._service.wanted(receive, body.deadline_ms) as client:
                reply = await (self._streamed(request, body) if is_stream else submit(body))
                try:
                    client.stop_timer()  # the engine enforces the deadline of submitted requests
                    if is_stream:
                        has_begun = True
                        await self._stream(reply).send_all(send)
                        return
                    answer = JsonResponse(await reply.whole())
                finally:
                    reply.close()
        except ClientGone:
            if has_begun:
                return  # the client is gone, so no answer can be sent
            raise
        await answer(scope, receive, send)

    async def _streamed(self, request: Request, body: B) -> Reply:
        """Return the reply for a stream; with ``--resume-seconds`` a resumable or resumed one."""
        streams = self._service.streams
        if streams is None or not self._dialect.can_resume:
            return await self._dialect.submit(body)
        salt = getattr(body, "cache_salt", None)  # some APIs have no such field
        last_event_id = request.headers.get("last-event-id")
        if last_event_id is not None:
            return streams.resume(last_event_id, salt)
        reply = await self._dialect.submit(body)
        return streams.begin(reply, self._dialect.error_event, salt)

    def _stream(self, reply: Reply) -> EventStream:
        return EventStream(
            reply.events(),
            close=reply.close,
            ping_seconds=self._service.settings.limits.ping_seconds,
            ping=self._dialect.ping,
            on_error=self._dialect.error_event,
            media_type=self._dialect.media_type,
        )

"""The code of all routes that generate; each API is a `Dialect`."""

from __future__ import annotations

from typing import ClassVar, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ...core.errors import InvalidRequest
from ..types.fields import name_as_given
from .errors import ApiError, ClientGone, JsonResponse
from .serving_context import OPENAI_TEMPERATURE, Service
from .sse import EVENT_STREAM, PING, EventStream, Reply, error_event


class RequestBody(Protocol):
    """Fields that every decoded body has."""

    @property
    def model(self) -> str | None:
        """The requested model."""

    @property
    def stream(self) -> bool | None:
        """Whether the answer is a stream."""

    @property
    def deadline_ms(self) -> float | None:
        """Milliseconds until the answer is cut short."""


B = TypeVar("B", bound=RequestBody)


class Dialect(Generic[B]):
    """Decoding of bodies and encoding of answers for one route."""

    can_stream: ClassVar[bool] = True
    most_temperature: ClassVar[float] = OPENAI_TEMPERATURE
    ping: ClassVar[bytes] = PING
    media_type: ClassVar[str] = EVENT_STREAM
    can_resume: ClassVar[bool] = True  # with Last-Event-ID, which belongs to event streams

    def __init__(self, service: Service) -> None:
        self.service = service

    def decode(self, data: bytes) -> B:
        """A body; raises `ApiError` 400."""
        raise NotImplementedError

    def check(self, body: B) -> None:
        """Raise `ApiError` 404 and `InvalidRequest` before anything is rendered."""
        self.service.check_model(body.model)
        self.service.check_range(body, most_temperature=self.most_temperature)

    async def open(self, body: B) -> Reply:
        """Render the body and submit it; raises `InvalidRequest`, `QueueFull` and `EngineDead`."""
        raise NotImplementedError

    def rename(self, error: InvalidRequest, body: B) -> None:
        """Let an error name the field as this body calls it."""

    def error_event(self, error: ApiError) -> bytes:
        """An error inside a stream."""
        return error_event(error)

    def error_body(self, error: ApiError) -> object:
        """An error in place of an answer."""
        return error.body

    async def submit(self, body: B) -> Reply:
        """Check a body and open its answer; errors name fields as the body does."""
        self.check(body)
        try:
            return await self.open(body)
        except InvalidRequest as error:
            name_as_given(error, body)
            self.rename(error, body)
            raise


class Serve(Generic[B]):
    """The endpoint of a dialect, as an ASGI application."""

    def __init__(self, dialect: Dialect[B]) -> None:
        self._dialect, self._service = dialect, dialect.service
        self.__doc__ = dialect.__doc__  # for /openapi.json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whole or as a stream; aborted when the client leaves."""
        request = Request(scope, receive)
        body = await self._service.read(request, self._dialect.decode)
        is_stream = bool(body.stream) and self._dialect.can_stream
        has_begun, submit = False, self._dialect.submit
        try:
            async with self._service.wanted(receive, body.deadline_ms) as client:
                reply = await (self._streamed(request, body) if is_stream else submit(body))
                try:
                    client.wait_on()  # the engine keeps the deadline of what it was given
                    if is_stream:
                        has_begun = True
                        await self._stream(reply).send_all(send)
                        return
                    answer = JsonResponse(await reply.whole())
                finally:
                    reply.close()
        except ClientGone:
            if has_begun:
                return  # there is nobody to tell
            raise
        await answer(scope, receive, send)

    async def _streamed(self, request: Request, body: B) -> Reply:
        """An answer, or with ``--resume-seconds`` one that can be picked up again."""
        streams = self._service.streams
        if streams is None or not self._dialect.can_resume:
            return await self._dialect.submit(body)
        last_event_id = request.headers.get("last-event-id")
        if last_event_id is not None:
            return streams.resume(last_event_id)
        return streams.begin(await self._dialect.submit(body), self._dialect.error_event)

    def _stream(self, reply: Reply) -> EventStream:
        return EventStream(
            reply.events(),
            close=reply.close,
            ping_seconds=self._service.settings.limits.ping_seconds,
            ping=self._dialect.ping,
            on_error=self._dialect.error_event,
            media_type=self._dialect.media_type,
        )

"""Declarations by which an API of the server says what its routes, bodies and errors are.

A route that generates is a `Dialect`, the others are methods of an `Endpoints` that `get`, `post`
and `delete` mark. The application, /openapi.json, the forms of errors, batches and the check of
keys are made of these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from ...core.errors import InvalidRequest
from ..types.fields import name_as_given
from ..types.request_context import CONTEXT
from .decoding import decoder
from .errors import ApiError, ErrorBody
from .serving_context import OPENAI_TEMPERATURE, Service
from .settings import Settings
from .sse import EVENT_STREAM, PING, Reply, error_event

Handler = TypeVar("Handler", bound=Callable[..., Any])
READS = (404, 408, 413, 503)
"""Statuses of a route with a body that may name a model."""
GENERATES = (*READS, 429)
JSON = "application/json"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Input and output of a route. ``body`` and ``answer``: structs; None: nothing, or free."""

    method: Literal["GET", "POST", "DELETE"] = "POST"
    path: str
    body: Any = None
    body_media: str = JSON
    is_body_needed: bool = True
    query: Sequence[str] = ()  # parameters; one with a "!" is required
    answer: Any = None
    media: str = JSON
    events: Any = None  # the data of one event, where ``stream`` is true
    events_media: str = ""
    errors: Sequence[int] = ()  # statuses beside those of every route
    outage: Any = None  # the body of its 503, where that is no error
    is_operators: bool = False  # an admin key is needed where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorForm:
    """Functions that write the errors of an API; each function also takes the id of the request."""

    struct: type[Struct]
    body: Callable[[ApiError, str | None], object]
    event: Callable[[ApiError, str | None], bytes]  # inside a stream


OPENAI_ERRORS = ErrorForm(
    struct=ErrorBody,
    body=lambda error, _request_id: error.body,
    event=lambda error, _request_id: error_event(error),
)


class Dialect(Generic[B]):
    """Decoding of bodies and encoding of answers for one route."""

    path: ClassVar[str]
    aliases: ClassVar[Sequence[str]] = ()  # other paths of the route
    body: ClassVar[type[Struct]]  # decoded
    answer: ClassVar[Any]  # encoded
    event: ClassVar[Any] = None  # of a stream; None: the answer is always whole
    statuses: ClassVar[Sequence[int]] = GENERATES
    query: ClassVar[Sequence[str]] = ()  # parameters; one with a "!" is required
    in_batches: ClassVar[bool] = False
    names: ClassVar[Mapping[str, str]] = {}  # of fields that bodies of this API call otherwise
    error_form: ClassVar[ErrorForm] = OPENAI_ERRORS
    most_temperature: ClassVar[float] = OPENAI_TEMPERATURE
    ping: ClassVar[bytes] = PING
    media_type: ClassVar[str] = EVENT_STREAM
    can_resume: ClassVar[bool] = True  # with Last-Event-ID, which belongs to event streams

    def __init__(self, service: Service) -> None:
        self.service = service

    @classmethod
    def operations(cls) -> Iterator[Operation]:
        """Describe its paths for /openapi.json."""
        for path in (cls.path, *cls.aliases):
            yield Operation(
                path=path,
                body=cls.body,
                answer=cls.answer,
                events=cls.event,
                events_media=cls.media_type.partition(";")[0],
                query=cls.query,
                errors=cls.statuses,
            )

    @cached_property
    def _decode(self) -> Callable[[bytes], Any]:
        return decoder(self.body)

    def decode(self, data: bytes) -> B:
        """Return a body. Raises `ApiError` 400."""
        body: B = self._decode(data)
        return body

    def read_request(self, request: Request, data: bytes) -> B:  # noqa: ARG002
        """Return a body, with what the path and the query say. Raises `ApiError` 400."""
        return self.decode(data)

    def check(self, body: B) -> None:
        """Raise `ApiError` 404 and `InvalidRequest` before anything is rendered."""
        self.service.check_model(body.model)
        self.service.check_range(body, most_temperature=self.most_temperature)

    async def open(self, body: B) -> Reply:
        """Render the body and submit it. Raises `InvalidRequest`, `QueueFull` and `EngineDead`."""
        raise NotImplementedError

    def rename(self, error: InvalidRequest, body: B) -> None:  # noqa: ARG002
        """Let an error name the field as this body calls it."""
        if (name := self.names.get(error.param or "")) is not None:
            error.rename(name)

    def error_event(self, error: ApiError) -> bytes:
        """Return an error inside a stream."""
        context = CONTEXT.get()
        return self.error_form.event(error, None if context is None else context.request_id)

    async def submit(self, body: B) -> Reply:
        """Check a body and open its answer; errors name fields as the body does."""
        self.check(body)
        try:
            return await self.open(body)
        except InvalidRequest as error:
            name_as_given(error, body)
            self.rename(error, body)
            raise


class Endpoints:
    """Routes of one subject that generate nothing: the methods that `get` and `post` mark."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @classmethod
    def is_served(cls, settings: Settings) -> bool:  # noqa: ARG003
        """Whether a server with these settings has the routes."""
        return True

    @classmethod
    def handlers(cls) -> Iterator[tuple[str, Operation]]:
        """Names of the methods, and what they are for."""
        for name, method in vars(cls).items():
            if isinstance(known := getattr(method, "operation", None), Operation):
                yield name, known

    @classmethod
    def operations(cls) -> Iterator[Operation]:
        """Describe its paths for /openapi.json."""
        for _, operation in cls.handlers():
            yield operation

    @property
    def routes(self) -> list[BaseRoute]:
        """The routes, in the order of the methods."""
        return [
            Route(each.path, getattr(self, name), methods=[each.method])
            for name, each in self.handlers()
        ]


def get(path: str, answer: Any = None, **facts: Any) -> Callable[[Handler], Handler]:  # noqa: ANN401
    """Mark a method of `Endpoints` as a route; ``facts`` are fields of `Operation`."""
    return _marked(Operation(method="GET", path=path, answer=answer, **facts))


def post(path: str, answer: Any = None, **facts: Any) -> Callable[[Handler], Handler]:  # noqa: ANN401
    """Mark a method of `Endpoints` as a route; ``facts`` are fields of `Operation`."""
    return _marked(Operation(method="POST", path=path, answer=answer, **facts))


def delete(path: str, answer: Any = None, **facts: Any) -> Callable[[Handler], Handler]:  # noqa: ANN401
    """Mark a method of `Endpoints` as a route; ``facts`` are fields of `Operation`."""
    return _marked(Operation(method="DELETE", path=path, answer=answer, **facts))


def _marked(operation: Operation) -> Callable[[Handler], Handler]:
    def mark(handler: Handler) -> Handler:
        vars(handler)["operation"] = operation
        return handler

    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One API of the server.

    ``prefix``: its paths are this one and those below. ``header``: one that its clients send with
    each request, whatever the path. ``moved``: a prefix that its clients use, and the one that it
    stands for, in requests with this header. ``id_header``: another name of ``x-request-id``, for
    them. ``key_headers``: headers that may have a key, beside ``Authorization``;
    ``key_parameter``: a parameter of the query that may have it.
    """

    prefix: str
    dialects: Sequence[type[Dialect[Any]]]
    endpoints: Sequence[type[Endpoints]] = ()
    header: bytes | None = None
    moved: tuple[str, str] | None = None
    id_header: bytes | None = None
    key_headers: Sequence[bytes] = (b"x-api-key",)
    key_parameter: str | None = None
    is_served: Callable[[Settings], bool] = lambda _settings: True

    @property
    def error_form(self) -> ErrorForm:
        """The form of its errors, which that of its dialects is."""
        return self.dialects[0].error_form

    def has(self, path: str) -> bool:
        """Whether a path belongs to it."""
        return path == self.prefix or path.startswith(f"{self.prefix.rstrip('/')}/")

    def operations(self) -> Iterator[Operation]:
        """Describe its paths for /openapi.json."""
        for dialect in self.dialects:
            yield from dialect.operations()
        for endpoints in self.endpoints:
            yield from endpoints.operations()

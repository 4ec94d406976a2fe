"""Declarations of an API of the server: its routes, bodies and errors.

A route that generates is a `Dialect`. Other routes are methods of an `Endpoints`, marked with
`get`, `post` or `delete`. The application, /openapi.json, the error bodies, batches and the API key
checks are derived from these declarations.
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
"""Error statuses of a route whose body may name a model."""
GENERATES = (*READS, 429)
JSON = "application/json"


class RequestBody(Protocol):
    """Fields that every decoded body has."""

    @property
    def model(self) -> str | None:
        """The requested model."""

    @property
    def stream(self) -> bool | None:
        """Whether to stream the answer."""

    @property
    def deadline_ms(self) -> float | None:
        """The time limit of the request, in milliseconds."""


B = TypeVar("B", bound=RequestBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Input and output of a route. ``body`` and ``answer`` are structs.

    None means that there is no body or answer, or that it may have any content.
    """

    method: Literal["GET", "POST", "DELETE"] = "POST"
    path: str
    body: Any = None
    body_media: str = JSON
    is_body_needed: bool = True
    query: Sequence[str] = ()  # query parameters; a trailing "!" marks a required one
    answer: Any = None
    media: str = JSON
    events: Any = None  # type of the data of one event, for ``stream: true``
    events_media: str = ""
    errors: Sequence[int] = ()  # statuses in addition to the ones that every route has
    outage: Any = None  # body of a 503 that is not an error
    is_operators: bool = False  # requires an admin key if admin keys are configured


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorForm:
    """Functions that encode the errors of an API. Each takes the error and the request id."""

    struct: type[Struct]
    body: Callable[[ApiError, str | None], object]
    event: Callable[[ApiError, str | None], bytes]  # for an error inside a stream


OPENAI_ERRORS = ErrorForm(
    struct=ErrorBody,
    body=lambda error, _request_id: error.body,
    event=lambda error, _request_id: error_event(error),
)


class Dialect(Generic[B]):
    """A generating route: decodes bodies, submits requests, encodes answers."""

    path: ClassVar[str]
    aliases: ClassVar[Sequence[str]] = ()  # other paths of the route
    body: ClassVar[type[Struct]]  # type that bodies decode to
    answer: ClassVar[Any]  # type of the answer's body
    event: ClassVar[Any] = None  # type of a stream's event; None: the route does not stream
    statuses: ClassVar[Sequence[int]] = GENERATES
    query: ClassVar[Sequence[str]] = ()  # query parameters; a trailing "!" marks a required one
    in_batches: ClassVar[bool] = False
    names: ClassVar[Mapping[str, str]] = {}  # foretoken's name of a field -> this API's name
    error_form: ClassVar[ErrorForm] = OPENAI_ERRORS
    most_temperature: ClassVar[float] = OPENAI_TEMPERATURE
    ping: ClassVar[bytes] = PING
    media_type: ClassVar[str] = EVENT_STREAM
    can_resume: ClassVar[bool] = True  # whether a client can resume a stream with Last-Event-ID

    def __init__(self, service: Service) -> None:
        self.service = service

    @classmethod
    def operations(cls) -> Iterator[Operation]:
        """Describe the paths of the route for /openapi.json."""
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
        """Decode a body. Raises `ApiError` 400 if it is invalid."""
        body: B = self._decode(data)
        return body

    def read_request(self, request: Request, data: bytes) -> B:  # noqa: ARG002
        """Decode a body and add the parameters in the path and the query. Raises `ApiError` 400."""
        return self.decode(data)

    def check(self, body: B) -> None:
        """Check a body before rendering. Raises `ApiError` 404 and `InvalidRequest`."""
        self.service.check_model(body.model)
        self.service.check_range(body, most_temperature=self.most_temperature)

    async def open(self, body: B) -> Reply:
        """Render the body and submit it. Raises `InvalidRequest`, `QueueFull` and `EngineDead`."""
        raise NotImplementedError

    def rename(self, error: InvalidRequest, body: B) -> None:  # noqa: ARG002
        """Rename the field in an error to this API's name for it."""
        if (name := self.names.get(error.param or "")) is not None:
            error.rename(name)

    def error_event(self, error: ApiError) -> bytes:
        """Return the event for an error inside a stream."""
        context = CONTEXT.get()
        return self.error_form.event(error, None if context is None else context.request_id)

    async def submit(self, body: B) -> Reply:
        """Check a body and open its answer. Errors name fields by the names in the body."""
        self.check(body)
        try:
            return await self.open(body)
        except InvalidRequest as error:
            name_as_given(error, body)
            self.rename(error, body)
            raise


class Endpoints:
    """Routes that generate no text: methods marked with `get`, `post` or `delete`."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @classmethod
    def is_served(cls, settings: Settings) -> bool:  # noqa: ARG003
        """Whether a server with these settings has these routes."""
        return True

    @classmethod
    def handlers(cls) -> Iterator[tuple[str, Operation]]:
        """Yield the name and the operation of each marked method."""
        for name, method in vars(cls).items():
            if isinstance(known := getattr(method, "operation", None), Operation):
                yield name, known

    @classmethod
    def operations(cls) -> Iterator[Operation]:
        """Describe the routes for /openapi.json."""
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
    """Mark a method of `Endpoints` as a GET route. ``facts``: fields of `Operation`."""
    return _marked(Operation(method="GET", path=path, answer=answer, **facts))


def post(path: str, answer: Any = None, **facts: Any) -> Callable[[Handler], Handler]:  # noqa: ANN401
    """Mark a method of `Endpoints` as a POST route. ``facts``: fields of `Operation`."""
    return _marked(Operation(method="POST", path=path, answer=answer, **facts))


def delete(path: str, answer: Any = None, **facts: Any) -> Callable[[Handler], Handler]:  # noqa: ANN401
    """Mark a method of `Endpoints` as a DELETE route. ``facts``: fields of `Operation`."""
    return _marked(Operation(method="DELETE", path=path, answer=answer, **facts))


def _marked(operation: Operation) -> Callable[[Handler], Handler]:
    def mark(handler: Handler) -> Handler:
        vars(handler)["operation"] = operation
        return handler

    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One API of the server.

    - ``prefix``: the API owns this path and all paths below it.
    - ``header``: a header that its clients send with each request and that identifies them.
    - ``moved``: a prefix that its clients use, and the prefix that replaces it in requests with
      ``header``.
    - ``id_header``: its clients' name for ``x-request-id``.
    - ``key_headers``: headers that may carry the API key, in addition to ``Authorization``.
    - ``key_parameter``: a query parameter that may carry the API key.
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
        """The form of the API's errors."""
        return self.dialects[0].error_form

    def has(self, path: str) -> bool:
        """Whether a path belongs to the API."""
        return path == self.prefix or path.startswith(f"{self.prefix.rstrip('/')}/")

    def operations(self) -> Iterator[Operation]:
        """Describe the routes of the API for /openapi.json."""
        for dialect in self.dialects:
            yield from dialect.operations()
        for endpoints in self.endpoints:
            yield from endpoints.operations()

"""GET /openapi.json: the routes and the types of their bodies, as the code has them.

Request bodies are the very structs that the routes decode, answers those that the routes encode.
What stands in neither is free. The few things that a route checks beyond its types are the tables
below; tests/fuzz compares document and server.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...._version import __version__
from ...anthropic import protocol as messages
from ...anthropic.errors import is_messages
from ...anthropic.schema import CountRequest, MessagesRequest
from ...ollama import protocol as ollama
from ...ollama.errors import is_ollama
from ...ollama.schema import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from ...openai import protocol as openai
from ...openai.batches import protocol as batches
from ...openai.responses import protocol as responses
from ...openai.responses.route import MAX_PAGE
from ...openai.responses.schema import ResponsesRequest
from ...openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from ...serving.render import Rendered
from ...serving.errors import ErrorBody
from ...types.fields import marks_of, structs_in
from ...types.results import Body
from . import protocol
from .adapters import AdapterLoaded, AdapterUnloaded, LoadAdapter, UnloadAdapter
from .cache_routes import FlushRequest

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
BINARY, FORM = "application/octet-stream", "multipart/form-data"
HTML, LINES = "text/html", "application/x-ndjson"
REF = "#/components/schemas/{name}"
SECURITY: list[Body] = [{"bearer": []}, {"header": []}]
OPEN = frozenset({"/health"})  # need no key
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


Schema = dict[str, Any]
ONE_OF: Mapping[str, tuple[str, str]] = {
    "TokenizeRequest": ("prompt", "messages"),
}
"""Bodies that take one of two fields and never both; null is as good as nothing."""

TEXT_FIELD: Schema = {"type": "string"}
QUERY: Mapping[str, Schema] = {
    "after": TEXT_FIELD,
    "cache_salt": TEXT_FIELD,
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "order": {"enum": ["asc", "desc"]},
    "purpose": TEXT_FIELD,
    "previous_id": TEXT_FIELD,
    "response_id": {"type": "string", "minLength": 1},
}
"""Parameters of a query, by name."""

STATUSES: Mapping[int, str] = {  # those of a connection, before any route, are not here
    400: "A header, a parameter or a field of the body is wrong; the error names it.",
    401: "The API key is missing or wrong.",
    403: "An admin key is needed, or the path is not one that may be read.",
    404: "There is no such model, response or prompt.",
    408: "The body did not arrive in time.",
    409: "Replicas are being replaced; the change has to wait for the end of that.",
    413: "The body is too large.",
    429: "The queue is full.",
    431: "The header is too large.",
    500: "The server failed.",
    503: "The server starts, ends or is out of order, or the request's deadline passed.",
    507: "The disk of files and batches is full.",
}
UNLOCKED = (400, 431, 500)
ALWAYS = (*UNLOCKED, 401)
READS = (404, 408, 413, 503)  # a body that may name a model
GENERATES = (*READS, 429)
KEPT = (404, 503)  # of a folder that another server may have still
RETRIED = frozenset({409, 429, 503})  # tell when to come back


def one_of(schema: Schema, names: tuple[str, str]) -> None:
    """Say in place that one of these is there and the other is not."""
    something, nothing = {"not": {"type": "null"}}, {"type": "null"}
    schema["oneOf"] = [
        {"required": [one], "properties": {one: something, other: nothing}}
        for one, other in (names, names[::-1])
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Input and output of a route. ``body`` and ``answer``: structs; None: nothing, or free."""

    body: Any = None
    body_media: str = JSON
    answer: Any = None
    events: Any = None  # the data of one event, where ``stream`` is true
    media: str = JSON
    query: Sequence[str] = ()
    is_body_needed: bool = True
    errors: Sequence[int] = ()  # statuses beside those of every route
    outage: Any = None  # the body of its 503, where that is no error


class UploadForm(Struct, kw_only=True):
    """Form of /v1/files."""

    file: bytes
    purpose: Literal["batch"]
    expires_after: batches.ExpiresAfter | None = None


STORED = ("cache_salt",)
OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        body=ChatRequest, answer=openai.ChatBody, events=openai.ChunkBody, errors=GENERATES
    ),
    ("POST", "/v1/chat/completions/render"): Operation(
        body=ChatRequest, answer=Rendered, errors=READS
    ),
    ("POST", "/v1/completions"): Operation(
        body=CompletionRequest, answer=openai.TextBody, events=openai.TextBody, errors=GENERATES
    ),
    ("POST", "/v1/completions/render"): Operation(
        body=CompletionRequest, answer=list[Rendered], errors=READS
    ),
    ("POST", "/v1/embeddings"): Operation(
        body=EmbeddingsRequest, answer=openai.EmbeddingsBody, errors=GENERATES
    ),
    ("POST", "/v1/rerank"): Operation(
        body=RerankRequest, answer=openai.RerankBody, errors=GENERATES
    ),
    ("POST", "/rerank"): Operation(body=RerankRequest, answer=openai.RerankBody, errors=GENERATES),
    ("POST", "/v2/rerank"): Operation(
        body=RerankRequest, answer=openai.RerankBody, errors=GENERATES
    ),
    ("POST", "/v1/score"): Operation(body=ScoreRequest, answer=openai.ScoresBody, errors=GENERATES),
    ("POST", "/score"): Operation(body=ScoreRequest, answer=openai.ScoresBody, errors=GENERATES),
    ("POST", "/v1/responses"): Operation(
        body=ResponsesRequest,
        answer=responses.ResponseBody,
        events=responses.StreamEvent,
        errors=GENERATES,
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        body=ResponsesRequest, answer=responses.InputTokens, errors=READS
    ),
    ("POST", "/v1/responses/render"): Operation(
        body=ResponsesRequest, answer=Rendered, errors=READS
    ),
    ("GET", "/v1/responses/{id}"): Operation(
        answer=responses.ResponseBody, query=STORED, errors=(404,)
    ),
    ("DELETE", "/v1/responses/{id}"): Operation(
        answer=responses.Deleted, query=STORED, errors=(404,)
    ),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        answer=responses.ItemList, query=("limit", "after", "order", *STORED), errors=(404,)
    ),
    ("POST", "/v1/messages"): Operation(
        body=MessagesRequest,
        answer=messages.MessageAnswer,
        events=messages.StreamEvent,
        errors=GENERATES,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        body=CountRequest, answer=messages.TokenCount, errors=READS
    ),
    ("POST", "/v1/messages/render"): Operation(body=MessagesRequest, answer=Rendered, errors=READS),
    ("POST", "/api/chat"): Operation(
        body=OllamaChatBody, answer=ollama.ChatPart, events=ollama.ChatPart, errors=GENERATES
    ),
    ("POST", "/api/generate"): Operation(
        body=OllamaGenerateBody,
        answer=ollama.GeneratePart,
        events=ollama.GeneratePart,
        errors=GENERATES,
    ),
    ("POST", "/api/embed"): Operation(
        body=OllamaEmbedBody, answer=ollama.Embedded, errors=GENERATES
    ),
    ("POST", "/api/embeddings"): Operation(
        body=OllamaEmbeddingsBody, answer=ollama.EmbeddedOne, errors=GENERATES
    ),
    ("GET", "/api/tags"): Operation(answer=ollama.TagList),
    ("GET", "/api/ps"): Operation(answer=ollama.TagList),
    ("POST", "/api/show"): Operation(body=OllamaShowBody, answer=ollama.Shown, errors=READS),
    ("GET", "/api/version"): Operation(answer=ollama.OllamaVersion),
    ("POST", "/v1/files"): Operation(
        body=UploadForm, body_media=FORM, answer=batches.FileBody, errors=(408, 413, 503, 507)
    ),
    ("GET", "/v1/files"): Operation(
        answer=batches.FileList, query=("limit", "after", "purpose"), errors=(503,)
    ),
    ("GET", "/v1/files/{id}"): Operation(answer=batches.FileBody, errors=KEPT),
    ("DELETE", "/v1/files/{id}"): Operation(answer=batches.FileDeleted, errors=(*KEPT, 507)),
    ("GET", "/v1/files/{id}/content"): Operation(media=BINARY, errors=KEPT),
    ("POST", "/v1/batches"): Operation(
        body=batches.CreateBatch, answer=batches.BatchBody, errors=(*GENERATES, 507)
    ),
    ("GET", "/v1/batches"): Operation(
        answer=batches.BatchList, query=("limit", "after"), errors=(503,)
    ),
    ("GET", "/v1/batches/{id}"): Operation(answer=batches.BatchBody, errors=KEPT),
    ("POST", "/v1/batches/{id}/cancel"): Operation(answer=batches.BatchBody, errors=KEPT),
    ("GET", "/v1/models"): Operation(answer=protocol.ModelList),
    ("GET", "/v1/models/{name}"): Operation(answer=protocol.Model, errors=(404,)),
    ("POST", "/tokenize"): Operation(body=TokenizeRequest, answer=protocol.Tokens, errors=READS),
    ("POST", "/detokenize"): Operation(
        body=DetokenizeRequest, answer=protocol.Detokenized, errors=READS
    ),
    ("GET", "/health"): Operation(answer=protocol.Status, errors=(503,), outage=protocol.Status),
    ("GET", "/ready"): Operation(answer=protocol.Status, errors=(503,)),
    ("GET", "/version"): Operation(answer=protocol.Version),
    ("GET", "/server_info"): Operation(answer=protocol.ServerInfo),
    ("GET", "/model_info"): Operation(answer=protocol.ModelInfo),
    ("GET", "/metrics"): Operation(media=TEXT),
    ("GET", "/cache"): Operation(answer=protocol.CacheBody, query=STORED, errors=(403,)),
    ("GET", "/cache/explain"): Operation(
        query=("response_id!", "previous_id", *STORED), errors=(404,)
    ),
    ("POST", "/cache/flush"): Operation(
        body=FlushRequest,
        answer=protocol.Flushed,
        is_body_needed=False,
        errors=(403, 408, 413, 503),
    ),
    ("POST", "/replicas"): Operation(
        body=protocol.ReplicaChange, answer=protocol.ReplicaList, errors=(403, 408, 409, 413, 503)
    ),
    ("GET", "/replicas"): Operation(answer=protocol.ReplicaList, errors=(403,)),
    ("POST", "/v1/load_lora_adapter"): Operation(
        body=LoadAdapter, answer=AdapterLoaded, errors=(403, 408, 413, 503)
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        body=UnloadAdapter, answer=AdapterUnloaded, errors=(403, 404, 408, 413, 503)
    ),
    ("POST", "/debug/audit"): Operation(answer=protocol.Audit, errors=(403, 503)),
    ("GET", "/"): Operation(media=HTML),
    ("GET", "/docs"): Operation(media=HTML),
    ("GET", "/ui/events"): Operation(media=EVENTS, errors=(403,)),
    ("GET", "/openapi.json"): Operation(),
}
"""Operations by method and path. A query parameter with a "!" is required."""


class OpenApi:
    """The document of an application, made when it is first asked for."""

    def __init__(self, root_path: str = "") -> None:
        self._root_path = root_path
        self._document: bytes | None = None

    async def show(self, request: Request) -> Response:
        """The OpenAPI description of all routes."""
        if self._document is None:
            document = describe(request.app.routes)
            if self._root_path:
                document["servers"] = [{"url": self._root_path}]
            self._document = msgspec.json.encode(document)
        return Response(self._document, media_type=JSON)


def describe(routes: Sequence[BaseRoute]) -> Body:
    """The OpenAPI 3.1 document of these routes; raises KeyError for one that is unknown here."""
    shapes = _Shapes()
    paths: dict[str, dict[str, Body]] = {}
    for route in routes:
        if isinstance(route, Route):
            for method in sorted((route.methods or set()) - {"HEAD"}):
                path = template(route)
                paths.setdefault(path, {})[method.lower()] = _operation(route, method, shapes)
    about = {
        "title": "foretoken",
        "version": __version__,
        "summary": "LLM inference with speculative decoding and a prompt cache.",
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    }
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": about,
        "security": SECURITY,
        "paths": paths,
        "components": {"schemas": shapes.components, "securitySchemes": keys},
    }


def template(route: Route) -> str:
    """The path without the converters of its parameters."""
    return _PARAMETER.sub(r"{\1}", route.path)


class _Shapes:
    """JSON schemas of all structs that the operations name."""

    def __init__(self) -> None:
        named = (s for each in OPERATIONS.values() for s in (each.body, each.answer, each.events))
        errors = (ErrorBody, messages.MessageError, ollama.OllamaError)
        structs = dict.fromkeys(s for s in (*named, *errors) if s is not None)
        found, self.components = msgspec.json.schema_components(structs, ref_template=REF)
        self._refs: dict[Any, Body] = dict(zip(structs, found, strict=True))
        self._mark([s for each in structs for s in structs_in(each)], set())
        self._say_the_rest()

    def _mark(self, structs: Iterable[type[Struct]], done: set[type[Struct]]) -> None:
        """Leave out fields that are refused; those that are other names come last."""
        for struct in structs:
            if struct in done:
                continue
            done.add(struct)
            marks = marks_of(struct)
            for name, _ in marks.refused:
                del self.components[struct.__name__]["properties"][name]
            for name, other in marks.same:
                fields = self.components[struct.__name__]["properties"]
                about = {"description": f"Another name of `{other.name}`."}
                fields[name] = fields.pop(name) | about
            hints = get_type_hints(struct, include_extras=True)
            self._mark([s for hint in hints.values() for s in structs_in(hint)], done)

    def _say_the_rest(self) -> None:
        for name, pair in ONE_OF.items():
            one_of(self.components[name], pair)

    def of(self, struct: object) -> Body:
        """A reference to it; of what is free, the schema of an object."""
        return self._refs.get(struct, {"type": "object"})


def _operation(route: Route, method: str, shapes: _Shapes) -> Body:
    path = template(route)
    known = OPERATIONS[method, path]
    operation: Body = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": (inspect.getdoc(route.endpoint) or "").partition("\n")[0],
        "responses": _responses(path, known, shapes),
    }
    parameters = [*_path_parameters(route), *_query_parameters(known)]
    if parameters:
        operation["parameters"] = parameters
    if known.body is not None:
        content = {known.body_media: {"schema": shapes.of(known.body)}}
        operation["requestBody"] = {"required": known.is_body_needed, "content": content}
    if path in OPEN:
        operation["security"] = []
    return operation


def _responses(path: str, known: Operation, shapes: _Shapes) -> Body:
    schema = (
        {"type": "string"}
        if known.media in (TEXT, HTML, EVENTS, BINARY)
        else shapes.of(known.answer)
    )
    content: Body = {known.media: {"schema": schema}}
    if known.events is not None:  # the schema is that of one event's data
        content[LINES if is_ollama(path) else EVENTS] = {"schema": shapes.of(known.events)}
    answer = {"description": "The answer.", "headers": _headers(path), "content": content}
    statuses = sorted({*(ALWAYS if path not in OPEN else UNLOCKED), *known.errors})
    failures = {str(status): _failure(path, status, known, shapes) for status in statuses}
    return {"200": answer, **failures}


def _failure(path: str, status: int, known: Operation, shapes: _Shapes) -> Body:
    other = ollama.OllamaError if is_ollama(path) else ErrorBody
    failure = messages.MessageError if is_messages(path) else other
    struct = (status == 503 and known.outage) or failure
    headers = _headers(path)
    if status in RETRIED and known.outage is None:
        headers["retry-after"] = _header({"type": "integer", "minimum": 1, "maximum": 60})
    content = {JSON: {"schema": shapes.of(struct)}}
    return {"description": STATUSES[status], "headers": headers, "content": content}


def _headers(path: str) -> Body:
    names = ["x-request-id", *(["request-id"] if is_messages(path) else [])]
    return {name: _header({"type": "string"}) for name in names}


def _header(schema: Body) -> Body:
    return {"required": True, "schema": schema}


def _path_parameters(route: Route) -> list[Body]:
    names = _PARAMETER.findall(route.path)
    schema = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]


def _query_parameters(known: Operation) -> list[Body]:
    names = [(name.removesuffix("!"), name.endswith("!")) for name in known.query]
    return [
        {"name": name, "in": "query", "required": needed, "schema": QUERY[name]}
        for name, needed in names
    ]

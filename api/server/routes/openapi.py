"""GET /openapi.json: the routes and the types of their bodies, generated from the code.

The schemas are derived from the structs that each route decodes and encodes. The body of a route
without a struct may be any JSON object. The tables below describe checks beyond the types;
tests/fuzz compares the document with the server.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...._version import __version__
from ...dialects import APIS, api_of_path
from ...serving.dialect import Endpoints, Operation, get
from ...serving.paging import MAX_PAGE
from ...serving.serving_context import Service
from ...types.fields import marks_of, structs_in, written_name
from ...types.results import Body

JSON = "application/json"
REF = "#/components/schemas/{name}"
SECURITY: list[Body] = [{"bearer": []}, {"header": []}]
OPEN = frozenset({"/health"})  # paths that need no key
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


Schema = dict[str, Any]
ONE_OF: Mapping[str, tuple[str, str]] = {
    "TokenizeRequest": ("prompt", "messages"),
}
"""Bodies that require exactly one of two fields. Null counts as missing."""

TEXT_FIELD: Schema = {"type": "string"}
QUERY: Mapping[str, Schema] = {
    "after": TEXT_FIELD,
    "alt": {"enum": ["sse"]},
    "cache_salt": TEXT_FIELD,
    "config_format": {"enum": ["json", "text"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "mode": {"enum": ["abort", "wait", "keep"]},
    "order": {"enum": ["asc", "desc"]},
    "purpose": TEXT_FIELD,
    "previous_id": TEXT_FIELD,
    "response_id": {"type": "string", "minLength": 1},
    "starting_after": {"type": "integer", "minimum": -1},
    "stream": {"type": "boolean"},
}
"""Query parameters by name."""

STATUSES: Mapping[int, str] = {  # statuses sent before routing are not listed
    400: "A header, a parameter or a field of the body is invalid; the error names it.",
    401: "The API key is missing or wrong.",
    403: "An admin key is required, or the path must not be read.",
    404: "The model, response or prompt does not exist.",
    408: "The body did not arrive in time.",
    409: "Replicas are being replaced; try again afterwards.",
    413: "The body is too large.",
    429: "The queue is full.",
    431: "The header is too large.",
    500: "The server failed.",
    503: "The server is starting, shutting down or failed, or the request's deadline passed.",
    507: "The disk of files and batches is full.",
}
UNLOCKED = (400, 431, 500)
ALWAYS = (*UNLOCKED, 401)
RETRIED = frozenset({409, 429, 503})  # answers with these statuses have a retry-after header


def one_of(schema: Schema, names: tuple[str, str]) -> None:
    """Add to a schema the rule that exactly one of two fields must be present."""
    something, nothing = {"not": {"type": "null"}}, {"type": "null"}
    schema["oneOf"] = [
        {"required": [one], "properties": {one: something, other: nothing}}
        for one, other in (names, names[::-1])
    ]


ABOUT = ("default", "description")  # keys of a field's schema that say nothing of its values


def take_single_entries(schema: Schema) -> None:
    """Add to a struct's schema that each list of objects may be sent as its only object."""
    for name, field in schema["properties"].items():
        listed = {key: value for key, value in field.items() if key not in ABOUT}
        kinds = field.get("anyOf", [listed])
        single = [kind["items"] for kind in kinds if "$ref" in kind.get("items", {})]
        if single:
            rest = {key: value for key, value in field.items() if key in ABOUT}
            schema["properties"][name] = {"anyOf": [*kinds, *single]} | rest


class OpenApi(Endpoints):
    """The OpenAPI document of the application, generated at the first request."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._document: bytes | None = None

    @get("/openapi.json")
    async def show(self, request: Request) -> Response:
        """Return the OpenAPI description of all routes."""
        if self._document is None:
            document = describe(request.app.routes)
            if root_path := self.service.settings.root_path:
                document["servers"] = [{"url": root_path}]
            self._document = msgspec.json.encode(document)
        return Response(self._document, media_type=JSON)


def describe(routes: Sequence[BaseRoute]) -> Body:
    """Return the OpenAPI 3.1 document of the given routes.

    Raises AttributeError for a route without a declared operation.
    """
    known = [(each, operation_of(each)) for each in routes if isinstance(each, Route)]
    shapes = _Shapes([operation for _, operation in known])
    paths: dict[str, dict[str, Body]] = {}
    for route, operation in known:
        described = _operation(route, operation, shapes)
        paths.setdefault(template(operation.path), {})[operation.method.lower()] = described
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


def operation_of(route: Route) -> Operation:
    """Return the operation that a route declares."""
    endpoint: Any = route.endpoint
    declared: Operation | Mapping[str, Operation] = endpoint.operation
    return declared if isinstance(declared, Operation) else declared[route.path]


def template(path: str) -> str:
    """Return the path without the types of its parameters."""
    return _PARAMETER.sub(r"{\1}", path)


class _Shapes:
    """JSON schemas of all structs that the operations use."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        named = (s for each in operations for s in (each.body, each.answer, each.events))
        errors = (api.error_form.struct for api in APIS)
        structs = dict.fromkeys(s for s in (*named, *errors) if s is not None)
        found, self.components = msgspec.json.schema_components(structs, ref_template=REF)
        self._refs: dict[Any, Body] = dict(zip(structs, found, strict=True))
        self._mark([s for each in structs for s in structs_in(each)], set())
        self._say_the_rest()

    def _mark(self, structs: Iterable[type[Struct]], done: set[type[Struct]]) -> None:
        """Remove refused fields from the schemas, and move aliases to the end."""
        for struct in structs:
            if struct in done:
                continue
            done.add(struct)
            marks = marks_of(struct)
            if struct.__name__ not in self.components and (marks.refused or marks.same):
                raise ValueError(f"two structs with marked fields are named {struct.__name__}")
            for name, _ in marks.refused:
                del self.components[struct.__name__]["properties"][written_name(struct, name)]
            for name, other in marks.same:
                fields = self.components[struct.__name__]["properties"]
                about = {"description": f"Alias of `{other.name}`."}
                fields[name] = fields.pop(name) | about
            if getattr(struct, "takes_single_entries", False):
                take_single_entries(self.components[struct.__name__])
            hints = get_type_hints(struct, include_extras=True)
            self._mark([s for hint in hints.values() for s in structs_in(hint)], done)

    def _say_the_rest(self) -> None:
        for name, pair in ONE_OF.items():
            if name in self.components:
                one_of(self.components[name], pair)

    def of(self, struct: object) -> Body:
        """Return a reference to the schema of a struct; for `Free`, the schema of any object."""
        return self._refs.get(struct, {"type": "object"})


def _operation(route: Route, known: Operation, shapes: _Shapes) -> Body:
    path = template(known.path)
    operation: Body = {
        "operationId": "_".join([known.method.lower(), *re.findall(r"\w+", path)]),
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
    schema = shapes.of(known.answer) if known.media == JSON else {"type": "string"}
    content: Body = {known.media: {"schema": schema}}
    if known.events is not None:  # the schema describes the data of one event
        content[known.events_media] = {"schema": shapes.of(known.events)}
    answer = {"description": "The answer.", "headers": _headers(path), "content": content}
    statuses = sorted({*(ALWAYS if path not in OPEN else UNLOCKED), *known.errors})
    failures = {str(status): _failure(path, status, known, shapes) for status in statuses}
    return {"200": answer, **failures}


def _failure(path: str, status: int, known: Operation, shapes: _Shapes) -> Body:
    struct = (status == 503 and known.outage) or api_of_path(path).error_form.struct
    headers = _headers(path)
    if status in RETRIED and known.outage is None:
        headers["retry-after"] = _header({"type": "integer", "minimum": 1, "maximum": 60})
    content = {JSON: {"schema": shapes.of(struct)}}
    return {"description": STATUSES[status], "headers": headers, "content": content}


def _headers(path: str) -> Body:
    id_header = api_of_path(path).id_header
    names = ["x-request-id", *([] if id_header is None else [id_header.decode()])]
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

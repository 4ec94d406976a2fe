"""Every operation of /openapi.json, with data that its schemas allow, and with other data.

The answers must be what the document says, and nothing else: statuses, headers, content types,
bodies, events. Data that the document forbids must be refused, in the words of the API.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode, checks

from foretoken.api.dialects.batches.routes import FORM
from foretoken.api.dialects.openai.bodies import ChatRequest
from foretoken.api.server.app import operations
from foretoken.api.server.rollouts.routes import RolloutRoutes
from foretoken.api.server.rollouts.transfer_routes import TransferRoutes
from foretoken.api.server.rollouts.weight_checker import WeightChecker
from foretoken.api.server.routes.openapi import template
from foretoken.api.serving.settings import Settings
from foretoken.api.types.fields import marks_of
from foretoken.api.types.sampling_params import STRUCTURED_FIELDS
from fuzz.conftest import Effort
from fuzz.inprocess import App
from fuzz.shapes import check_refusal
from support.adapters import write_adapter
from support.embedders import write_reranker

pytestmark = pytest.mark.slow

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.negative_data_rejection,
    checks.response_schema_conformance,  # not of streams: it takes the frames for what is in them
]
ENOUGH = 40  # inputs, of which some are accepted
ASTRAY = ("cache_salt", "previous_id", "after")  # lead a known id to nowhere
# The built-in model has no token for yes.
NOT_SERVED = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score")
OTHER_NAMES = {name: other.name for name, other in marks_of(ChatRequest).same}
FORMS = (*STRUCTURED_FIELDS, *(n for n, other in OTHER_NAMES.items() if other in STRUCTURED_FIELDS))
ENDLESS = (
    "GET",
    "/ui/events",
)  # its stream ends with its client: see tests/server/test_dashboard.py
ADMIN_ALONE = (  # the application of these tests has no admin key
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
)
# The application of these tests does not allow weight updates.
UPDATES = frozenset(
    each.path
    for kind in (RolloutRoutes, TransferRoutes, WeightChecker)
    for each in kind.operations()
)
OPERATIONS = {
    (each.method, template(each.path)): each for each in operations() if each.path not in UPDATES
}
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
WITHOUT_DATA = [
    (method, path)
    for (method, path), known in OPERATIONS.items()
    if known.body is None and not known.query and "{" not in path and (method, path) != ENDLESS
]
WITH_DATA = [each for each in OPERATIONS if each not in (*WITHOUT_DATA, ENDLESS, *ADMIN_ALONE)]


@pytest.fixture(scope="session")
def document(app: App) -> dict[str, Any]:
    return dict(app.ask("GET", "/openapi.json").json())


@pytest.fixture(scope="session")
def schema(document: dict[str, Any]) -> Any:
    return schemathesis.openapi.from_dict(document)


@pytest.fixture
def known(app: App, path: str) -> dict[str, str]:
    """Values of the path's parameters that lead somewhere."""
    kept = app.post("/v1/responses", {"input": "hi", "store": True, "max_output_tokens": 2})
    model = "foretoken-builtin"
    known = {"response_id": kept.json()["id"], "name": model, "model": model}
    if "/files/" in path:
        return known | {"id": _upload(app)}
    if "/batches" in path:
        file_id = _upload(app)
        batch = {"input_file_id": file_id, "endpoint": "/v1/completions"}
        made = app.post("/v1/batches", batch | {"completion_window": "24h"})
        return known | {"id": made.json()["id"], "input_file_id": file_id}
    return known | {"id": known["response_id"]}


def _upload(app: App) -> str:
    body = {"prompt": "hi", "max_tokens": 2}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    files = {"file": ("batch.jsonl", json.dumps(line))}
    url = "http://testserver/v1/files"
    made = requests.Request("POST", url, data={"purpose": "batch"}, files=files).prepare()
    return str(app.ask("POST", url, made.body, dict(made.headers)).json()["id"])


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), WITH_DATA)
def test_what_the_document_says_is_so(method, path, mode, app, schema, document, known, effort):
    operation = schema[path][method]
    answered = [0]

    def one(case: schemathesis.Case, is_known: bool) -> None:
        note(f"--fuzz-seed {effort.seed}")
        _steer(case, known if is_known else {})
        response = _send(app, case)
        answered[0] += response.status_code == 200
        _check(case, response, document)

    cases = operation.as_strategy(generation_mode=mode)
    _explore(effort, one, cases, st.sampled_from((True, True, False)))
    is_shallow = mode is GenerationMode.NEGATIVE or effort.examples < ENOUGH
    assert is_shallow or path in NOT_SERVED or answered[0], "nothing was accepted"


@pytest.fixture(scope="module")
def other_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """A reranker, with the routes of an admin that loads adapters."""
    folder, adapters = (tmp_path_factory.mktemp(name) for name in ("reranker", "adapters"))
    model, _ = write_reranker(folder)
    write_adapter(adapters / "sql", model)
    app = App(str(folder), settings=Settings(admin_keys=("admin",), lora_dir=str(adapters)))
    loaded = app.post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"})
    assert loaded.status_code == 200, loaded.text
    yield app
    app.close()


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", [*NOT_SERVED, *(path for _, path in ADMIN_ALONE)])
def test_what_the_document_says_of_rerankers_and_adapters_is_so(path, mode, other_app, effort):
    document = dict(other_app.ask("GET", "/openapi.json").json())
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]

    def one(case: schemathesis.Case) -> None:
        note(f"--fuzz-seed {effort.seed}")
        _steer(case, {})
        _check(case, _send(other_app, case), document)

    _explore(effort, one, operation.as_strategy(generation_mode=mode))


@pytest.mark.parametrize(("method", "path"), WITHOUT_DATA)
def test_what_takes_nothing_answers_as_it_is_written(method, path, app, schema, document):
    case = schema[path][method].Case()
    _check(case, _send(app, case), document)


def _explore(effort: Effort, check: Callable[..., None], *inputs: st.SearchStrategy[Any]) -> None:
    """Run the check on inputs that follow from the seed alone."""
    bounded = settings(
        max_examples=effort.examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    bounded(seeded(effort.seed)(given(*inputs)(check)))()


def _steer(case: schemathesis.Case, known: dict[str, str]) -> None:
    """Past what would hide everything else: models and ids that are not here, forms at odds."""
    body = case.body
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body["model"] = None
        for name in [form for form in FORMS if body.get(form) is not None][1:]:
            del body[name]
        for name, other in OTHER_NAMES.items():
            if body.get(name) is not None and body.get(other) is not None:
                del body[name]
        if "/responses" in case.path and known:
            body.pop("previous_response_id", None)
            body.setdefault("input", "hi")
        if "input_file_id" in known and isinstance(body.get("input_file_id"), str):
            body["input_file_id"] = known["input_file_id"]
            body["endpoint"] = "/v1/completions"  # the one that the file's lines name
        case.body = body
    for place in (case.path_parameters, case.query):
        for name in [*place]:
            if name in known:
                place[name] = known[name]
            elif known and name in ASTRAY:
                del place[name]


def _send(app: App, case: schemathesis.Case) -> httpx.Response:
    given = case.as_transport_kwargs(base_url="http://testserver")
    names = ("method", "url", "headers", "params", "data", "json", "cookies", "files")
    made = requests.Request(**{name: given[name] for name in names if name in given}).prepare()
    content = made.body.encode() if isinstance(made.body, str) else made.body
    headers = {name: value for name, value in made.headers.items() if name != "Content-Length"}
    return app.ask(str(made.method), str(made.url), content, headers)


def _check(case: schemathesis.Case, response: httpx.Response, document: dict[str, Any]) -> None:
    media = response.headers["content-type"].partition(";")[0]
    is_stream = media in (EVENTS, LINES)
    known = CHECKS[:-1] if is_stream else CHECKS
    if _is_text_in_a_form(case) or _has_unknown_entry(case.body):
        known = [check for check in known if check is not checks.negative_data_rejection]
    case.validate_response(response, checks=known)
    _check_status(response)
    if is_stream:
        content = document["paths"][case.path]["post"]["responses"]["200"]["content"]
        _check_events(
            response.text, content[media]["schema"] | {"components": document["components"]}
        )


def _is_text_in_a_form(case: schemathesis.Case) -> bool:
    """Whether the file is a value of another type, which a form writes as text: a good file."""
    body = case.body
    is_form = case.media_type == FORM and isinstance(body, dict)
    return is_form and not isinstance(body.get("file", ""), (str, bytes))


def _has_unknown_entry(value: object) -> bool:
    """Whether a list has an entry of a type that is left out, whatever its other fields are."""
    if isinstance(value, dict):
        return any(map(_has_unknown_entry, value.values()))
    entries = value if isinstance(value, list) else []
    types = [each.get("type") for each in entries if isinstance(each, dict)]
    return any(isinstance(each, str) and each not in KINDS for each in types) or any(
        map(_has_unknown_entry, entries)
    )


def _kinds(owner: type) -> set[str]:
    """Return the types of entries that a struct or one derived from it reads."""
    found = set(getattr(owner, "known_kinds", ()))
    return found.union(*map(_kinds, owner.__subclasses__()))


KINDS = _kinds(msgspec.Struct)


def _check_status(response: httpx.Response) -> None:
    is_late = response.status_code == 503 and "deadline" in response.text
    assert is_late or response.status_code < 500, response.text
    if response.status_code >= 400:
        check_refusal(response)


def _check_events(text: str, schema: dict[str, Any]) -> None:
    """Every event is of its schema, and none is an error."""
    validator = Draft202012Validator(schema)
    lines = text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith(("data: ", "{"))]
    assert events
    for event in events:
        if event != "[DONE]":
            validator.validate(json.loads(event))
            assert "error" not in json.loads(event) or event.startswith('{"type":"response')

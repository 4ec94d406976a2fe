"""/openapi.json says what the code does."""

from __future__ import annotations

import re
from dataclasses import replace

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from foretoken.api.dialects.anthropic import answers as messages
from foretoken.api.dialects.openai import answers as openai
from foretoken.api.dialects.openai.bodies import ChatRequest
from foretoken.api.dialects.responses import answers as responses
from foretoken.api.server import app
from foretoken.api.server.rollouts.routes import RolloutRoutes
from foretoken.api.server.rollouts.transfer_routes import TransferRoutes
from foretoken.api.server.rollouts.weight_checker import WeightChecker
from foretoken.api.server.routes import protocol
from foretoken.api.server.routes.openapi import JSON, describe, template
from foretoken.api.serving.errors import ErrorBody
from foretoken.api.serving.render import Rendered
from foretoken.api.serving.serving_context import Service
from foretoken.api.serving.settings import Settings
from foretoken.api.types.fields import marks_of
from support.given import listening

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def routes(built, tmp_path):
    from foretoken import AsyncLLM

    llm = AsyncLLM.from_built(built)
    served = app.routes(
        Service(llm, Settings(admin_keys=("admin",), receipts=str(tmp_path / "keys.pem")))
    )
    return [each for each in served if isinstance(each, Route)]  # not the files of pages


@pytest.fixture
def document(routes):
    return msgspec.json.decode(msgspec.json.encode(describe(routes)))


def test_the_document_is_valid_openapi_3_1(document):
    OpenAPIV31SpecValidator(document).validate()


def test_every_route_is_described_and_nothing_else(routes, document):
    served = {
        (method, template(route.path))
        for route in routes
        for method in route.methods - {"HEAD"}
    }  # fmt: skip
    described = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    declared = {(each.method, template(each.path)) for each in app.operations()}
    # A server with receipts has no weight updates.
    kinds = (RolloutRoutes, TransferRoutes, WeightChecker)
    updates = {(each.method, each.path) for kind in kinds for each in kind.operations()}
    assert described == served == declared - updates


def test_the_routes_of_weight_updates_are_described_where_they_are_served(built):
    from foretoken import AsyncLLM

    llm = AsyncLLM.from_built(built)
    llm.config = replace(llm.config, allow_weight_updates=True)
    served = [each for each in app.routes(Service(llm, Settings())) if isinstance(each, Route)]
    document = msgspec.json.decode(msgspec.json.encode(describe(served)))
    OpenAPIV31SpecValidator(document).validate()
    assert {each.path for each in RolloutRoutes.operations()} <= set(document["paths"])
    assert "weight_version" in document["components"]["schemas"]["VersionedChatBody"]["required"]


def test_a_route_that_nobody_described_is_an_error(routes):
    async def more(request): ...

    with pytest.raises(AttributeError):
        describe([*routes, Route("/more", more, methods=["GET"])])


def test_every_operation_says_what_it_is_for(document):
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    assert all(each["summary"].endswith(".") for each in operations)
    ids = [each["operationId"] for each in operations]
    assert len(set(ids)) == len(ids)


def test_bodies_are_the_structs_that_the_routes_decode(document):
    schemas = document["components"]["schemas"]
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"][JSON]
    assert chat["schema"]["$ref"].endswith("/ChatRequest")
    properties = schemas["ChatRequest"]["properties"]
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert {"messages", "top_k", "cache_salt", "prediction"} <= set(properties)
    assert not {name for name, _ in marks_of(ChatRequest).refused} & set(properties)
    assert properties["ebnf"]["description"] == "Alias of `grammar`."


def test_it_is_served_and_behind_the_key(serve):
    server = serve(api_keys=("k",))
    url = f"{server.url}/openapi.json"
    assert httpx.get(url).status_code == 401
    answer = httpx.get(url, headers={"x-api-key": "k"})
    assert answer.json()["openapi"] == "3.1.0"
    assert answer.json() == httpx.get(url, headers={"x-api-key": "k"}).json()


@pytest.mark.parametrize(
    ("path", "body", "struct"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}, openai.ChatBody),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}, openai.TextBody),
        ("/v1/models", None, protocol.ModelList),
        ("/v1/models/tiny/model", None, protocol.Model),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}, protocol.Tokens),
        ("/detokenize", {"tokens": [5]}, protocol.Detokenized),
        ("/cache/flush", {}, protocol.Flushed),
        ("/health", None, protocol.Status),
        ("/version", None, protocol.Version),
        ("/server_info", None, protocol.ServerInfo),
        ("/model_info", None, protocol.ModelInfo),
        ("/v1/completions/render", {"prompt": ["a", "b"], "logit_bias": {"5": 1}}, list[Rendered]),
        ("/v1/chat/completions/render", {"messages": HI, "stream": True}, Rendered),
        ("/v1/responses/render", {"input": "hi", "regex": "a"}, Rendered),
        ("/v1/messages/render", {"messages": HI, "max_tokens": 2}, Rendered),
        ("/nowhere", None, ErrorBody),
        ("/v1/messages", {"messages": HI, "max_tokens": 2}, messages.MessageAnswer),
        ("/v1/messages", {"messages": HI}, messages.MessageError),
        ("/v1/messages/count_tokens", {"messages": HI}, messages.TokenCount),
        ("/v1/responses/input_tokens", {"input": "hi"}, responses.InputTokens),
    ],
)
def test_answers_hold_what_is_described_and_no_more(server, path, body, struct):
    with httpx.Client(base_url=server.url) as http:
        answer = http.get(path) if body is None else http.post(path, json=body)
    read = msgspec.json.decode(answer.content, type=struct)
    assert msgspec.to_builtins(read, str_keys=True) == answer.json()


def test_responses_are_what_is_described(server):
    with httpx.Client(base_url=server.url) as http:
        body = {"input": "hi", "max_output_tokens": 2, "store": True}
        made = msgspec.json.decode(
            http.post("/v1/responses", json=body).content, type=responses.ResponseBody
        )
        assert made.usage.output_tokens == 2
        items = http.get(f"/v1/responses/{made.id}/input_items").content
        assert len(msgspec.json.decode(items, type=responses.ItemList).data) == 1
        gone = http.delete(f"/v1/responses/{made.id}").content
        assert msgspec.json.decode(gone, type=responses.Deleted).id == made.id


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        ("/v1/chat/completions", {"messages": HI}, openai.ChunkBody),
        ("/v1/completions", {"prompt": "hi"}, openai.TextBody),
        ("/v1/responses", {"input": "hi"}, responses.StreamEvent),
        ("/v1/messages", {"messages": HI, "max_tokens": 2}, messages.StreamEvent),
    ],
)
def test_events_hold_what_is_described_and_no_more(server, path, body, event):
    with httpx.Client(base_url=server.url) as http:
        answer = http.post(path, json={**body, "stream": True})
    sent = re.findall("^data: ({.*})$", answer.text, re.MULTILINE)
    assert len(sent) > 1
    for data in sent:
        read = msgspec.json.decode(data, type=event)
        assert msgspec.to_builtins(read, str_keys=True) == msgspec.json.decode(data)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_the_events_of_a_stream_are_told_apart_by_their_type(document, path):
    answers = document["paths"][path]["post"]["responses"]["200"]["content"]
    kinds = answers["text/event-stream"]["schema"]["discriminator"]
    assert kinds["propertyName"] == "type"
    assert len(kinds["mapping"]) > 5


def test_cors_lets_a_named_page_in_and_tells_it_the_request_id(serve):
    server = serve(api_keys=("k",), cors_origins=("http://page",))
    url = f"{server.url}/v1/models"
    ask = {"origin": "http://page", "access-control-request-method": "POST",
           "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    preflight = httpx.options(url, headers=ask)
    assert preflight.status_code == 200, "a preflight never carries the key"
    assert preflight.headers["access-control-allow-origin"] == "http://page"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    answer = httpx.get(url, headers={"origin": "http://page", "x-api-key": "k"})
    assert answer.headers["access-control-allow-origin"] == "http://page"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    refused = httpx.get(url, headers={"origin": "http://page"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://page", "so that it is read"


@pytest.mark.parametrize(("origins", "allowed"), [((), None), (("*",), "*"), (("http://a",), None)])
def test_cors_is_off_unless_asked_for(serve, origins, allowed):
    server = serve(cors_origins=origins)
    answer = httpx.get(f"{server.url}/health", headers={"origin": "http://page"})
    assert answer.headers.get("access-control-allow-origin") == allowed


def test_cors_covers_streams(serve):
    server = serve(cors_origins=("*",))
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        headers={"origin": "http://page"},
        json={"messages": HI, "stream": True, "max_tokens": 2},
    )
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_flag_names_origins_and_may_be_repeated():
    given = listening("--cors-origin", "http://a", "--cors-origin", "http://b, http://c")
    assert given.settings.cors_origins == ("http://a", "http://b", "http://c")
    assert listening().settings.cors_origins == ()


def test_lists_of_gemini_may_be_a_single_entry_and_the_document_says_so(serve, document):
    body = {"contents": {"parts": {"text": "hi"}}, "generationConfig": {"maxOutputTokens": 2}}
    schemas = document["components"]["schemas"]
    Draft202012Validator(schemas["GenerateBody"] | {"components": document["components"]}).validate(
        body
    )
    server = serve()
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{server.url}/v1beta/models/{model}:generateContent", json=body)
    assert answer.status_code == 200

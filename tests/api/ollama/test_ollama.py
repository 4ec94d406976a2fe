"""Ollama's API: bodies, lines, errors, and its own Python client."""

from __future__ import annotations

import contextlib
import json

import httpx
import msgspec
import ollama
import pytest

from foretoken.api.dialects.ollama.bodies import (
    Call,
    ChatMessage,
    FunctionCall,
    OllamaChatBody,
    OllamaGenerateBody,
    Options,
)
from foretoken.api.dialects.ollama.reading import plain_messages, read_params
from foretoken.core.errors import InvalidRequest

NAME = "tiny/model"
HI = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture
def client(server):
    with contextlib.closing(ollama.Client(host=server.url)) as made:
        yield made


def post(server, path, body, **options):
    return httpx.post(f"{server.url}{path}", json=body, timeout=20, **options)


def lines(response):
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


# -- with the client ------------------------------------------------------------------------------


def test_the_python_client_chats_whole_and_streamed(client, server, say):
    say("Hello world, hello there.")
    whole = client.chat(model=NAME, messages=HI, options={"temperature": 0, "num_predict": 50})
    assert whole.message.content == "Hello world, hello there."
    assert (whole.done, whole.done_reason) == (True, "stop")
    assert whole.prompt_eval_count > 0
    assert whole.eval_count > 0
    assert whole.total_duration >= 0
    parts = [*client.chat(model=NAME, messages=HI, stream=True)]
    assert len(parts) > 2
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count


def test_the_python_client_generates_with_and_without_the_template(client, say, engine):
    say("return the answer")
    assert client.generate(model=NAME, prompt="def f():", system="Be brief.").response == (
        "return the answer"
    )
    rendered = len(engine.requests[-1].tokens)
    parts = [*client.generate(model=NAME, prompt="def f():", raw=True, stream=True)]
    assert "".join(part.response for part in parts) == "return the answer"
    assert engine.requests[-1].prompt_len < rendered


def test_the_python_client_lists_and_shows_the_model(client, server):
    (model,) = client.list().models
    assert model.model == NAME
    assert [each.model for each in client.ps().models] == [NAME]
    shown = client.show(NAME)
    assert "completion" in shown.capabilities
    assert "im_start" in shown.template
    assert client.show(f"{NAME}:latest").details == shown.details


def test_errors_reach_the_python_client(client):
    with pytest.raises(ollama.ResponseError, match="other") as missing:
        client.chat(model="other", messages=HI)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="temperature") as bad:
        client.chat(model=NAME, messages=HI, options={"temperature": -1.0})
    assert bad.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="images"):
        client.chat(model=NAME, messages=[{"role": "user", "content": "x", "images": ["aGk="]}])


def test_a_schema_makes_json(client, engine, tokenizer):
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    ids = [*tokenizer.encode_word("{}"), tokenizer.vocab["<|im_end|>"]]
    engine.answers = lambda request: ids
    for format in (schema, "json"):
        assert client.chat(model=NAME, messages=HI, format=format).message.content == "{}"
        assert engine.requests[-1].sampling.constraint is not None


def test_the_python_client_embeds(client):
    found = client.embed(model=NAME, input=["a", "b c"])
    assert len(found.embeddings) == 2
    assert all(sum(x * x for x in each) == pytest.approx(1) for each in found.embeddings)
    assert (found.model, found.prompt_eval_count > 0) == (NAME, True)
    assert found.total_duration >= 0
    assert len(client.embed(model=f"{NAME}:latest", input="a").embeddings) == 1
    assert client.embed(model=NAME, input="").embeddings == []
    old = client.embeddings(model=NAME, prompt="a")
    assert [*old.embedding] == [*found.embeddings[0]]
    assert client.embeddings(model=NAME, prompt="").embedding == []


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/api/embed", {"input": ["a", ""]}, "input[1] must not be empty"),
        ("/api/embed", {"input": [1]}, "input[0]"),
        ("/api/embed", {"input": "a", "dimensions": 10**6}, "dimensions"),
        ("/api/embed", {"input": ["a"] * 2049}, "input"),
        ("/api/embeddings", {"prompt": ["a"]}, "prompt"),
        ("/api/embed", {"model": "other", "input": "a"}, "other"),
    ],
)
def test_bad_bodies_of_vectors_are_refused_with_a_text(server, path, body, named):
    response = post(server, path, {"model": NAME, **body})
    assert response.status_code in (400, 404)
    assert named in response.json()["error"]


@pytest.mark.parametrize("think", [True, "low", "high"])
def test_a_model_without_thinking_refuses_it_in_ollamas_words(client, server, think):
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(model=NAME, messages=HI, think=think)
    assert (caught.value.status_code, caught.value.error) == (
        400, f'"{NAME}" does not support thinking',
    )  # fmt: skip
    refused = post(server, "/api/generate", {"model": NAME, "prompt": "a", "think": think})
    assert refused.json() == {"error": f'"{NAME}" does not support thinking'}
    assert client.chat(model=NAME, messages=HI, think=False, options={"num_predict": 1}).done


def test_capabilities_are_what_requests_may_use(serve, client):
    assert client.show(NAME).capabilities == ["completion", "tools", "embedding"]
    server = serve(tool_parser="none", reasoning_parser="think")
    with contextlib.closing(ollama.Client(host=server.url)) as other:
        assert other.show(NAME).capabilities == ["completion", "thinking", "embedding"]
        assert other.chat(model=NAME, messages=HI, think=True, options={"num_predict": 1}).done


def test_the_routes_may_be_turned_off(serve):
    server = serve(ollama=False)
    for path in ("/api/version", "/api/tags", "/api/ps"):
        assert httpx.get(f"{server.url}{path}").status_code == 404
    for path in ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"):
        assert post(server, path, {"model": NAME}).status_code == 404
    assert httpx.get(f"{server.url}/v1/models").status_code == 200


# -- the bodies -----------------------------------------------------------------------------------


def test_a_stream_is_the_default_and_ends_with_its_counts(server, say):
    say("Hello")
    found = lines(post(server, "/api/chat", {"model": NAME, "messages": HI}))
    assert found[0]["message"] == {"role": "assistant", "content": "Hello"}
    assert found[0].keys() == {"model", "created_at", "done", "message"}
    assert found[-1]["message"]["content"] == ""
    assert found[-1]["done_reason"] == "stop"
    null = post(server, "/api/generate", {"model": NAME, "prompt": "a", "stream": None})
    assert lines(null)[-1]["done"]


def test_a_tag_and_an_empty_prompt_are_understood(server, engine):
    for path, body in (
        ("/api/chat", {"model": f"{NAME}:latest", "messages": []}),
        ("/api/generate", {"model": f"{NAME}:latest", "keep_alive": 0}),
    ):
        answer = post(server, path, body | {"stream": False}).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert engine.requests == []


def test_null_is_a_field_that_was_left_out(server, say):
    say("Hello")
    call = {"function": {"name": "f", "arguments": None}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    for path, body in (
        ("/api/chat", {"messages": [*HI, said, *HI]}),
        ("/api/chat", {"messages": None}),
        ("/api/generate", {"prompt": None}),
    ):
        answer = post(server, path, body | {"model": NAME, "stream": False})
        assert answer.json()["done"], answer.text


def test_calls_come_whole_with_their_arguments_as_an_object(serve, say, built, engine):
    server = serve(tool_parser="hermes")
    say('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>')
    body = {"model": NAME, "messages": HI, "tools": [WEATHER]}
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    streamed = lines(post(server, "/api/chat", body))
    assert [part["message"].get("tool_calls") for part in streamed if not part["done"]] == [[call]]
    assert streamed[-1]["done_reason"] == "stop"
    whole = post(server, "/api/chat", body | {"stream": False}).json()
    assert whole["message"]["tool_calls"] == [call]
    assert whole["done"]
    say('<tool_call>\n{"name": "weather", "argu')
    cut = post(server, "/api/chat", body | {"stream": False}).json()
    assert "tool_calls" not in cut["message"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/api/chat", {"messages": "Hello"}, "messages"),
        ("/api/chat", {"messages": HI, "options": {"top_p": 2}}, "top_p"),
        ("/api/chat", {"messages": HI, "options": {"stop": ["a" * 20_000]}}, "stop"),
        ("/api/chat", {"messages": HI, "logprobs": True}, "logprobs"),
        ("/api/chat", {"messages": HI, "format": {"type": "wrong"}}, "format"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/api/generate", {"prompt": "a", "context": [1]}, "context"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
        ("/api/generate", {"prompt": 3}, "prompt"),
        ("/api/nothing", {}, "route"),
    ],
    ids=str,
)
def test_a_bad_body_is_refused_with_a_text(path, body, named, server, engine):
    response = post(server, path, {"model": NAME, **body})
    assert response.status_code in (400, 404)
    assert response.json().keys() == {"error"}
    assert named in response.json()["error"]
    assert engine.requests == []


def test_an_error_after_the_first_line_is_a_line(server, engine):
    engine.row_error = "the token is not finite"
    found = post(server, "/api/chat", {"model": NAME, "messages": HI})
    assert found.status_code == 200
    assert lines(found)[-1] == {"error": "the token is not finite"}


def test_version_names_both(server):
    found = httpx.get(f"{server.url}/api/version").json()
    assert found.keys() == {"version", "foretoken"}


def test_keys_hold_for_these_routes(serve):
    server = serve(api_keys=("k",))
    refused = httpx.get(f"{server.url}/api/tags")
    assert (refused.status_code, refused.json().keys()) == (401, {"error"})
    headers = {"authorization": "Bearer k"}
    with contextlib.closing(ollama.Client(host=server.url, headers=headers)) as allowed:
        assert allowed.list().models


# -- conversions ----------------------------------------------------------------------------------


def test_calls_and_results_get_ids_that_belong_together():
    call = {"function": {"name": "a", "arguments": {"x": 1}}}
    other = {"function": {"name": "b", "arguments": {}}}
    messages = msgspec.convert(
        [
            {"role": "assistant", "tool_calls": [call, other], "thinking": "hm"},
            {"role": "tool", "tool_name": "b", "content": "2"},
            {"role": "tool", "content": "1"},
            {"role": "tool", "tool_name": "c", "content": "0"},
        ],
        list[ChatMessage],
    )
    plain = plain_messages(messages)
    first, second = (each["id"] for each in plain[0]["tool_calls"])
    assert first != second
    assert plain[0]["reasoning_content"] == "hm"
    assert plain[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert [each.get("tool_call_id") for each in plain[1:]] == [second, first, None]
    assert [each.get("name") for each in plain[1:]] == ["b", "a", "c"]


def test_options_become_sampling_parameters():
    options = Options(
        temperature=0.5, top_k=7, seed=3, stop=["x"], num_predict=9, repeat_penalty=1.1
    )
    params = read_params(OllamaChatBody(options=options, format="json"))
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 7, 3, 9)
    assert (params.stop, params.repetition_penalty) == (("x",), 1.1)
    assert params.json_schema == {"type": "object"}
    assert read_params(OllamaGenerateBody(options=Options(num_predict=-1))).max_tokens is None
    with pytest.raises(InvalidRequest, match="stop"):
        read_params(OllamaChatBody(options=Options(stop=[""] * 2)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        (None, {}),
        ("{a", "{a"),
        ([1], "[1]"),
        (7, "7"),
    ],
)
def test_arguments_of_earlier_calls_may_be_a_text(given, expected):
    call = Call(function=FunctionCall(name="f", arguments=given))
    [message] = plain_messages([ChatMessage(role="assistant", tool_calls=[call])])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}

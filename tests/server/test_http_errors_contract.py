"""Promises of docs/http.md about requests that are wrong."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from support.bounds import BAD, OVER_HTTP
from support.plain_http import Answer, get, metrics, opened, payloads, post
from support.server_process import running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEY, OTHER = "s3cret", "an0ther"
AUTH = {"Authorization": f"Bearer {KEY}"}
OPTIONS = ["--kv-tokens", "4096", "--max-model-len", "512", "--threads", "1"]
OPTIONS += ["--api-key", KEY, "--api-key", OTHER, "--max-running", "1", "--max-queued", "1"]
MESSAGES = [{"role": "user", "content": "hi"}]
VALID = {
    CHAT: {"messages": MESSAGES, "max_tokens": 2},
    TEXT: {"prompt": "import", "max_tokens": 2},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
STRICT = {"name": "x", "strict": True, "schema": {"type": "y"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

BAD_IN_BOTH = {field: BAD[field][0] for field in sorted(OVER_HTTP)}
BAD_IN_BOTH |= {"stream": "yes", "stream_options": 3, "deadline_ms": -1}
BAD_IN_ONE = [
    (CHAT, "messages", [[], "hi", None, [3], [{"role": "nobody", "content": "x"}]]),
    (CHAT, "top_logprobs", [-1, 21, "x"]),
    (CHAT, "logprobs", ["x"]),
    (CHAT, "max_tokens", [0]),
    (CHAT, "max_completion_tokens", [0, "x"]),
    (CHAT, "prediction", ["x", [1], {}, {"type": "content"}, {"type": "x", "content": "x"}]),
    (TEXT, "prediction", [[1], 3, {}, {"type": "content", "content": [{"type": "image_url"}]}]),
    (TEXT, "prompt", [None, "", 3, {"a": 1}, [[]], [10**9], [-1], ["a", 3]]),
    (TEXT, "logprobs", [-1, 10**6, "x"]),
]
BAD_FORMS = [
    (CHAT, "tools", [{"type": "function"}]),
    (CHAT, "tool_choice", "required"),
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    (
        CHAT,
        "response_format",
        {**SCHEMA, "json_schema": STRICT},
    ),
    (CHAT, "messages", [{"role": "user", "content": [IMAGE]}]),
    *(
        (path, field, value)
        for path in VALID
        for field, value in [("regex", "a("), ("grammar", "x"), ("choice", []), ("choice", [1])]
    ),
]
TOOL = {"type": "function", "function": {"name": "f"}}
OTHER_TOOL = {"type": "function", "function": {"name": "g"}}
PIECE = {"type": "text", "text": "x"}
EXACT: list[tuple[str, dict[str, Any], str]] = [  # a body's fields, and the path that is named
    *(
        (path, fields, param)
        for path in VALID
        for fields, param in [
            ({"n": 99}, "n"),
            ({"stop": ["a" * 100] * 200}, "stop"),
            ({"stop": [""]}, "stop[0]"),
            ({"logit_bias": {"7": 101}}, "logit_bias"),
            ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
            ({"regex": "a("}, "regex"),
            ({"grammar": "start: missing"}, "grammar"),
            ({"guided_json": {}, "structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
            *(({f"guided_{form}": "x("}, f"guided_{form}") for form in ("json", "regex", "choice")),
            ({"guided_grammar": "x"}, "guided_grammar"),
            ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
            ({"stop_regex": "x"}, "stop_regex"),
            ({"typical_p": 0.5}, "typical_p"),
            ({"prompt_logprobs": 1}, "prompt_logprobs"),
            ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
            ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ]
    ),
    *(
        (CHAT, fields, param)
        for fields, param in [
            ({"top_logprobs": 2}, "top_logprobs"),  # without logprobs
            ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [TOOL], "tool_choice": OTHER_TOOL}, "tool_choice"),
            ({"response_format": {"type": "xml"}}, "response_format.type"),
            ({"response_format": {"type": "json_schema"}}, "response_format"),
            ({"prediction": {"content": "x"}}, "prediction.type"),
            ({"prediction": {"type": "tokens", "content": "x"}}, "prediction.type"),
            ({"prediction": {"type": "content"}}, "prediction.content"),
            ({"prediction": {"type": "content", "content": 3}}, "prediction.content"),
            (
                {"prediction": {"type": "content", "content": [{"type": "text"}]}},
                "prediction.content[0].text",
            ),
            (
                {"prediction": {"type": "content", "content": [PIECE, {**PIECE, "type": "image"}]}},
                "prediction.content[1].type",
            ),
            ({"prediction": {"type": "content", "content": "x" * 131_073}}, "prediction"),
            ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
            ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"content": "x"}]}, "messages[0].role"),
            (
                {"messages": [*MESSAGES, {"role": "user", "content": [PIECE, IMAGE]}]},
                "messages[1].content[1]",
            ),
            ({"functions": [{}]}, "functions"),
            ({"function_call": "auto"}, "function_call"),
            ({"chat_template": "x"}, "chat_template"),
            ({"audio": {"voice": "x"}}, "audio"),
            ({"guided_json": {"type": "x"}}, "guided_json"),
            ({"return_token_ids": 1}, "return_token_ids"),
            (
                {"messages": [*MESSAGES, {"role": "assistant", "content": "x", "token_ids": [0]}]},
                f"messages[{len(MESSAGES)}].token_ids",
            ),
        ]
    ),
    *(
        (TEXT, fields, param)
        for fields, param in [
            ({"prompt": []}, "prompt"),
            ({"prompt": ["a", 1]}, "prompt"),
            ({"prompt": [[1], "a"]}, "prompt"),
            ({"prompt": [1.5]}, "prompt[0]"),
            ({"prompt": ["a"] * 65}, "prompt"),
            ({"suffix": "x"}, "suffix"),
            ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
            ({"best_of": 3}, "best_of"),
            ({"logprobs": 21}, "logprobs"),
        ]
    ),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(OPTIONS) as server:
        yield server.url


def refused(url: str, path: str, body: dict[str, Any]) -> Answer:
    """The answer of a route to a bad body, which the route that only renders has, too."""
    answer, rendered = (post(url, each, body, AUTH) for each in (path, f"{path}/render"))
    assert (rendered.status, rendered.json) == (answer.status, answer.json)
    return answer


@pytest.mark.parametrize("path", VALID)
def test_a_bad_field_is_400_and_named(url: str, path: str) -> None:
    wrong = {}
    bad = list(BAD_IN_BOTH.items())
    bad += [(field, each) for of, field, values in BAD_IN_ONE if of == path for each in values]
    for field, value in bad:
        extra = {"logprobs": True} if field == "top_logprobs" else {}
        answer = refused(url, path, {**VALID[path], **extra, field: value})
        if answer.status != 400:
            wrong[f"{field}: {value!r}"] = (answer.status, answer.content[:300])
        elif not str(answer.error["param"]).startswith(field):
            wrong[f"{field}: {value!r}"] = answer.error
    assert wrong == {}


@pytest.mark.parametrize("stream", [False, True])
def test_the_path_of_a_bad_field_is_named_and_nothing_is_submitted(url: str, stream: bool) -> None:
    before, wrong = metric(url, "prompt_tokens_total"), {}
    for path, fields, param in EXACT:
        answer = refused(url, path, {**VALID[path], "stream": stream, **fields})
        if (answer.status, answer.error["param"], answer.error["type"]) != (
            400, param, "invalid_request_error",
        ):  # fmt: skip
            wrong[f"{path} {str(fields)[:80]}"] = (answer.status, answer.error)
    assert wrong == {}
    assert metric(url, "prompt_tokens_total") == before


@pytest.mark.parametrize(("path", "field", "value"), BAD_FORMS)
def test_a_form_that_cannot_be_is_400_and_named(
    url: str, path: str, field: str, value: object
) -> None:
    answer = refused(url, path, {**VALID[path], field: value})
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"].startswith(field)


def test_a_bad_stream_request_is_a_plain_error_before_the_stream(url: str) -> None:
    for path, body in VALID.items():
        answer = post(url, path, {**body, "stream": True, "temperature": -1}, AUTH)
        assert (answer.status, answer.error["param"]) == (400, "temperature")
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", [CHAT, TEXT, f"{CHAT}/render", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"prompt": "\xff\xfe", "messages": "\xff"}',
        b'{"messages": NaN, "prompt": NaN, "tokens": NaN}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\ud800", "tokens": 1}',
        b"\xff\xfe",
        b'{"user": "\xff", "prompt": "x", "messages": [], "tokens": [-1]}',
        b'{"prompt": "x", "temperature": 1e999, "messages": [], "tokens": [1e999]}',
        b'{"prompt": 1, "messages": [], "tokens": 1, "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": 1, "messages": 1, "tools": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_a_malformed_body_is_400(url: str, path: str, body: bytes) -> None:
    answer = post(url, path, body, AUTH)
    assert answer.status == 400, answer.content[:300]
    assert answer.error["type"] == "invalid_request_error"
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": MESSAGES}, {"prompt": 5}])
def test_tokenize_wants_a_prompt_or_messages(url: str, body: dict[str, Any]) -> None:
    assert post(url, "/tokenize", body, AUTH).status == 400


def test_bad_tokens_cannot_be_detokenized(url: str) -> None:
    for tokens in ([10**9], [10**30], [-1], ["a"], None, 3):
        answer = post(url, "/detokenize", {"tokens": tokens}, AUTH)
        assert (answer.status, answer.error["param"][:6]) == (400, "tokens")


def test_a_prompt_beyond_the_context_says_so_in_the_words_that_clients_know(url: str) -> None:
    content = "x = 1\n" * 3000
    for path, body in VALID.items():
        field = {"messages": [{"role": "user", "content": content}], "prompt": content}
        for stream in (False, True):
            answer = refused(url, path, {**body, **field, "stream": stream})
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
            assert "This model's maximum context length is 51" in answer.error["message"]
            assert "prompt is too long: " in answer.error["message"]
    answer = refused(url, TEXT, {**VALID[TEXT], "prompt": [5] * 600})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


def test_an_answer_that_its_deadline_cuts_says_so(url: str) -> None:
    for path, body in VALID.items():
        late = {"max_tokens": 400, "ignore_eos": True, "deadline_ms": 50}
        answer = post(url, path, {**body, **late}, AUTH)
        if answer.status == 200:
            assert answer.json["usage"]["completion_tokens"] < 400
            assert answer.json["choices"][0]["stop_reason"] == "deadline"
        else:
            assert (answer.status, bool(answer.error)) == (503, True)


def test_flushing_a_misspelt_salt_does_not_flush_all(url: str) -> None:
    def cached() -> int:
        body = {"prompt": "x = 1\n" * 30, "max_tokens": 1}
        usage = post(url, TEXT, body, AUTH).json["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    post(url, "/cache/flush", {"salt": "tenant"}, AUTH)
    assert cached() > 0


def test_a_key_is_asked_for_and_never_shown(url: str) -> None:
    given = [{}, {"Authorization": "Bearer wr0ng"}, {"Authorization": KEY}, {"x-api-key": "wr0ng"}]
    for headers in given:
        answer = post(url, TEXT, VALID[TEXT], headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert b"wr0ng" not in answer.content
        assert KEY.encode() not in answer.content
        assert get(url, "/v1/models", headers).status == 401
        assert get(url, "/metrics", headers).status == 401
    assert get(url, "/health").status == 200


def test_every_key_opens_by_either_header(url: str) -> None:
    for key in (KEY, OTHER):
        for headers in (
            {"Authorization": f"Bearer {key}"},
            {"authorization": f"bearer {key}"},
            {"X-Api-Key": key},
        ):
            assert post(url, TEXT, VALID[TEXT], headers).status == 200


def test_an_unknown_model_or_route_is_404_in_json(url: str) -> None:
    for path, body in VALID.items():
        answer = refused(url, path, {**body, "model": "nobody/knows"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert answer.error["param"] == "model"
    assert get(url, "/v1/models/nobody/knows", AUTH).error["code"] == "model_not_found"
    for path in ("/v1", "/v1/images", "/nope", "/v1/completions/x", "/%ff", f"{CHAT}/"):
        answer = post(url, path, {}, AUTH)
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert "the base URL of an OpenAI client ends in /v1" in answer.error["message"]
    assert get(url, "/health/", AUTH).status == 404


def test_a_wrong_method_is_405_and_allow_says_the_right_one(url: str) -> None:
    for path in (CHAT, TEXT, "/tokenize", "/detokenize", "/cache/flush"):
        answer = get(url, path, AUTH)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["message"] == "this route only accepts POST"
    for path in ("/", "/v1/models", "/version", "/health"):
        assert post(url, path, {}, AUTH).status == 405


def test_a_body_too_large_is_413_before_it_is_read(url: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.putrequest("POST", TEXT)
        for name, value in {**AUTH, "Content-Length": str(2**40)}.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 413
        assert json.loads(response.read())["error"]["message"]
    finally:
        connection.close()


def test_the_official_client_raises_its_own_errors(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="foretoken-builtin", messages=[])
        assert caught.value.param == "messages"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nobody", prompt="x")
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wr0ng").models.list()


def metric(url: str, name: str) -> float:
    lines = metrics(url, AUTH).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"foretoken:{name} "))


def test_a_full_queue_is_429_and_leaving_frees_the_places(url: str) -> None:
    before = metric(url, "generation_tokens_total")
    endless = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "stream": True}
    with opened(url, "POST", TEXT, endless, AUTH) as first:
        events = payloads(first)
        while not json.loads(next(events))["choices"][0]["text"]:
            pass
        with opened(url, "POST", TEXT, {**endless, "prompt": "y"}, AUTH):
            while metric(url, "num_requests_waiting") < 1:
                assert metric(url, "num_requests_running") == 1
            answer = post(url, TEXT, VALID[TEXT], AUTH)
            assert (answer.status, bool(answer.error)) == (429, True)
            assert float(answer.headers["retry-after"]) > 0
    while metric(url, "num_requests_running") + metric(url, "num_requests_waiting"):
        pass
    assert metric(url, "generation_tokens_total") - before < 480
    assert post(url, TEXT, VALID[TEXT], AUTH).status == 200

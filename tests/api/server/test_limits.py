"""Every limit is a flag and is named in its error; bodies that are made to break things."""

from __future__ import annotations

import socket
import time
from dataclasses import fields
from pathlib import Path

import httpx
import pytest

import foretoken
from foretoken import InvalidRequest
from foretoken.api.cli import commands
from foretoken.api.serving.json_depth import find_excess
from foretoken.api.serving.limits import Limits
from support.given import listening

SECONDS = 20
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
DEFAULTS = {
    "max_connections": 1024, "max_header_bytes": 65536, "max_header_fields": 100,
    "header_seconds": 10, "body_seconds": 30, "idle_seconds": 75, "write_seconds": 30,
    "ping_seconds": 10, "resume_seconds": 0, "store_seconds": 3600, "max_request_seconds": 600,
    "max_body_bytes": 4 * 2**20,
    "max_bodies_bytes": 2**28,
    "max_file_bytes": 64 * 2**20,
    "max_files_bytes": 2**30,
    "max_files": 10_000, "max_batches": 1_000, "file_seconds": 30 * 24 * 3600,
    "max_json_depth": 64, "max_json_containers": 65536, "max_json_values": 524288,
    "max_messages": 10_000, "max_tools": 512, "max_prompts": 64, "max_n": 64,
    "max_stop_bytes": 16 * 2**10, "max_logit_bias": 1024, "max_top_logprobs": 20,
}  # fmt: skip


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        yield client


def error_of(answer):
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    assert {"message"} < set(error)
    return error


# -- flags --------------------------------------------------------------------------------------


def test_every_limit_has_its_default_and_a_flag_that_changes_it():
    assert {each.name: each.default for each in fields(Limits)} == DEFAULTS
    assert listening().settings.limits == Limits()
    for name, default in DEFAULTS.items():
        flag = f"--{name.replace('_', '-')}"
        other = max(1, default - 1)
        limits = listening(flag, str(other)).settings.limits
        assert getattr(limits, name) == other != default
    size = listening("--max-body-bytes", "1MiB").settings.limits.max_body_bytes
    assert size == 2**20


def test_every_limit_stands_in_the_documentation_with_its_default():
    page = Path(foretoken.__file__).parent.joinpath("docs/limits.md").read_text()
    shown = {
        "max_header_bytes": "64 KiB", "max_body_bytes": "4 MiB", "max_file_bytes": "64 MiB",
        "max_files_bytes": "1 GiB", "max_stop_bytes": "16 KiB", "max_bodies_bytes": "256 MiB",
    }  # fmt: skip
    for name, default in DEFAULTS.items():
        assert f"| `--{name.replace('_', '-')}` | {shown.get(name, default)} |" in page


@pytest.mark.parametrize(
    "args",
    [
        ["--max-n", "65"], ["--max-n", "0"], ["--max-stop-bytes", "65KiB"],
        ["--max-top-logprobs", "21"], ["--max-logit-bias", "1025"], ["--max-tools", "9999"],
        ["--header-seconds", "0"], ["--idle-seconds", "nan"], ["--max-json-depth", "1000"],
        ["--max-header-bytes", "1"], ["--admin-key", ""], ["--api-key", " k"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_limit_beyond_what_the_core_or_sense_allows_ends_the_start_with_one_line(args, capsys):
    try:
        code = commands.main(["serve", *args])
    except SystemExit as exited:
        code = exited.code
    assert code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert args[0].strip("-").replace("-", "_") in err.replace("-", "_")


# -- what a body may ask for --------------------------------------------------------------------

LOW = {
    "max_messages": 2, "max_tools": 1, "max_prompts": 2, "max_n": 2,
    "max_stop_bytes": 3, "max_logit_bias": 1, "max_top_logprobs": 1,
}  # fmt: skip
TALK = [{"role": "user", "content": "hi"}] * 3
TOOL = {"type": "function", "function": {"name": "f"}}
BEYOND = [
    ("/v1/chat/completions", {"messages": TALK}, "messages", "max_messages"),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL] * 2}, "tools", "max_tools"),
    ("/v1/chat/completions", {**CHAT, "n": 3}, "n", "max_n"),
    ("/v1/chat/completions", {**CHAT, "stop": ["ab", "cd"]}, "stop", "max_stop_bytes"),
    ("/v1/chat/completions", {**CHAT, "stop": "abcd"}, "stop", "max_stop_bytes"),
    ("/v1/chat/completions", {**CHAT, "stop": ["éé"]}, "stop", "max_stop_bytes"),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {"1": 1, "2": 1}}, "logit_bias",
     "max_logit_bias"),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, "top_logprobs",
     "max_top_logprobs"),
    ("/v1/completions", {"prompt": ["a"] * 3}, "prompt", "max_prompts"),
    ("/v1/completions", {"prompt": [[5]] * 3}, "prompt", "max_prompts"),
    ("/v1/completions", {"prompt": "a", "logprobs": 2}, "logprobs", "max_top_logprobs"),
    ("/v1/responses", {"input": TALK}, "input", "max_messages"),
    ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "f"}] * 2}, "tools",
     "max_tools"),
    ("/tokenize", {"messages": TALK}, "messages", "max_messages"),
]  # fmt: skip


def test_what_is_beyond_a_limit_is_a_400_that_names_field_limit_and_value(serve, engine):
    with httpx.Client(base_url=serve(**LOW).url, timeout=SECONDS) as http:
        for path, body, param, limit in BEYOND:
            error = error_of(http.post(path, json=body))
            assert error["param"] == param
            assert f"limit of {LOW[limit]} (--{limit.replace('_', '-')})" in error["message"]
        body = {**CHAT, "messages": TALK[:1], "stop_sequences": ["ab", "cd"]}
        answer = http.post("/v1/messages", json=body)
        assert answer.status_code == 400
        assert "stop_sequences: 4 exceeds" in answer.json()["error"]["message"]
        assert not engine.requests
        within = {**CHAT, "n": 2, "stop": ["abc"], "logit_bias": {"1": 1}, "tools": []}
        assert http.post("/v1/chat/completions", json=within).status_code == 200
        prompt = {"prompt": [5] * 10, "max_tokens": 1}  # one prompt, however long
        assert http.post("/v1/completions", json=prompt).status_code == 200


def test_a_body_over_its_limit_says_which(serve):
    server = serve(max_body_bytes=100)
    answer = httpx.post(f"{server.url}/v1/completions", content=b" " * 101)
    assert answer.status_code == 413
    assert "100 (--max-body-bytes)" in answer.json()["error"]["message"]


def test_bodies_that_arrive_together_have_a_limit_and_those_that_came_make_room(serve):
    server = serve(max_bodies_bytes=3000)
    url = f"{server.url}/v1/completions"
    with begun(server, 2000) as held:
        with begun(server, 2000) as refused:
            answer = refused.recv(2**16).decode()
        assert answer.startswith("HTTP/1.1 503 ")
        assert "retry-after: 1" in answer
        assert "3000 (--max-bodies-bytes)" in answer
        assert httpx.post(url, content=b"[" * 1500).status_code == 503
        held.sendall(b"[" * 500)
        assert held.recv(2**16).startswith(b"HTTP/1.1 400 ")
        assert httpx.post(url, content=b"[" * 2500).status_code == 400


def begun(server, num_bytes):
    """A connection with a body of which 500 bytes are missing; the server has read the others."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
    length = f"content-length: {num_bytes + 500}"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\n{length}\r\n\r\n"
    connection.sendall(head.encode() + b"[" * num_bytes)
    httpx.get(f"{server.url}/health")  # turns of the loop
    return connection


# -- depth --------------------------------------------------------------------------------------


def is_deeper(data, depth):
    return find_excess(data, depth=depth, containers=2**31, values=2**31) == "max_json_depth"


def nested(depth, kind="[]"):
    return (kind[0] * depth if kind == "[]" else '{"a":' * depth) + "1" + kind[1] * depth


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("1", 0), ('"[[["', 0), ("[]", 1), ("{}", 1), (nested(5), 5), (nested(7, "{}"), 7),
        (r'["\"[[[[", "\\", [[1]]]', 3), (r'["\\\"[[", "[\\", {}]', 2), ("[[],[],[[]]]", 3),
        ('["", "", ["", "[", "]"], "{{{{"]', 2), ("[" + "[]," * 100 + "[[]]]", 3),
        ("[" + '"[",["]"],' * 50_000 + "[[[1]]]]", 4), ('{"é[[":"東["}', 1),
    ],
    ids=range(13),
)  # fmt: skip
def test_depth_is_counted_outside_texts(text, depth):
    data = text.encode()
    assert not is_deeper(data, depth)
    assert depth == 0 or is_deeper(data, depth - 1)


def test_depth_of_a_large_body_takes_a_moment():
    bodies = (
        b'["["],' * 700_000,
        b"[]," * 1_400_000,
        b'"\\\\\\"[",' * 600_000,
        b'{"a":"b"},' * 400_000,
    )
    for data in bodies:
        began = time.thread_time()
        assert not is_deeper(b"[" + data, 64)
        assert time.thread_time() - began < 0.5  # about 0.03


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_a_body_that_is_nested_beyond_the_limit_is_refused_wherever_it_is(http, path):
    for depth, extra in ((65, ""), (100_000, ""), (65, "x" * 2**19)):
        body = f'{{"extra": "{extra}", "user": {nested(depth)}}}'
        error = error_of(http.post(path, content=body))
        assert "limit of 64 (--max-json-depth)" in error["message"]


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("[[1],[2]]", 3), ('{"a":{},"b":[]}', 3), ('["[[[{{{", []]', 2), (r'["\"[[[["]', 1),
        ("[" + '"[",{},' * 50_000 + "1]", 50_001),
    ],
    ids=range(5),
)  # fmt: skip
def test_containers_are_counted_outside_texts(text, num):
    bounds = {"depth": 9, "values": 2**31}
    assert find_excess(text.encode(), containers=num, **bounds) is None
    assert find_excess(text.encode(), containers=num - 1, **bounds) == "max_json_containers"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/cache/flush"])
def test_a_body_of_too_many_containers_is_refused_wherever_they_are(http, path):
    for value in ("[" + "[1]," * 65_536 + "1]", "[" + '{"a":{}},' * 32_768 + "1]"):
        answer = http.post(path, content=f'{{"user": {value}}}')
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "limit of 65536 (--max-json-containers)" in message
    within = '{"user": [' + '"[{",' * 100_000 + "1]}"  # of a text, as in any program
    assert "--max-json-containers" not in http.post(path, content=within).text


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("[1,2,3]", 3), ('{"a":1,"b":[2,3]}', 4), ('["a,b,c",",","","\\",",1]', 5),
        ('{"a,":"b,","c":","}', 2), ("[" + '",",' * 100_000 + "1]", 100_001),
    ],
    ids=range(5),
)  # fmt: skip
def test_values_are_counted_by_the_commas_outside_texts(text, num):
    bounds = {"depth": 9, "containers": 2**31}
    assert find_excess(text.encode(), values=num, **bounds) is None
    assert find_excess(text.encode(), values=num - 1, **bounds) == "max_json_values"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/detokenize"])
def test_a_body_of_too_many_values_is_refused_wherever_they_are(http, path):
    """Decoding two million token ids, or words, would hold everybody for a tenth of a second."""
    for field, value in (("prompt", "1,"), ("bad_words", '"a",'), ("tokens", "7,")):
        body = f'{{"{field}": [{value * 524_288}{value[:-1]}]}}'
        message = error_of(http.post(path, content=body))["message"]
        assert "more values than the limit of 524288 (--max-json-values)" in message
    within = f'{{"user": "{"a, b, " * 300_000}"}}'  # of a text
    assert "--max-json-values" not in http.post(path, content=within).text


# -- bodies made to break things ----------------------------------------------------------------

HOSTILE = [
    "NaN", "Infinity", "1e999", "9" * 5000, "1" + "0" * 30, "1e-999", '"\\ud800"', '"\\u0000"',
    "[" * 60 + "]" * 60, "{" * 3, '{"a":1,"a":2}', "[null]", "-0", '[{"a":' + "9" * 30 + "}]",
    '{"a":' + "9" * 30 + "}", '{"type":"object","properties":{"x":{"const":' + "9" * 30 + "}}}",
]  # fmt: skip
FIELDS = [
    "model", "stream", "stream_options", "n", "temperature", "stop", "seed", "logit_bias",
    "max_tokens", "stop_token_ids", "allowed_token_ids", "bad_words", "speculation", "cache_salt",
    "priority", "deadline_ms", "regex", "grammar", "choice", "json_schema", "structured_outputs",
    "cache", "prompt_cache_key", "prompt_cache_options", "prediction", "logprobs", "metadata",
    "response_format", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort",
    "messages", "prompt", "input", "unknown",
]  # fmt: skip
BASES = {
    "/v1/chat/completions": '"messages":[{"role":"user","content":"hi"}],"max_tokens":1',
    "/v1/completions": '"prompt":"hi","max_tokens":1',
    "/v1/responses": '"input":"hi","max_output_tokens":1',
    "/v1/messages": '"messages":[{"role":"user","content":"hi"}],"max_tokens":1',
}


OF_EACH = ("messages", "prompt", "input", "tools", "metadata", "chat_template_kwargs")


@pytest.mark.parametrize("path", BASES)
def test_no_value_of_any_field_is_more_than_a_400(http, path):
    for field in FIELDS if "chat" in path else OF_EACH:
        for value in HOSTILE:
            body = f'{{{BASES[path]},"{field}":{value}}}'.encode("utf-8", "surrogatepass")
            answer = http.post(path, content=body)
            if field == "deadline_ms" and answer.status_code == 503:
                assert answer.json()["error"]["code"] == "deadline_exceeded"
                continue
            assert answer.status_code in (200, 400, 404), (field, value[:50], answer.text[:200])


@pytest.mark.parametrize(
    "tool",
    [
        '{"name":"f","parameters":{"type":"object","properties":{"x":{"const":' + "9" * 30 + "}}}}",
        '{"name":"f","parameters":{"x":1e300}}', '{"name":"f","parameters":{"x":"\\u0000"}}',
        '{"name":"","parameters":{}}', '{"name":"f","parameters":' + '{"a":' * 55 + "1" + "}" * 56,
    ],
)  # fmt: skip
def test_odd_parameters_of_a_tool_are_no_500(http, tool):
    body = f'{{{BASES["/v1/chat/completions"]},"tools":[{{"type":"function","function":{tool}}}]}}'
    assert http.post("/v1/chat/completions", content=body).status_code in (200, 400)


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt":"x"}'.encode("utf-16"), b"\xef\xbb\xbf" * 2 + b'{"prompt":"x"}', b"\0",
        b'{"prompt":"x"}\0',
        b'{"prompt":"x"}{"prompt":"y"}', b'{"prompt":"\xed\xa0\x80"}', b"{'prompt':'x'}", b"//\n{}",
    ],
    ids=range(8),
)  # fmt: skip
def test_what_is_no_json_is_a_400(http, body):
    error_of(http.post("/v1/completions", content=body))


def test_an_error_repeats_no_more_of_a_body_than_a_line(http):
    for path, body in (
        ("/v1/completions", {"prompt": "x", "model": "m" * 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "r" * 100_000, "content": ""}]}),
        ("/v1/chat/completions", {**CHAT, "tool_choice": {"function": {"name": "f" * 100_000}}}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 2000


def test_the_last_of_two_fields_of_one_name_counts(http, engine):
    answer = http.post("/v1/completions", content=b'{"prompt":"x","max_tokens":9,"max_tokens":1}')
    assert answer.json()["usage"]["completion_tokens"] == 1


def test_limits_refuse_values_that_are_none():
    with pytest.raises(InvalidRequest, match="max_n must be at most 64") as info:
        Limits(max_n=65)
    assert info.value.param == "max_n"

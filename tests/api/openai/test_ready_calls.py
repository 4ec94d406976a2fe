"""The event ``tool_call.ready``: when it comes, what it has, and who gets it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

TALK = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("find", "read")
]
PATCH = {"type": "custom", "custom": {"name": "patch"}}
ASKED = {"include_ready_calls": True}


def call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


TWO_CALLS = "I look.\n" + call("find", text="a b") + "\n" + call("read", path="x")


@pytest.fixture
def events(serve, say):
    """Return the names and the bodies of the events of a stream."""
    server = serve(tool_parser="hermes")

    def stream(text: str, path: str = CHAT, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
        say(text)
        body = {"messages": TALK, "tools": TOOLS, **fields}
        answer = httpx.post(f"{server.url}{path}", json={**body, "stream": True}, timeout=20)
        answer.raise_for_status()
        found = []
        for event in answer.text.split("\n\n"):
            fields_of = dict(line.split(": ", 1) for line in event.splitlines())
            if fields_of and fields_of["data"] != "[DONE]":
                found.append((fields_of.get("event", ""), json.loads(fields_of["data"])))
        return found

    return stream


def test_each_call_is_told_once_when_it_is_complete(events) -> None:
    found = events(TWO_CALLS, stream_options=ASKED)
    names = [name for name, _ in found]
    ready = [body for name, body in found if name]
    assert names.count("tool_call.ready") == len(ready) == 2
    assert [each["tool_call"]["function"] for each in ready] == [
        {"name": "find", "arguments": '{"text": "a b"}'},
        {"name": "read", "arguments": '{"path": "x"}'},
    ]
    assert [each["tool_call"]["index"] for each in ready] == [0, 1]
    assert {each["choice"] for each in ready} == {0}
    first = names.index("tool_call.ready")
    later = [body["choices"][0]["delta"] for name, body in found[first:] if not name]
    assert any(each.get("tool_calls") for each in later), "the second call comes behind it"
    ids = {
        part["id"]
        for name, body in found
        if not name
        for part in body["choices"][0]["delta"].get("tool_calls", ())
        if "id" in part
    }
    assert ids == {each["tool_call"]["id"] for each in ready}


def test_streams_are_unchanged_unless_it_is_asked_for(events) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        assert {name for name, _ in events(TWO_CALLS, **options)} == {""}


def test_a_call_that_is_cut_is_not_ready(events) -> None:
    cut = call("find", text="a") + '\n<tool_call>\n{"name": "read", "argum'
    found = [body for name, body in events(cut, stream_options=ASKED) if name]
    assert [each["tool_call"]["function"]["name"] for each in found] == ["find"]


@pytest.mark.parametrize(
    "text",
    [
        TWO_CALLS,
        call("find", text='a "b" }') + call("read", path="</tool_call>"),
        '<tool_call>\n{"name": "find", "arguments": {bad}}\n</tool_call>\n'
        + call("read", path="x"),
        "<tool_call>\n{'name': 'find', 'arguments': {'text': 'a',}}\n</tool_call>",
        '<tool_call>\n{"name": "find"}\n</tool_call>\n<tool_call>\n{"name": "read", "argu',
        '<tool_call>\n{"arguments": {"path": "x"}, "name": "read"}\n</tool_call>',
        '<tool_call>\n{"name": "find", "arguments": "{\\"text\\": 1}"}\n</tool_call>',
    ],
)
def test_a_ready_call_is_whole_and_equal_to_what_was_streamed(events, text: str) -> None:
    streamed: dict[int, list[str]] = {}
    ready: dict[int, str] = {}
    for name, body in events(text, stream_options=ASKED):
        if name:
            one = body["tool_call"]
            assert one["index"] not in ready
            ready[one["index"]] = one["function"]["arguments"]
            assert ready[one["index"]] == "".join(streamed[one["index"]])
            assert isinstance(json.loads(ready[one["index"]]), dict)
            continue
        for part in body["choices"][0]["delta"].get("tool_calls", ()):
            assert part["index"] not in ready, "nothing of a call comes behind its event"
            streamed.setdefault(part["index"], []).append(part["function"].get("arguments", ""))
    wholes = {at for at, parts in streamed.items() if _is_whole("".join(parts))}
    assert set(ready) == wholes


def _is_whole(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def test_a_stream_that_ends_after_its_only_call_has_one_event(events) -> None:
    found = events(TWO_CALLS, stream_options=ASKED, parallel_tool_calls=False)
    assert [body["tool_call"]["function"]["name"] for name, body in found if name] == ["find"]
    assert found[-1][1]["choices"][0]["finish_reason"] == "tool_calls"


def test_choices_have_their_own(events) -> None:
    found = [body for name, body in events(TWO_CALLS, n=2, stream_options=ASKED) if name]
    assert sorted((each["choice"], each["tool_call"]["index"]) for each in found) == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip


def test_a_custom_tool_s_call_has_its_input(events) -> None:
    text = call("patch", input="*** Begin")
    found = [body for name, body in events(text, tools=[PATCH], stream_options=ASKED) if name]
    assert [each["tool_call"]["custom"] for each in found] == [
        {"name": "patch", "input": "*** Begin"}
    ]


@pytest.mark.parametrize(("path", "param"), [
    (CHAT, "stream_options.include_ready_calls"),
    ("/v1/responses", "stream_options.include_ready_calls"),
])  # fmt: skip
def test_a_bad_option_is_named(server, path: str, param: str) -> None:
    value: Any = 1 if path == CHAT else True
    body = {"messages": TALK, "stream_options": {"include_ready_calls": value}, "stream": True}
    if path != CHAT:
        body = {**body, "input": "hi"}
        del body["messages"]
    answer = httpx.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param

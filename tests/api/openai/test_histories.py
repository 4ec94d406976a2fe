"""Histories of chats as agents send them: what is not understood is left out, and named once."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import msgspec
import pytest

from foretoken import InvalidRequest
from foretoken.api.dialects.openai.bodies import Message
from foretoken.api.dialects.openai.reading import plain_messages
from foretoken.api.runtime.conversation import left_out
from foretoken.api.runtime.conversation.seen_images import UNSEEN

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(left_out, "_told", set())


def plain(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return plain_messages(msgspec.convert(list(messages), list[Message]))


def refused(*parts: dict[str, Any]) -> str | None:
    with pytest.raises(InvalidRequest) as info:
        content(*parts)
    return info.value.param


def content(*parts: dict[str, Any], role: str = "user") -> str:
    return str(plain({"role": role, "content": list(parts)})[0]["content"])


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
def test_parts_of_unknown_types_are_left_out_and_named_once_in_the_log(role, caplog):
    parts = [{"type": "text", "text": "a"}, {"type": "odd", "odd": {"x": [1]}}]
    assert content(*parts, role=role) == content(*parts, role=role) == "a"
    assert [each.message for each in caplog.records] == [
        "parts of type 'odd' are not passed to the model (logged once)"
    ]


def test_texts_of_other_apis_parts_are_read():
    assert (
        content({"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}) == "a\nb"
    )


def test_files_of_text_are_read():
    data = "data:text/markdown;base64," + base64.b64encode("# Tïtle".encode()).decode()
    text = {"type": "file", "file": {"file_data": data, "filename": "a.md"}}
    assert content(text) == "File: a.md\n# Tïtle"
    assert content({"type": "file", "file": {"file_data": "data:,a%20b"}}) == "a b"


@pytest.mark.parametrize(
    "file",
    [
        {"file_data": "data:application/pdf;base64,AA", "filename": "b.pdf"},
        {"file_data": "data:text/plain;base64,////", "filename": "b.pdf"},
        {"file_id": "file_1", "filename": "b.pdf"},
    ],
)
def test_other_files_are_refused_from_the_user_and_named_in_results(file):
    part = {"type": "file", "file": file}
    assert refused(part) == "messages[0].content[0]"
    assert content(part, role="tool") == "[a file that this model cannot read: b.pdf]"


def test_calls_of_other_forms_are_calls():
    custom = {"id": "c1", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    flat = {"id": "c2", "name": "g", "arguments": '{"a": 1}'}
    later = {"id": "c3", "type": "browser", "browser": {"action": "open", "url": "x"}}
    [message] = plain({"role": "assistant", "tool_calls": [custom, flat, later]})
    functions = [(each["id"], each["function"]) for each in message["tool_calls"]]
    assert functions == [
        ("c1", {"name": "sh", "arguments": {"input": "ls"}}),
        ("c2", {"name": "g", "arguments": {"a": 1}}),
        ("c3", {"name": "browser", "arguments": {"action": "open", "url": "x"}}),
    ]


def test_a_function_call_of_the_older_form_is_a_call():
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    first, second = plain(old, {"role": "function", "name": "f", "content": "x"})
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert second == {"role": "tool", "name": "f", "content": "x"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (" ", {}), (None, {}), ("null", {}),
        ("[1]", "[1]"), ([1], "[1]"), ("7", "7"), (7, "7"), ('"x"', '"x"'), ('{"a": ', '{"a": '),
        ("[" * 100_000, "[" * 100_000),
    ],
)  # fmt: skip
def test_arguments_are_an_object_or_the_text_of_what_is_none(given, expected):
    call = {"id": "c1", "function": {"name": "f", "arguments": given}}
    [message] = plain({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_an_image_in_a_result_is_a_text_for_a_model_without_images(server, engine, tokenizer):
    result = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": "shot"}, IMAGE],
    }
    body = {"messages": [USER, CALLED, result], "max_tokens": 1}
    with httpx.Client(base_url=server.url, timeout=20) as http:
        http.post("/v1/chat/completions", json=body).raise_for_status()
        request = engine.requests[-1]
        text = tokenizer.decode(request.tokens[: request.prompt_len], skip_special_tokens=False)
        assert f"shot\n{UNSEEN}" in text
        body["messages"].append({"role": "user", "content": [IMAGE]})
        refused = http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[3].content[0]"


def test_a_sound_of_the_user_is_refused_and_named_and_one_of_an_answer_left_out(server):
    sound = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
    said = {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    with httpx.Client(base_url=server.url, timeout=20) as http:
        for talk, status in (
            ([USER, said, USER], 200),
            ([{"role": "user", "content": [sound]}], 400),
        ):
            answer = http.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 1})
            assert answer.status_code == status
    assert answer.json()["error"]["param"] == "messages[0].content[0]"
    assert "input_audio" in answer.json()["error"]["message"]


def test_tools_of_other_types_than_functions_are_left_out(server, engine, caplog):
    tools = [{"type": "web_search"}, {"type": "of_the_future"}]
    body = {"messages": [USER], "tools": tools, "max_tokens": 1}
    with httpx.Client(base_url=server.url, timeout=20) as http:
        http.post("/v1/chat/completions", json=body).raise_for_status()
        refused = http.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
    assert refused.json()["error"]["param"] == "tool_choice"
    assert "tools of type 'web_search'" in caplog.text


def test_an_image_in_an_answer_is_a_text_for_a_model_without_images(server, engine, tokenizer):
    said = {"role": "assistant", "content": [{"type": "text", "text": "see"}, IMAGE]}
    body = {"messages": [USER, said, USER], "max_tokens": 1}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20).raise_for_status()
    request = engine.requests[-1]
    prompt = tokenizer.decode(request.tokens[: request.prompt_len], skip_special_tokens=False)
    assert f"see\n{UNSEEN}" in prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "of_the_future", "function": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "of_the_future", "text": 5}]}]},
        {"messages": [{"role": "tool", "content": [{"type": "of_the_future", "file": 5}]}]},
    ],
)
def test_an_entry_of_an_unknown_kind_may_have_fields_of_any_form(server, fields):
    body = {"messages": [USER], "max_tokens": 1, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"id": [1], "function": {"name": {"a": 1}, "arguments": [[]]}},
        {"id": 7, "function": {}},
        {"id": None, "function": None, "type": None},
        {"id": {"a": 1}, "type": "custom", "custom": "x"},
        {"type": ["x"], "function": "f"},
    ],
)
@pytest.mark.parametrize("answered", [True, False])
def test_calls_of_any_shape_end_no_session(server, call, answered):
    talk = [USER, {"role": "assistant", "tool_calls": [call, call]}]
    talk += [{"role": "tool", "content": "x"}, USER] if answered else [USER]
    body = {"messages": talk, "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20)
    assert answer.status_code == 200, answer.text

"""Content blocks and tools as agents send them: what is understood is used, the rest left out."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from foretoken.api.dialects.anthropic.bodies import CountRequest
from foretoken.api.dialects.anthropic.reading import read_conversation
from foretoken.api.runtime.conversation import left_out
from foretoken.api.runtime.conversation.seen_images import UNSEEN

USER = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}
NO_FIELDS = {"type": "object", "properties": {}}
FETCH = {"name": "WebFetch", "description": "Fetches.", "input_schema": NO_FIELDS}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
FOUND = {"type": "tool_reference", "tool_name": "WebFetch"}


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(left_out, "_told", set())


def read(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    body = msgspec.convert({"messages": list(messages), **fields}, CountRequest)
    return [dict(message) for message in read_conversation(body).messages]


def said(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return read(USER, {"role": "assistant", "content": list(blocks)}, USER)[1:-1]


def asked(*blocks: dict[str, Any]) -> str:
    return str(read({"role": "user", "content": list(blocks)})[0]["content"])


def resulted(*blocks: dict[str, Any]) -> str:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": list(blocks)}
    called = {"role": "assistant", "content": [USE]}
    return str(read(USER, called, {"role": "user", "content": [result]})[2]["content"])


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


ODD = [
    {"type": "container_upload", "file_id": "f"},
    {"type": "of_the_future", "content": {"a": [1]}, "text": 5, "source": []},
    {"type": "of_the_future_tool_result", "tool_use_id": 5, "is_error": "x"},
]


@pytest.mark.parametrize("block", ODD)
def test_blocks_of_unknown_types_are_left_out_and_named_once(block, caplog):
    assert asked(text("a"), block, block) == "a"
    assert resulted(text("a"), block) == "a"
    assert said(block, text("a"), block) == [{"role": "assistant", "content": "a"}]
    assert len(caplog.records) == 1
    assert block["type"] in caplog.text


@pytest.mark.parametrize(
    "block",
    [
        {"type": "thinking", "thinking": "hm"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
    ],
)
def test_blocks_that_no_result_has_are_left_out_of_results(block, caplog):
    assert resulted(text("a"), block) == "a"
    assert block["type"] in caplog.text


@pytest.mark.parametrize("block", [IMAGE, {"type": "document", "source": {}}, FOUND])
def test_blocks_that_no_answer_has_are_left_out_of_answers(block, caplog):
    assert said(text("a"), block) == [{"role": "assistant", "content": "a"}]
    assert block["type"] in caplog.text


def test_an_image_of_a_result_that_is_not_sent_along_is_a_text():
    image = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    assert resulted(image) == UNSEEN


def test_system_blocks_of_other_types_are_left_out(post, caplog):
    odd = {"type": "of_the_future", "text": 5}
    assert post(system=[text("a"), odd], messages=[USER]).status_code == 200
    assert "system blocks of type 'of_the_future'" in caplog.text
    body = msgspec.convert({"system": [{"type": "odd"}], "messages": [USER]}, CountRequest)
    assert [each["role"] for each in read_conversation(body).messages] == ["user"]
    refused = post(system=[text("a"), {"type": "text"}], messages=[USER])
    assert refused.status_code == 400
    assert "system[1]" in refused.json()["error"]["message"]


def test_a_tool_of_a_type_that_is_not_known_may_have_fields_of_any_form(post):
    tool = {"type": "of_the_future", "name": {"a": 1}, "input_schema": [1]}
    assert post(messages=[USER], tools=[tool]).status_code == 200
    refused = post(messages=[USER], tools=[{"name": 5, "input_schema": {}}])
    assert refused.status_code == 400
    assert "tools[0].name" in refused.json()["error"]["message"]


def test_a_message_of_a_result_and_an_unknown_block_is_the_result_alone():
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "x"}
    called = {"role": "assistant", "content": [USE]}
    talk = read(USER, called, {"role": "user", "content": [result, ODD[1]]})
    assert [each["role"] for each in talk] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "words"}, "Title\nwords"),
        ({"type": "content", "content": "words"}, "Title\nwords"),
        ({"type": "content", "content": [text("a"), text("b")]}, "Title\na\nb"),
        (
            {"type": "base64", "media_type": "text/plain", "data": base64.b64encode(b"x").decode()},
            "Title\nx",
        ),
        (
            {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
            "[a file that this model cannot read: Title]",
        ),
        ({"type": "url", "url": "https://x/a.pdf"}, "[a file that this model cannot read: Title]"),
        ({"type": "file", "file_id": "f"}, "[a file that this model cannot read: Title]"),
        (None, "[a file that this model cannot read: Title]"),
    ],
)
def test_documents_are_read_or_named(source, expected):
    block = {"type": "document", "title": "Title", "source": source}
    assert asked(block) == expected
    assert resulted(block) == expected


def test_search_results_are_read():
    block = {"type": "search_result", "source": "https://x", "title": "T", "content": [text("a")]}
    assert asked(block) == resulted(block) == "T https://x\na"


def test_images_of_results_and_of_questions(post, engine, tokenizer):
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("shot"), IMAGE]}
    talk = [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    assert post(messages=talk).status_code == 200
    request = engine.requests[-1]
    prompt = tokenizer.decode(request.tokens[: request.prompt_len], skip_special_tokens=False)
    assert f"shot\n{UNSEEN}" in prompt
    refused = post(messages=[{"role": "user", "content": [IMAGE]}])
    assert refused.status_code == 400
    assert "messages[0].content[0]: the model does not support images" in refused.text


def test_calls_that_a_provider_ran_are_calls_with_their_results():
    search = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}}
    hit = {"type": "web_search_result", "url": "https://x", "title": "T", "encrypted_content": "e"}
    found = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [hit]}
    first, result, last = said(text("I look."), search, found, text("Found."))
    assert first["content"] == "I look."
    assert first["tool_calls"][0]["function"] == {"name": "web_search", "arguments": {"query": "x"}}
    assert (result["role"], result["tool_call_id"], result["name"]) == ("tool", "s1", "web_search")
    assert result["content"] == '{"type":"web_search_result","url":"https://x","title":"T"}'
    assert last == {"role": "assistant", "content": "Found."}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([], ""),
        (None, ""),
        ([text("a"), text("b")], "a\nb"),
        ({"type": "code_execution_result", "stdout": "4", "encrypted_stdout": "x"}, None),
        ({"type": "web_search_tool_result_error", "error_code": "x"}, None),
    ],
)
@pytest.mark.parametrize("kind", ["mcp_tool_result", "bash_tool_result", "new_tool_result"])
def test_results_of_a_provider_are_text_whatever_they_are(content, expected, kind):
    use = {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {}}
    _, result = said(use, {"type": kind, "tool_use_id": "m", "content": content})
    if expected is None:
        shown = {name: each for name, each in content.items() if name != "encrypted_stdout"}
        expected = msgspec.json.encode(shown).decode()
    assert result["content"] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"__unparsedToolInput": {"raw": "{é", "len": 3}}, "{é"),
        ({"__unparsedToolInput": {"raw": "{a", "len": 9}}, None),
        ({"a": 1}, {"a": 1}), (None, {}), ("", {}), ("x", "x"), ([1], "[1]"),
        ({"INVALID_JSON": "{a"}, "{a"), ({"INVALID_JSON": "", "b": 1}, None),
    ],
)  # fmt: skip
def test_the_input_of_a_call_may_be_anything(given, expected):
    [message] = said({**USE, "input": given})
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments == (given if expected is None else expected)


def test_thoughts_are_read_and_hidden_ones_left_out():
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    [message] = said(thought, {"type": "redacted_thinking", "data": "x"}, text("a"))
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def test_a_wrong_field_of_a_known_block_is_named(post):
    for blocks, named in (
        ([{"type": "text", "text": 5}], "content[0]: Expected `str`, got `int`"),
        ([text("a"), {"type": "tool_use", "id": "t"}], "content[1]: Object missing required field"),
        ([5], "content[0]: Expected `object`, got `int`"),
        ([{"text": "a"}], "content[0]"),
    ):
        answer = post(messages=[{"role": "assistant", "content": blocks}])
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"]
        assert "messages[0]" in answer.json()["error"]["message"]


# -- tools --------------------------------------------------------------------------------------


def search(*found: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation in which a search for tools has found some."""
    call = {**USE, "name": "ToolSearch", "input": {"query": "web"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": list(found)}
    return [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def chat(*messages: dict[str, Any], **fields: Any):
    return read_conversation(msgspec.convert({"messages": list(messages), **fields}, CountRequest))


def test_a_found_tool_stands_where_it_was_found_and_can_be_called():
    own = {**FETCH, "name": "ToolSearch"}
    found = chat(*search(FOUND), tools=[own, {**FETCH, "defer_loading": True}])
    assert [tool.name for tool in found.shown_tools] == ["ToolSearch"]
    assert [tool.name for tool in found.callable_tools] == ["ToolSearch", "WebFetch"]
    assert found.messages[2]["content"] == (
        "These tools can be called now:\n"
        '{"name":"WebFetch","description":"Fetches.","parameters":{"type":"object","properties":{}}}'
    )


def test_the_prompt_before_a_search_stays_the_same():
    own = {**FETCH, "name": "ToolSearch"}
    before = chat(USER, tools=[own])
    after = chat(*search(FOUND), tools=[own, {**FETCH, "defer_loading": True}])
    assert after.messages[0] == before.messages[0]
    assert list(after.shown_tools) == list(before.shown_tools)


def test_a_tool_that_is_not_loaded_is_not_there():
    found = chat(USER, tools=[{**FETCH, "defer_loading": True}])
    assert not found.tools


def test_a_found_tool_of_which_nothing_is_known_is_named():
    found = chat(*search(FOUND), tools=[{**FETCH, "name": "ToolSearch"}])
    assert found.messages[2]["content"] == 'These tools can be called now:\n{"name":"WebFetch"}'


def test_tools_of_a_provider_are_left_out_and_named_once(caplog):
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124"}]
    assert not chat(USER, tools=[*tools, *tools]).tools
    assert len(caplog.records) == 2

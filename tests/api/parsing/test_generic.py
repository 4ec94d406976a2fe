"""The generic tool format: a conversation with tools as text, for templates without tools."""

from __future__ import annotations

import json

import pytest

from foretoken import InvalidRequest, SamplingParams
from foretoken.api.parsing.formats.generic import as_text, describe, needs_text
from foretoken.api.types.results import Tool, ToolChoice
from support.parse_harness import WEATHER, F, read, syntax

HI = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "1", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
BLOCK = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def written(*messages, tools=(), has_system_role=True):
    return as_text(list(messages), list(tools), has_system_role=has_system_role)


def test_a_conversation_without_tools_stays_as_it_is():
    assert not needs_text([SYSTEM, HI], [])
    assert needs_text([HI], [F])
    assert needs_text([HI, CALLED], [])
    assert needs_text([HI, RESULT], [])


def test_tools_are_described_by_plain_json():
    lines = describe([WEATHER, F]).splitlines()
    described = [
        json.loads(line) for line in lines if line.startswith('{"name": ') and "<" not in line
    ]
    assert described == [
        {"name": "get_weather", "parameters": dict(WEATHER.parameters or {})},
        {"name": "f", "parameters": {"type": "object"}},
    ]
    told = describe([Tool(name="f", description="Does it.")])
    assert '"description": "Does it."' in told


@pytest.mark.parametrize(
    ("messages", "has_system_role", "expected"),
    [
        ([HI], True, [("system", "{tools}"), ("user", "hi")]),
        ([SYSTEM, HI], True, [("system", "{tools}\n\nBe brief."), ("user", "hi")]),
        ([HI], False, [("user", "{tools}\n\nhi")]),
        ([], False, [("user", "{tools}")]),
    ],
)
def test_tools_stand_at_the_beginning(messages, has_system_role, expected):
    found = written(*messages, tools=[WEATHER], has_system_role=has_system_role)
    text = describe([WEATHER])
    assert [(each["role"], each["content"]) for each in found] == [
        (role, content.replace("{tools}", text)) for role, content in expected
    ]


def test_a_call_is_written_as_it_is_read():
    (message,) = written(CALLED)
    assert message == {"role": "assistant", "content": BLOCK}
    (message,) = written({**CALLED, "content": "One moment."})
    found = read(lambda: syntax("generic").parser(tools=[WEATHER]), message["content"])
    assert found.words.strip() == "One moment."
    assert found.calls == [("get_weather", '{"city": "Zürich"}', True)]


def test_arguments_that_are_no_json_are_shown_as_they_are():
    broken = {"function": {"name": "f", "arguments": '{"a": '}}
    (message,) = written({**CALLED, "tool_calls": [broken]})
    assert message["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": }\n</tool_call>'


def test_results_and_what_the_user_says_next_are_one_message():
    other = {**RESULT, "content": [{"type": "text", "text": "rain"}]}
    found = written(HI, CALLED, RESULT, other, {"role": "user", "content": "and?"}, HI)
    assert [each["role"] for each in found] == ["user", "assistant", "user", "user"]
    assert found[2]["content"] == (
        "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response>\nand?"
    )


def test_a_growing_conversation_keeps_its_beginning():
    messages = [SYSTEM, HI, CALLED, RESULT, {"role": "assistant", "content": "Sunny."}, HI]
    for count in (2, 3, 4, 5):
        whole = written(*messages, tools=[WEATHER])
        assert whole[:count] == written(*messages[:count], tools=[WEATHER])


def test_what_is_nested_too_deeply_is_refused():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="tools"):
        describe([Tool(name="f", parameters=deep)])
    with pytest.raises(InvalidRequest) as info:
        written({**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": deep}}]})
    assert info.value.param == "messages"


def test_forced_calls_have_a_grammar():
    grammar = syntax("generic").constrain(
        SamplingParams(), tools=[WEATHER], choice=ToolChoice(mode="required")
    )
    assert grammar is not None
    assert "<tool_call>" in grammar
    assert "get_weather" in grammar

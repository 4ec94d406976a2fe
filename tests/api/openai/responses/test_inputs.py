"""Input items, and the conversation that they amount to."""

from __future__ import annotations

import msgspec
import openai
import pytest

from foretoken.api.dialects.openai.reading import plain_messages
from foretoken.api.dialects.responses.bodies import Item
from foretoken.api.dialects.responses.items import read_items, thread_of, to_messages

USER = {"role": "user", "content": "hi"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}


def said(text):
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": [part]}


def thought(text):
    return {**THOUGHT, "content": [{"type": "reasoning_text", "text": text}]}


def call(number, arguments='{"a": 1}'):
    named = {"call_id": f"call_{number}", "name": f"f{number}", "id": f"fc_{number}"}
    return {"type": "function_call", **named, "arguments": arguments, "status": "completed"}


def result(number, output="5"):
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}


def plain(*items):
    given = msgspec.convert(list(items), list[Item])
    return plain_messages(to_messages(thread_of([], read_items(given, lambda item_id: None))))


def called(number, arguments):
    function = {"name": f"f{number}", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


@pytest.mark.parametrize(
    "item",
    [
        USER,
        {"type": "message", **USER},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "hi", "prompt_cache": 1}]},
    ],
)
def test_a_message_may_be_written_in_many_ways(item):
    assert plain(item) == [USER]


def test_what_a_model_wrote_at_one_go_is_one_message_again():
    messages = plain(USER, thought("hm"), said("ok"), call(1), call(2), result(1), result(2))
    assert messages == [
        USER,
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "hm",
            "tool_calls": [called(1, {"a": 1}), called(2, {"a": 1})],
        },
        {"role": "tool", "content": "5", "tool_call_id": "call_1"},
        {"role": "tool", "content": "5", "tool_call_id": "call_2"},
    ]


def test_calls_behind_a_result_are_a_message_of_their_own():
    roles = [m["role"] for m in plain(USER, call(1), result(1), call(2), result(2), said("done"))]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]


def test_a_thought_leads_to_what_comes_next_and_else_to_nothing():
    assert plain(USER, thought("hm"), call(1))[1]["reasoning_content"] == "hm"
    assert plain(USER, thought("a"), thought("b"), said("c"))[1]["reasoning_content"] == "a\nb"
    first, second = plain(said("a"), thought("hm"), call(1))
    assert "tool_calls" not in first
    assert second["reasoning_content"] == "hm"
    assert plain(USER, thought("hm"), USER) == [USER, USER]


def test_a_summary_stands_for_a_thought_that_is_not_told():
    short = {**THOUGHT, "summary": [{"type": "summary_text", "text": "short"}]}
    assert plain(short, said("a"))[0]["reasoning_content"] == "short"
    hidden = {**THOUGHT, "encrypted_content": "xyz"}
    assert "reasoning_content" not in plain(hidden, said("a"))[0]


def test_arguments_that_are_no_json_are_shown_as_they_are():
    [message] = plain(call(1, "{oops"))
    assert message["tool_calls"] == [called(1, "{oops")]


def test_outputs_and_refusals_are_text():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert plain(call(1), result(1, parts))[1]["content"] == "a\nb"
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert plain(refused)[0]["content"] == "no"


def test_custom_calls_of_other_models_are_calls_of_one_argument():
    custom = {"type": "custom_tool_call", "call_id": "call_1", "name": "f1", "input": "ls"}
    answer = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "x"}
    first, second = plain(custom, answer)
    assert first["tool_calls"] == [called(1, {"input": "ls"})]
    assert second["content"] == "x"


def test_developers_are_the_system():
    assert plain({"role": "developer", "content": "be brief"})[0]["role"] == "system"


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}


BAD = [
    ([{"type": "custom_tool_call", "call_id": "c", "input": "ls"}], "input[0].name"),
    ([{"type": "custom_tool_call", "name": "f1", "input": {"a": 1}}], "input[0].input"),
    ([USER, {"role": "user", "content": [IMAGE]}], "input[1].content[0]"),
    ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0]"),
    (
        [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}],
        "input[0].content[0]",
    ),
    (
        [{"role": "user", "content": [{"type": "input_audio", "audio_url": "x"}]}],
        "input[0].content[0]",
    ),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0]"),
    ([{"role": "user", "content": [{"type": "input_text", "text": 5}]}], "input[0].content[0]"),
    ([{"role": "user", "content": {"text": "x"}}], "input[0].content"),
    ([{"role": "critic", "content": "x"}], "input[0].role"),
    ([{"role": "assistant", "content": [IMAGE]}], "input[0].content[0]"),
    ([USER, {"type": "item_reference", "id": "msg_1"}], "input[1]"),
    ([USER, {"id": "msg_1"}], "input[1]"),
    ([{"role": "user"}], "input[0].content"),
    ([{"type": "message", "content": "hi"}], "input[0].role"),
    ([{"type": "function_call", "call_id": "c", "arguments": "{}"}], "input[0].name"),
]


def test_a_bad_item_is_400_and_named_by_its_path(client):
    for items, param in BAD:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny/model", input=items)
        assert caught.value.param == param


def test_a_role_that_is_none_is_400(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny/model", input=[{"role": "tool", "content": "x"}])
    assert caught.value.param.startswith("input[")


def test_instructions_come_first_and_effort_goes_to_the_template(client, prompt_of):
    client.responses.create(
        model="tiny/model", input=[USER], instructions="be brief", max_output_tokens=1
    )
    assert prompt_of().startswith("<|im_start|>system\nbe brief<|im_end|><|im_start|>user\nhi")


def test_an_answer_sent_back_is_rendered_as_the_model_wrote_it(client, say, prompt_of):
    tool = {"type": "function", "name": "f1", "parameters": {"type": "object"}}
    wrote = (
        '<think>\nHello\n</think>\nok<tool_call>{"name": "f1", "arguments": {"a": 1}}</tool_call>'
    )
    say(wrote)
    options = {"model": "tiny/model", "tools": [tool]}
    answer = client.responses.create(input=[USER], **options)
    asked = prompt_of()
    sent = [item.model_dump(exclude_none=True) for item in answer.output]
    back = result(1) | {"call_id": answer.output[-1].call_id}
    client.responses.create(input=[USER, *sent, back], **options)
    assert prompt_of().startswith(f"{asked}{wrote}<|im_end|>")


def test_allowed_tools_leave_the_prompt_as_it_is(client, say, prompt_of):
    tools = [
        {"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g")
    ]
    say("hello")
    client.responses.create(model="tiny/model", input="hi", tools=tools)
    free = prompt_of()
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
    }
    answer = client.responses.create(
        model="tiny/model", input="hi", tools=tools, tool_choice=allowed
    )
    assert prompt_of() == free
    assert answer.tool_choice.type == "allowed_tools"
    assert len(answer.tools) == 2


def test_thoughts_behind_each_other_are_one_however_many_they_are():
    said_then = plain(USER, thought(""), *[thought("a")] * 3, thought(""), said("b"))
    assert said_then[1]["reasoning_content"] == "a\na\na\n"

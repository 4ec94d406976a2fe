"""Custom tools over HTTP, as OpenAI's own client sends and reads them."""

from __future__ import annotations

import json

import openai
import pytest

from support.patches import PATCH_GRAMMAR

PATCH = {"name": "apply_patch", "description": "Edits files."}
GRAMMAR = {"syntax": "lark", "definition": PATCH_GRAMMAR}
CHAT_TOOL = {
    "type": "custom",
    "custom": {**PATCH, "format": {"type": "grammar", "grammar": GRAMMAR}},
}
FLAT_TOOL = {"type": "custom", **PATCH, "format": {"type": "grammar", **GRAMMAR}}
TALK = [{"role": "user", "content": "Delete a."}]
TEXT = '*** Begin Patch\n*** Delete File: "a"\n*** End Patch'
CALL = json.dumps({"name": "apply_patch", "arguments": {"input": TEXT}})
ANSWER = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.fixture
def client(connect):
    return connect(tool_parser="hermes", reasoning_parser="think")


def chat(client, **options):
    body = {"model": "tiny/model", "messages": TALK, "tools": [CHAT_TOOL], **options}
    return client.chat.completions.create(**body)


def test_a_call_of_a_custom_tool_has_its_input(client, say):
    say(ANSWER)
    [choice] = chat(client).choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "apply_patch", TEXT)


def test_an_input_is_streamed_in_parts(client, say):
    say(ANSWER)
    parts = [
        part.model_dump(exclude_none=True)
        for chunk in chat(client, stream=True)
        for choice in chunk.choices
        for part in choice.delta.tool_calls or ()
    ]
    first = parts[0]
    assert (first["type"], first["custom"]["name"]) == ("custom", "apply_patch")
    assert first["id"].startswith("call_")
    assert len(parts) > 3
    assert not any("id" in part or "name" in part["custom"] for part in parts[1:])
    assert "".join(part["custom"]["input"] for part in parts) == TEXT


@pytest.mark.parametrize(("text", "is_call"), [(TEXT, True), ("*** Begin", False)])
def test_a_call_without_marks_is_one_only_if_its_input_follows_the_grammar(
    client, say, text, is_call
):
    say(json.dumps({"name": "apply_patch", "arguments": {"input": text}}))
    [choice] = chat(client).choices
    assert bool(choice.message.tool_calls) == is_call
    assert ("apply_patch" in (choice.message.content or "")) != is_call


def test_both_kinds_of_tools_in_one_answer(client, say):
    say(f'{ANSWER}\n<tool_call>\n{{"name": "f", "arguments": {{"x": 1}}}}\n</tool_call>')
    other = {"type": "function", "function": {"name": "f"}}
    [choice] = chat(client, tools=[CHAT_TOOL, other]).choices
    assert [call.type for call in choice.message.tool_calls] == ["custom", "function"]
    assert choice.message.tool_calls[1].function.arguments == '{"x": 1}'


def test_a_history_with_a_custom_call_shows_the_model_what_it_wrote(client, say, engine, tokenizer):
    say("done")
    call = {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": TEXT}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    chat(client, messages=[*TALK, said, result])
    request = engine.requests[-1]
    text = tokenizer.decode(request.tokens[: request.prompt_len], skip_special_tokens=False)
    assert json.dumps({"input": TEXT}) in text


@pytest.mark.parametrize(
    "choice",
    [
        "auto",
        "required",
        {"type": "custom", "custom": {"name": "apply_patch"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "custom", "custom": {"name": "apply_patch"}}],
            },
        },
    ],
)
def test_the_grammar_of_a_tool_is_enforced_whatever_the_choice(client, say, engine, choice):
    say("ok")
    chat(client, tool_choice=choice)
    grammar = engine.requests[-1].sampling.params.grammar
    assert grammar is not None
    assert "Begin" in grammar


def test_a_tool_of_any_text_constrains_nothing(client, say, engine):
    say("ok")
    chat(client, tools=[{"type": "custom", "custom": {**PATCH, "format": {"type": "text"}}}])
    assert engine.requests[-1].sampling.params.grammar is None


@pytest.mark.parametrize(
    ("custom", "param"),
    [
        (None, "tools[0]"),
        ({**PATCH, "format": {"type": "grammar"}}, "tools[0].custom.format"),
        (
            {
                **PATCH,
                "format": {
                    "type": "grammar",
                    "grammar": {"syntax": "lark", "definition": "start: ("},
                },
            },
            "tools[0].custom.format.grammar",
        ),
    ],
)
def test_a_custom_tool_that_is_wrong_names_its_field(client, custom, param):
    tool = {"type": "custom"} if custom is None else {"type": "custom", "custom": custom}
    with pytest.raises(openai.BadRequestError) as info:
        chat(client, tools=[tool])
    assert info.value.param == param


def test_a_response_streams_the_input_of_a_custom_tool(client, say, engine):
    say(ANSWER)
    with client.responses.stream(
        model="tiny/model", input="Delete a.", tools=[FLAT_TOOL]
    ) as stream:
        events = [event for event in stream if "custom_tool_call_input" in event.type]
        [item] = stream.get_final_response().output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", TEXT)
    deltas = [event.delta for event in events[:-1]]
    assert len(deltas) > 3
    assert "".join(deltas) == events[-1].input == TEXT
    assert "Begin" in engine.requests[-1].sampling.params.grammar


def test_a_wrong_grammar_in_a_response_is_refused(client):
    wrong = {**FLAT_TOOL, "format": {"type": "grammar", "syntax": "lark", "definition": "("}}
    with pytest.raises(openai.BadRequestError) as info:
        client.responses.create(model="tiny/model", input="hi", tools=[wrong])
    assert info.value.param == "tools"

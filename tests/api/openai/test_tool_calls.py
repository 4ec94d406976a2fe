"""Calls of tools over HTTP, as OpenAI's own client reads them."""

from __future__ import annotations

import itertools
import json

import openai
import pytest

from foretoken.api.dialects.openai.bodies import ContentPart, Message
from foretoken.api.dialects.openai.reading import plain_messages
from foretoken.api.parsing.output_parser import CallArguments, CallBegin, CallEnd, Content
from foretoken.api.runtime.chat import ChoiceReader
from foretoken.api.text import chat_template
from foretoken.api.types.results import Choice, TextDelta, ToolChoice
from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.output import TokenLogprob

TALK = [{"role": "user", "content": "What is the weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER = CALL.replace("Paris", "Rome")


@pytest.fixture
def client(connect):
    return connect(tool_parser="hermes", reasoning_parser="think")


def ask(client, **options):
    return client.chat.completions.create(
        model=client.models.list().data[0].id, messages=TALK, **{"tools": [WEATHER], **options}
    )


def read(stream):
    """Read a stream as a client does: words, thoughts, calls, finish reasons."""
    words, thoughts, calls, reasons = "", "", {}, []
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta
            words += delta.content or ""
            thoughts += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or ():
                if part.id:
                    assert part.index not in calls, "an id is told once"
                    assert part.type == "function"
                    calls[part.index] = [part.function.name, ""]
                else:
                    assert part.function.name is None, "a name is told once"
                calls[part.index][1] += part.function.arguments or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    return words, thoughts, [tuple(calls[index]) for index in sorted(calls)], reasons


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
def test_a_call_arrives_whole_and_as_a_stream(client, engine, say, tokens_per_step):
    engine.tokens_per_step = tokens_per_step
    say("Let me look. " + CALL)
    whole = ask(client).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content.strip() == "Let me look."
    (call,) = whole.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}

    words, _, calls, reasons = read(ask(client, stream=True))
    assert (words, reasons) == (whole.message.content, ["tool_calls"])
    assert calls == [("get_weather", call.function.arguments)]


@pytest.mark.parametrize("tokens_per_step", [1, 100])
def test_calls_come_in_parallel_unless_one_is_enough(client, engine, say, tokens_per_step):
    engine.tokens_per_step = tokens_per_step
    say(f"{CALL}\n{OTHER}")
    both = ask(client).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in both] == ["Paris", "Rome"]
    assert both[0].id != both[1].id
    choice = ask(client, parallel_tool_calls=False).choices[0]
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    *_, calls, reasons = read(ask(client, parallel_tool_calls=False, stream=True))
    assert (len(calls), reasons) == (1, ["tool_calls"])


def test_without_tools_or_with_none_a_call_is_words(client, say):
    say(CALL)
    assert ask(client, tool_choice="none").choices[0].message.content == CALL
    assert ask(client, tool_choice="none").choices[0].message.tool_calls is None


@pytest.mark.parametrize("tokens_per_step", [1, 2, 100])
def test_thoughts_are_told_apart(client, engine, say, tokens_per_step):
    engine.tokens_per_step = tokens_per_step
    say("<think>He wants Paris.</think>\n\nLooking. " + CALL)
    message = ask(client).choices[0].message
    assert message.reasoning_content == "He wants Paris."
    assert message.content.strip() == "Looking."
    assert len(message.tool_calls) == 1
    words, thoughts, calls, _ = read(ask(client, stream=True))
    assert (words, thoughts) == (message.content, message.reasoning_content)
    assert len(calls) == 1


def test_a_call_that_is_cut_short_ends_by_length(client, say):
    say(CALL)
    choice = ask(client, max_tokens=24).choices[0]
    assert choice.finish_reason == "length"


def test_a_forced_call_leaves_no_words_behind(client, say):
    say(f"{CALL}\n<tool_call>")
    message = ask(client, tool_choice="required").choices[0].message
    assert (len(message.tool_calls), message.content) == (1, None)


def test_each_choice_has_calls_of_its_own(client, say):
    say(CALL)
    choices = ask(client, n=2).choices
    assert [len(choice.message.tool_calls) for choice in choices] == [1, 1]
    assert choices[0].message.tool_calls[0].id != choices[1].message.tool_calls[0].id


def test_a_choice_that_has_its_only_call_is_aborted_while_another_goes_on(
    client, engine, tokenizer
):
    engine.tokens_per_step = 8
    word, call = tokenizer.encode_word("word "), tokenizer.encode_word(CALL)
    answers = iter([itertools.cycle(word), itertools.chain(call, itertools.cycle(word))])
    engine.answers = lambda request: next(answers)
    choices = ask(client, n=2, parallel_tool_calls=False).choices
    assert [choice.finish_reason for choice in choices] == ["length", "tool_calls"]
    assert engine.aborted == [engine.requests[1].request_id]


def test_tools_that_are_turned_off_are_refused(connect, say):
    client = connect(tool_parser="none")
    with pytest.raises(openai.BadRequestError) as info:
        ask(client)
    assert info.value.param == "tools"
    say("hello")
    assert ask(client, tool_choice="none").choices[0].message.content == "hello"


NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.fixture
def long_context(built, engine):
    """Room for the description of a tool in letters."""
    built.max_model_len = engine.max_model_len = 4096


@pytest.mark.usefixtures("long_context")
@pytest.mark.parametrize("beginning", ["", NO_SYSTEM])
def test_a_model_whose_template_has_no_tools_is_told_of_them_in_text(
    connect, engine, tokenizer, say, monkeypatch, beginning
):
    compiled = chat_template._compiled
    monkeypatch.setattr(chat_template, "_compiled", lambda text: compiled(beginning + text))
    client = connect()
    assert client.models.list().data[0].tool_parser == "generic"
    say(CALL)
    choice = ask(client).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")

    say("Sunny.")
    answered = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    talk = [*TALK, choice.message, answered]
    again = client.chat.completions.create(model="tiny/model", messages=talk, tools=[WEATHER])
    assert again.choices[0].message.content == "Sunny."
    request = engine.requests[-1]
    prompt = tokenizer.decode(request.tokens[: request.prompt_len], skip_special_tokens=False)
    _, first, *others = prompt.split("<|im_start|>")
    assert first.startswith("user" if beginning else "system")
    assert '"description": "Tell the weather."' in first
    assert others[-3:] == [
        f"assistant\n{CALL}<|im_end|>\n",
        "user\n<tool_response>\n21 degrees\n</tool_response><|im_end|>\n",
        "assistant\n",
    ]


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "object", "properties": {"a": {"type": "nothing"}}}, "Invalid type: nothing"),
        ({"type": "object", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"type": "object", "oneOf": [{"required": ["a"]}, {}]}, "oneOf is supported only if"),
        ({"type": "array"}, "the parameters of f must be"),
    ],
)
def test_a_bad_schema_names_the_tools(client, parameters, reason):
    function = {"name": "f", "parameters": parameters, "strict": True}
    with pytest.raises(openai.BadRequestError) as info:
        client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=TALK,
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
        )
    assert info.value.param == "tools"
    assert info.value.body["message"].startswith(f"tools: {reason}")


def test_the_chosen_tool_is_forced_by_a_grammar(client, engine, say):
    say(CALL)
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        ask(client, tool_choice=choice)
        assert engine.requests[-1].sampling.constraint is not None
    ask(client)
    assert engine.requests[-1].sampling.constraint is None


def test_words_behind_a_call_stay_behind_it_however_many_tokens_a_step_brings(engine):

    class Scripted:
        def feed(self, text):
            return [Content("a"), CallBegin("f"), CallArguments("{}"), CallEnd(), Content("b")]

        def end(self, *, is_cut=False):
            return [CallBegin("g"), CallArguments("{}"), CallEnd()]

    reader = ChoiceReader(Scripted(), ToolChoice())
    first, last = reader.read(TextDelta(text="x", token_ids=[1, 2], finish_reason="stop"))
    assert (first.text, [each.name for each in first.tool_calls]) == ("a", ["f"])
    assert (last.text, [each.name for each in last.tool_calls]) == ("b", ["g"])
    assert (first.token_ids, last.token_ids) == ([1, 2], [])
    assert (first.finish_reason, last.finish_reason) == (None, "tool_calls")
    assert reader.read(TextDelta(text="late", token_ids=[3], finish_reason="abort")) == []


def test_system_messages_at_the_beginning_become_one():

    talk = [Message(role=role, content=role) for role in ("system", "developer", "user", "system")]
    plain = plain_messages(talk)
    assert [message["role"] for message in plain] == ["system", "user", "system"]
    assert plain[0]["content"] == "system\n\ndeveloper"


def test_a_refusal_of_an_earlier_turn_is_its_text():
    parts = [ContentPart(type="refusal", refusal="No.")]
    [plain] = plain_messages([Message(role="assistant", content=parts)])
    assert plain["content"] == "No."


def test_a_tool_that_is_named_is_called_once(client, say):
    say(f"{CALL}\n{OTHER}")
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = ask(client, tool_choice=named).choices[0]
    assert len(choice.message.tool_calls) == 1


def test_a_call_that_a_stop_string_cuts_is_not_to_be_run(client, say):
    say(f"{CALL}\n{OTHER} so")
    for stop, cities in (("Paris", ['{"city": "']), ("Rome", ['{"city": "Paris"}', '{"city": "'])):
        choice = ask(client, stop=stop).choices[0]
        assert [call.function.arguments for call in choice.message.tool_calls] == cities
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    whole = ask(client, stop=" so").choices[0]
    assert (whole.finish_reason, len(whole.message.tool_calls)) == ("tool_calls", 2)


def test_the_log_probabilities_of_many_steps_are_copied_once():
    choice, logprobs = Choice(index=0), [TokenLogprob(1, -0.5)]
    step = TextDelta(logprobs=logprobs)
    choice.add(step)
    kept = choice.logprobs
    for _ in range(2):
        choice.add(step)
    choice.add(TextDelta())
    assert choice.logprobs is kept
    assert kept == logprobs * 3
    assert len(logprobs) == 1, "the delta's own list is left alone"


@pytest.mark.parametrize(("tools", "named"), [([WEATHER], "tools"), ([], "json_schema")])
def test_a_grammar_that_cannot_go_on_is_the_fault_of_the_field_that_asked_for_it(
    client, engine, say, tools, named
):
    say("</think>{}")
    engine.row_error = InvalidRequest("too many states", param="grammar")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    asked = {"tools": tools} if tools else {"tools": openai.omit}
    for stream in (False, True):
        with pytest.raises(openai.APIError) as failed:
            list(ask(client, stream=stream, response_format=form, **asked))
        assert (failed.value.param, failed.value.type) == (named, "invalid_request_error")

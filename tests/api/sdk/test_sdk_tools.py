"""LLM.chat and AsyncLLM.chat: tools in, thinking, words and calls out."""

from __future__ import annotations

import threading

import msgspec
import pytest

from foretoken import Choice, ForetokenError, InvalidRequest, SamplingParams, ToolCall
from foretoken.api.dialects.openai.bodies import Message
from foretoken.api.dialects.openai.reading import plain_messages
from foretoken.api.parsing.output_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Reasoning,
)
from foretoken.api.runtime.chat import ChatAnswer, ChatClient
from foretoken.api.runtime.conversation.chat_input import ChatInput
from foretoken.api.sdk.options import ChatOptions

HI = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FOUR = SamplingParams(max_tokens=4, seed=0)
PARTS = [
    Reasoning("hm"),
    Content("so: "),
    CallBegin("add"),
    CallArguments('{"a"'),
    CallArguments(":1}"),
]


CONVERSATIONS = [
    [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}],
    [{"role": "developer", "content": "d"}, {"role": "system", "content": "s"}, *HI],
    [*HI, {"role": "function", "name": "f", "content": "1"}],
    [*HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, *HI],
    [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_messages_are_read_as_the_server_reads_them(messages):
    read = ChatOptions(None, None).chat_input(messages, FOUR).messages
    assert read == plain_messages(msgspec.convert(messages, list[Message]))


def test_ids_of_an_answer_are_those_of_the_message_after_systems_became_one():
    answer = {"role": "assistant", "content": "x", "token_ids": [7]}
    messages = [*CONVERSATIONS[2], answer]
    (handle,) = ChatOptions(None, None).chat_input(messages, FOUR).handles
    assert (handle.index, handle.param) == (2, "messages[3].token_ids")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"content": 5}, "messages[1].content"),
        ({"content": True}, "messages[1].content"),
        ({"content": [{"type": "text", "content": "hi"}]}, "messages[1].content[0]"),
        ({"content": "x", "tool_calls": 5}, "messages[1].tool_calls"),
        ({"content": "x", "role": []}, "messages[1].role"),
    ],
)
def test_a_field_of_a_message_that_is_wrong_is_named(wrong, param):
    with pytest.raises(InvalidRequest) as info:
        ChatOptions(None, None).chat_input([*HI, {"role": "user", **wrong}], FOUR)
    assert info.value.param == param


class OnePartAStep:
    """Whatever the model says, it means these parts."""

    def __init__(self) -> None:
        self._parts = iter(PARTS)

    def feed(self, text):
        return [next(self._parts)]

    def end(self, *, is_cut=False):
        return [*self._parts, CallEnd()]


class Calling(ChatClient):
    """A client whose chats end with a call."""

    def __init__(self, llm) -> None:
        self._host = llm
        self.asks: list[ChatInput] = []

    async def open(self, ask, *, request_id=None, hands_out=False):
        self.asks.append(ask)
        answer = await self._host.open([5, 6], ask.params, request_id=request_id)
        return ChatAnswer(self._host, answer, ask, OnePartAStep)


@pytest.fixture
def calling(llm):
    """Chat client of an LLM that says the parts above."""
    llm._llm._chat_client = Calling(llm._llm)
    return llm._llm._chat_client


def test_an_answer_is_told_apart_into_thinking_words_and_calls(llm, calling):
    out = llm.chat(HI, FOUR, tools=[ADD])
    (call,) = out.tool_calls
    assert (out.reasoning, out.text) == ("hm", "so: ")
    assert (call.name, call.parsed(), call.id[:5]) == ("add", {"a": 1}, "call_")
    assert out.token_ids == [5, 6, 5, 6]
    assert out.prompt_token_ids == [5, 6]
    assert out.usage.completion_tokens == 4
    assert calling.asks[0].tools[0].name == "add"


def test_streamed_parts_add_up_to_the_same(llm, calling):
    deltas = list(llm.stream_chat(HI, FOUR, tools=[ADD], request_id="me"))
    whole = llm.chat(HI, FOUR, tools=[ADD])
    pieces = [piece for delta in deltas for piece in delta.tool_calls]
    assert "".join(delta.reasoning for delta in deltas) == whole.reasoning
    assert "".join(delta.text for delta in deltas) == whole.text
    assert "".join(piece.arguments for piece in pieces) == whole.tool_calls[0].arguments
    assert [piece.name for piece in pieces if piece.name] == ["add"]
    assert [d.finish_reason for d in deltas if d.finish_reason] == [whole.finish_reason]


def test_a_stream_that_is_left_early_is_aborted(llm, engine):
    engine.by_hand = True

    def step_once():
        engine.submitted.acquire(timeout=10)
        llm._thread.loop.call_soon_threadsafe(engine.step)

    threading.Thread(target=step_once, daemon=True).start()
    stream = llm.stream_chat(HI, request_id="me")
    next(stream)
    stream.close()
    assert engine.was_aborted.acquire(timeout=10)
    assert engine.aborted == ["me"]


def test_several_conversations_and_choices_are_answered_in_order(llm, calling):
    params = [SamplingParams(max_tokens=count, n=2) for count in (1, 3)]
    outs = llm.chat([HI, HI], params, tools=[ADD])
    assert [len(choice.token_ids) for out in outs for choice in out.choices] == [1, 1, 3, 3]


def test_conversations_without_tools_are_words_alone(llm, say):
    say("hello world")
    out = llm.chat(HI, SamplingParams(prompt_logprobs=0, logprobs=1))
    assert (out.text, out.reasoning, out.tool_calls) == ("hello world", "", [])
    assert out.message == {
        "role": "assistant",
        "content": "hello world",
        "token_ids": out.token_ids[:-1],  # without the stop token
    }
    assert len(out.logprobs) == len(out.token_ids)
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)


def test_an_answer_with_a_control_token_inside_goes_back_as_text(llm, engine, tokenizer):
    """Once, its message had ids, and the next turn refused them."""
    said, end = tokenizer.encode_word("hello"), tokenizer.vocab["<|im_end|>"]
    engine.answers = lambda _: [*said, end, *said]
    params = SamplingParams(max_tokens=2 * len(said) + 1, ignore_eos=True)
    out = llm.chat(HI, params)
    assert end in out.token_ids[:-1]
    assert out.message == {"role": "assistant", "content": "hellohello"}
    *_, last = llm.stream_chat([*HI, out.message, *HI], params)
    assert last.message_ids is None


def test_more_conversations_than_fit_wait_for_room(llm, engine, say):
    from foretoken import QueueFull

    say("hello")
    submit, refusals = engine.submit, [QueueFull("full", retry_after=0.01)]

    def reluctant(request):
        if len(engine.requests) == 1 and refusals:
            raise refusals.pop()
        return submit(request)

    engine.submit = reluctant
    assert [out.text for out in llm.chat([HI] * 3)] == ["hello"] * 3
    assert not refusals


def test_calls_of_an_earlier_answer_are_objects_in_the_template(llm):
    call = ToolCall(id="c", name="add", arguments='{"a":1}')
    said = Choice(index=0, text="", token_ids=[], finish_reason="tool_calls", tool_calls=[call])
    ask = ChatOptions([ADD], "auto").chat_input([*HI, said.message, call.reply("3")], FOUR)
    (shown,) = ask.messages[1]["tool_calls"]
    assert shown["function"]["arguments"] == {"a": 1}
    assert ask.messages[2] == {"role": "tool", "tool_call_id": "c", "content": "3"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": 5}, "tools"),
        ({"tools": [ADD], "tool_choice": "add"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"function": {"name": "sub"}}}, "tool_choice"),
    ],
)
def test_tools_that_make_no_sense_are_named(llm, options, param):
    with pytest.raises(InvalidRequest) as failed:
        llm.chat(HI, FOUR, **options)
    assert failed.value.param == param


def test_a_named_tool_and_single_calls_are_passed_on():
    choice = {"type": "function", "function": {"name": "add"}}
    ask = ChatOptions([ADD], choice, is_parallel=False).chat_input(HI, FOUR)
    assert (ask.tool_choice.mode, ask.tool_choice.name) == ("required", "add")
    assert not ask.tool_choice.parallel


@pytest.mark.parametrize("arguments", ["", "[1]", '{"a":', "{" * 5000])
def test_arguments_that_are_no_object_are_an_error_of_ours(arguments):
    with pytest.raises(ForetokenError, match="add"):
        ToolCall(id="c", name="add", arguments=arguments).parsed()

"""The beginning of a next turn's prompt: what it is rendered from, and where it is cut."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.api.runtime.conversation.chat_input import ChatInput
from foretoken.api.runtime.preprocess import PromptTokens
from foretoken.api.runtime.turns.next_prompt import NextPrompt
from foretoken.api.types.request_context import CONTEXT, RequestContext, adapter_name
from foretoken.api.types.results import Choice, ToolCall
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.interface.extras.images import PromptImage
from foretoken.core.interface.request import CacheOptions, Pin

HI = {"role": "user", "content": "hi"}
THOUGHT = Choice(index=0, text="ok", reasoning="hm", finish_reason="stop", token_ids=[4, 5, 6])
IMAGE = PromptImage(key=b"k" * 32, runs=((6, 5),), inputs=())


def turn_of(chat: ChatInput, choice: Choice = THOUGHT) -> NextPrompt:
    request: Any = SimpleNamespace(
        tokens=array("q", [1, 2, 3, 4]), prompt_len=3, cache=CacheOptions(session="s")
    )
    return NextPrompt(chat, choice, request)


def chat_of(*messages: Mapping[str, Any], **fields: Any) -> ChatInput:
    return ChatInput(messages=[*messages], params=SamplingParams(), **fields)


async def rendered(turn: NextPrompt, *prompts: PromptTokens, page_size: int = 1) -> list[ChatInput]:
    seen: list[ChatInput] = []

    async def render(chat: ChatInput) -> PromptTokens:
        seen.append(chat)
        return prompts[len(seen) - 1]

    await turn.render(render, page_size)
    return seen


@pytest.mark.parametrize(
    ("before", "has_reasoning"),
    [
        ((), False),
        (({"role": "assistant", "content": "a"}, HI), False),
        (({"role": "assistant", "content": "a", "reasoning_content": "b"}, HI), True),
    ],
)
def test_the_answer_has_its_reasoning_if_earlier_ones_have(
    before: tuple[dict[str, Any], ...], has_reasoning: bool
) -> None:
    turn = turn_of(chat_of(HI, *before))
    prompts = PromptTokens([1, 2, 9]), PromptTokens([1, 2, 8])
    for chat in asyncio.run(rendered(turn, *prompts)):
        answer = chat.messages[len(before) + 1]
        assert answer["content"] == "ok"
        assert ("reasoning_content" in answer) == has_reasoning
        assert chat.messages[-1]["role"] == "user"


def test_a_call_is_followed_by_its_result() -> None:
    call = ToolCall(id="c", name="f", arguments="{}")
    choice = Choice(index=0, tool_calls=[call], finish_reason="tool_calls", token_ids=[4])
    turn = turn_of(chat_of(HI), choice)
    for chat in asyncio.run(rendered(turn, PromptTokens([1, 9]), PromptTokens([1, 8]))):
        assert chat.messages[-1]["role"] == "tool"
        assert chat.messages[-1]["tool_call_id"] == "c"


def test_each_call_has_a_result() -> None:
    calls = [ToolCall(id=f"c{at}", name="f", arguments="{}") for at in range(2)]
    choice = Choice(index=0, tool_calls=calls, finish_reason="tool_calls", token_ids=[4])
    turn = turn_of(chat_of(HI), choice)
    for chat in asyncio.run(rendered(turn, PromptTokens([1, 9]), PromptTokens([1, 8]))):
        assert [each["tool_call_id"] for each in chat.messages[-2:]] == ["c0", "c1"]


def test_tokens_that_the_request_has_computed_are_cached() -> None:
    turn = turn_of(chat_of(HI))
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    asyncio.run(rendered(turn, PromptTokens([*ids, 50, 9]), PromptTokens([*ids, 51, 9])))
    assert (turn.num_cached, turn.num_wanted) == (5, 8), "the KV of the last token is missing"
    turn = turn_of(chat_of(HI))
    prompts = PromptTokens([*ids, 50, 9]), PromptTokens([*ids, 51, 9])
    asyncio.run(rendered(turn, *prompts, page_size=3))
    assert (turn.num_cached, turn.num_wanted, turn.num_missing) == (3, 6, 3)


@pytest.mark.parametrize("write", [str, json.dumps], ids=["text", "JSON"])
def test_nothing_of_the_next_message_is_taken_to_be_known(write: Callable[[str], str]) -> None:
    """Control characters, for example, have a common beginning in JSON, which words do not have."""

    async def render(chat: ChatInput) -> PromptTokens:
        return PromptTokens([1, 2, 3, *map(ord, write(chat.messages[-1]["content"]))])

    turn = turn_of(chat_of(HI))
    asyncio.run(turn.render(render, 1))
    assert turn.num_wanted == 3 + write("").find('"') + 1


@pytest.mark.parametrize(
    ("stop", "length", "num_images"), [(6, 6, 0), (7, 12, 1), (11, 12, 1), (12, 12, 1)]
)
def test_an_image_is_computed_whole(stop: int, length: int, num_images: int) -> None:
    turn = turn_of(chat_of(HI))
    ids = [1, 2, 3, 7, 7, 7, *[0] * 5, 7]
    prompts = [PromptTokens([*ids, last], images=(IMAGE,)) for last in (50, 51)]
    asyncio.run(rendered(turn, *prompts))
    assert turn.num_wanted == 12
    prompt = turn.up_to(stop)
    assert len(prompt.token_ids) == length
    assert len(prompt.images) == num_images


def test_it_belongs_to_the_caller_and_the_adapter_and_has_no_pins() -> None:
    scope = {"type": "http", "headers": []}
    token = CONTEXT.set(RequestContext(scope, caller=b"me", adapter="lora", request_id="r"))
    try:
        turn = turn_of(chat_of(HI, cache=CacheOptions(pins=(Pin(1, 9.0),))))
    finally:
        CONTEXT.reset(token)
    assert turn.adapter == "lora"
    assert turn.chat.cache.pins == ()
    assert turn.owner != turn_of(chat_of(HI)).owner

    async def entered() -> tuple[str | None, str]:
        turn.enter()
        context = CONTEXT.get()
        assert context is not None
        return adapter_name(), context.request_id

    assert asyncio.run(entered()) == ("lora", "")

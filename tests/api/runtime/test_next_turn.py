"""The next turn that is computed in advance: of which request it is, and how many there are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from foretoken.api.runtime.conversation.chat_input import ChatInput
from foretoken.api.runtime.next_turn import MAX_TASKS, NextTurns
from foretoken.api.runtime.preprocess import PromptTokens
from foretoken.api.types.request_context import CONTEXT, RequestContext, adapter_name, in_batch
from foretoken.api.types.results import Choice
from foretoken.api.types.sampling_params import SamplingParams


class Client:
    """A client that records whose prompts it computes, once ``may_go`` is set."""

    def __init__(self) -> None:
        self.seen: list[tuple[str | None, bool]] = []
        self.may_go = asyncio.Event()

    async def render(self, chat: ChatInput) -> PromptTokens:
        await self.may_go.wait()
        return PromptTokens([1, 2, 3])

    async def prewarm(self, chat: ChatInput, *, prompt: PromptTokens) -> SimpleNamespace:
        self.seen.append((adapter_name(), in_batch()))
        return SimpleNamespace()


async def seen_after(choices: Sequence[Choice]) -> list[tuple[str | None, bool]]:
    client = Client()
    turns = NextTurns(client)
    begin = turns.after(
        ChatInput(messages=[{"role": "user", "content": "hi"}], params=SamplingParams())
    )
    for choice in choices:
        begin(choice)
    client.may_go.set()
    await asyncio.gather(*turns._tasks)
    return client.seen


@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("adapter", ["my-lora", None])
def test_it_is_of_the_same_model_and_batch(adapter: str | None, in_batch: bool) -> None:
    scope = {"type": "http", "headers": []}
    token = CONTEXT.set(RequestContext(scope, adapter=adapter, in_batch=in_batch))
    try:
        seen = asyncio.run(seen_after([Choice(index=0, text="ok", finish_reason="stop")]))
    finally:
        CONTEXT.reset(token)
    assert seen == [(adapter, in_batch)]


def test_their_number_is_bounded_and_aborted_answers_have_none() -> None:
    aborted = Choice(index=0, finish_reason="abort")
    ended = [Choice(index=0, text="ok", finish_reason="stop")] * (MAX_TASKS + 1)
    assert len(asyncio.run(seen_after([aborted, *ended]))) == MAX_TASKS

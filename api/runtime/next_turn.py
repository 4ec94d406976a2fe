"""The prompt of a conversation's next turn, computed in advance when an answer ends."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from ...core.errors import ForetokenError
from ..types.request_context import CONTEXT, RequestContext
from ..types.results import Choice, Completion, message_of
from .conversation.chat_input import ChatInput
from .conversation.prompt_history import common_len
from .conversation.tools import plain_call
from .preprocess import PromptTokens

logger = logging.getLogger(__name__)
MAX_TASKS = 64  # next turns that are computed at a time; others are not computed in advance
MARKS = "\x01", "\x02"  # two contents of the last message: prompts are equal up to it


class Client(Protocol):
    """The methods of `ChatClient` that a warmer uses."""

    async def render(self, chat: ChatInput) -> PromptTokens:
        """Return the token ids of a conversation."""

    async def prewarm(self, chat: ChatInput, *, prompt: PromptTokens) -> Completion:
        """Cache a prompt."""


class NextTurns:
    """Computes the beginning of the prompts of next turns, each in a task of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def after(self, chat: ChatInput) -> Callable[[Choice], None]:
        """Return a function that takes the answer to ``chat`` and starts the next turn's task."""

        def begin(choice: Choice) -> None:
            if choice.finish_reason == "abort":
                return
            if len(self._tasks) < MAX_TASKS:
                task = asyncio.create_task(self._warm(chat, choice))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        return begin

    async def _warm(self, chat: ChatInput, choice: Choice) -> None:
        """Compute the prompt of the next turn up to its last message, which is not known yet.

        This part is cached already, unless the template renders an answer differently once another
        message follows, for example without the reasoning. Errors are logged, because the request
        has ended.
        """
        context = CONTEXT.get()
        if context is not None:  # the request itself has ended
            own = RequestContext(
                context.scope,
                caller=context.caller,
                in_batch=context.in_batch,
                adapter=context.adapter,
            )
            CONTEXT.set(own)
        try:
            chat = _answered(chat, choice)
            one, other = [await self._rendered(chat, choice, mark) for mark in MARKS]
            ids, others = array("q", one.token_ids), array("q", other.token_ids)
            token_ids = ids[: common_len(ids, others)]
            await self._client.prewarm(chat, prompt=dataclasses.replace(one, token_ids=token_ids))
        except ForetokenError as error:
            logger.info("the next turn was not computed in advance: %s", error)

    async def _rendered(self, chat: ChatInput, choice: Choice, content: str) -> PromptTokens:
        last: Mapping[str, Any] = {"role": "user", "content": content}
        if choice.tool_calls:
            call_id = choice.tool_calls[-1].id
            last = {"role": "tool", "content": content, "tool_call_id": call_id}
        return await self._client.render(
            dataclasses.replace(chat, messages=[*chat.messages, last], paths=())
        )


def _answered(chat: ChatInput, choice: Choice) -> ChatInput:
    """Return the conversation with its answer, without a deadline and without pins."""
    options = {**chat.template, "add_generation_prompt": False, "continue_final_message": False}
    answer = message_of(choice.text, choice.reasoning, choice.tool_calls)
    if choice.tool_calls:
        answer["tool_calls"] = [plain_call(call) for call in answer["tool_calls"]]
    return dataclasses.replace(
        chat,
        messages=[*chat.messages, answer],
        paths=(),
        template=options,
        params=dataclasses.replace(chat.params, deadline=None, n=1),
        cache=msgspec.structs.replace(chat.cache, pins=()),
    )

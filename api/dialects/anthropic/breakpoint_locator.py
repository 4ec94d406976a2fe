"""Find the token positions of cache breakpoints, usually without rendering the prompt again."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec

from ....core.errors import InvalidRequest
from ...runtime.chat import ChatClient
from ...runtime.conversation.chat_input import ChatInput
from .breakpoints import NEXT, Breakpoints, Mark, pins_at
from .reading import read_conversation

NUM_HEADS = 64
Ids: TypeAlias = "array[int]"


class BreakpointLocator:
    """Finds the token positions of cache breakpoints. Caches the token ids of rendered prefixes.

    An agent usually sets a breakpoint at the end of each request. Its earlier breakpoints were thus
    rendered for earlier requests, and the last one needs no rendering because it ends the prompt.
    """

    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self._heads: OrderedDict[bytes, Ids] = OrderedDict()  # most recently used last

    async def locate(
        self, marks: Sequence[Mark], chat: ChatInput, prompt_ids: Sequence[int]
    ) -> Breakpoints:
        """Return a pin for each breakpoint, at its token position in the prompt."""
        ids = array("i", prompt_ids)
        heads = [await self._head(mark, chat, ids) for mark in marks]
        return pins_at([mark.ttl for mark in marks], heads, ids)

    async def _head(self, mark: Mark, whole: ChatInput, prompt_ids: Ids) -> Ids:
        chat = _unanswered(read_conversation(mark.head))
        key = self._key(chat)
        if key not in self._heads:
            is_whole = key == self._key(_unanswered(whole))
            self._heads[key] = (
                prompt_ids[: len(prompt_ids) - await self._num_opening(whole)]
                if is_whole
                else await self._render(chat)
            )
        self._heads.move_to_end(key)
        while len(self._heads) > NUM_HEADS:
            self._heads.popitem(last=False)
        return self._heads[key]

    async def _num_opening(self, whole: ChatInput) -> int:
        """Return the number of tokens of the generation prompt, which ends a rendered prompt."""
        if "continue_final_message" in whole.template:
            return 0
        messages = [{"role": "user", "content": NEXT.content}]
        short = replace(whole, messages=messages, handles=(), tools=())
        opened, plain = await self._render(short), await self._render(_unanswered(short))
        return len(opened) - len(plain)

    async def _render(self, chat: ChatInput) -> Ids:
        try:
            return array("i", (await self._client.render(chat)).token_ids)
        except InvalidRequest:
            # The template rejects this part of the conversation: the breakpoint has no position.
            return array("i")

    def _key(self, chat: ChatInput) -> bytes:
        chat, _ = self._client.normalized(chat)
        handles = [(each.index, each.token_ids) for each in chat.handles]
        rendered = [chat.messages, handles, [tool.body for tool in chat.tools], chat.template]
        return hashlib.blake2b(msgspec.json.encode(rendered), digest_size=16).digest()


def _unanswered(chat: ChatInput) -> ChatInput:
    options = {**chat.template, "add_generation_prompt": False, "continue_final_message": False}
    return replace(chat, template=options)

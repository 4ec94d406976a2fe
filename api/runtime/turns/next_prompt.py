"""NextPrompt: the beginning of the prompt of a conversation's next turn."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from ....core.interface.extras.images import PromptImage
from ....core.interface.request import Request
from ...types.request_context import CONTEXT, RequestContext, adapter_name, origin, owner_of
from ...types.results import Choice, message_of
from ..conversation.chat_input import ChatInput
from ..conversation.prompt_history import common_len
from ..conversation.tools import plain_call
from ..preprocess import PromptTokens

Render = Callable[[ChatInput], Awaitable[PromptTokens]]
# Two contents of the next message: prompts are equal up to it. They differ from the first letter on
# also where a template writes them as JSON, and merge with the characters before as words do.
MARKS = "a", "7"
MESSAGE_BYTES = 512  # size of a message without its text
TOKEN_BYTES = 12  # size of a token id and its text; a body that continues a response lacks the text


class NextPrompt:
    """The beginning of a next turn's prompt, up to its last message, which is not known yet.

    ``chat`` and ``choice``: a conversation and its answer. ``request``: the request of the answer.
    """

    def __init__(self, chat: ChatInput, choice: Choice, request: Request) -> None:
        self.owner = owner_of(chat.params.cache_salt)
        self.session = request.cache.session
        self.adapter = chat.params.lora or adapter_name()
        self.chat = _answered(chat, choice)
        self._asked = chat.messages
        self._choice = choice
        # The KV of an answer's last token is never computed.
        self._known = request.tokens[: request.prompt_len] + array("q", choice.token_ids[:-1])
        self._context = _own_context()
        num_messages = len(chat.messages)
        self.num_bytes = (  # approximate size in memory
            origin().num_bytes + MESSAGE_BYTES * num_messages + TOKEN_BYTES * len(self._known)
        )
        self.prompt: PromptTokens | None = None  # None until it is rendered
        self.num_cached = 0  # leading tokens that are in the cache
        self.num_wanted = 0  # leading tokens to compute: whole pages
        self.num_chunks = 0  # chunks computed so far

    def enter(self) -> None:
        """Set the present task's context to the context of the request, whose answer has ended."""
        CONTEXT.set(self._context)

    @property
    def num_missing(self) -> int:
        """Number of tokens left to compute, once the prompt is rendered."""
        return max(0, self.num_wanted - self.num_cached)

    def continues(self, messages: Sequence[Mapping[str, Any]], owner: bytes) -> bool:
        """Whether a conversation begins with the messages that this answer was for."""
        asked = self._asked
        if owner != self.owner or len(messages) < len(asked):
            return False
        # Conversations with a common beginning mostly differ in the last message.
        pairs = zip(reversed(asked), reversed(messages[: len(asked)]), strict=True)
        return all(mine == theirs for mine, theirs in pairs)

    async def render(self, render: Render, page_size: int) -> None:
        """Find the tokens to compute, by two renderings with different last messages.

        Tokens that the request has computed are cached. They are all that is needed, unless the
        template renders an answer differently once another message follows, for example without
        its reasoning. Raises `InvalidRequest`.
        """
        one, other = [await render(self._with_message(mark)) for mark in MARKS]
        ids = one.cached_ids
        num_tokens = common_len(ids, other.cached_ids)
        self.num_wanted = num_tokens // page_size * page_size
        self.num_cached = common_len(ids, self._known) // page_size * page_size
        self.prompt = one
        self._known = array("q")

    def up_to(self, stop: int) -> PromptTokens:
        """Return the first ``stop`` tokens of the prompt.

        An image is never cut: it is whole, and a token follows it, as the engine requires.
        """
        prompt = self.prompt
        assert prompt is not None, "the prompt must be rendered first"
        images: list[PromptImage] = []
        for image in prompt.images:
            first, end = image.runs[0][0], sum(image.runs[-1])
            if first >= stop:
                break
            images.append(image)
            stop = max(stop, end + 1)
        return dataclasses.replace(prompt, token_ids=prompt.token_ids[:stop], images=tuple(images))

    def _with_message(self, content: str) -> ChatInput:
        # Some templates refuse a conversation in which a call has no result.
        results = [call.reply(content) for call in self._choice.tool_calls]
        last = results or [{"role": "user", "content": content}]
        return dataclasses.replace(self.chat, messages=[*self.chat.messages, *last])


def _has_reasoning(message: Mapping[str, Any]) -> bool:
    return bool(message.get("reasoning_content") or message.get("reasoning"))


def _own_context() -> RequestContext | None:
    """Return the context of a request with the caller and the adapter of the present one."""
    context = CONTEXT.get()
    if context is None:
        return None
    return RequestContext(context.scope, caller=context.caller, adapter=context.adapter)


def _answered(chat: ChatInput, choice: Choice) -> ChatInput:
    """Return the conversation with its answer, without a deadline and without pins.

    The answer has its reasoning only if the client sent the reasoning of earlier answers, too. If
    a template renders reasoning, the prompt with it is cached already, and the one without is not.
    """
    options = {**chat.template, "add_generation_prompt": False, "continue_final_message": False}
    reasoning = choice.reasoning if any(map(_has_reasoning, chat.messages)) else ""
    answer = message_of(choice.text, reasoning, choice.tool_calls)
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

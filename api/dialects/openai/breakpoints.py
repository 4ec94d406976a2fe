"""prompt_cache_breakpoint: breakpoints in messages, and the conversation up to each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from msgspec import structs

from ...runtime.conversation.chat_input import ChatInput
from ...runtime.preprocess import PromptTokens
from ...serving.caching.breakpoints import NEXT_CONTENT, Breakpoints, Mark
from ...serving.caching.fields import (
    MAX_EXPLICIT,
    MAX_IMPLICIT,
    SECONDS,
    PromptCacheBreakpoint,
    PromptCacheOptions,
    is_explicit,
)
from ...serving.caching.locator import BreakpointLocator
from ...serving.serving_context import Service
from .bodies import Message
from .reading import plain_messages, read_handles, read_images, read_paths

SYSTEM = ("system", "developer")
NEXT = Message(role="user", content=NEXT_CONTENT)


class Pinned(NamedTuple):
    """A chat request whose breakpoints were turned into pins.

    ``prompt``: the rendered prompt, if it was needed. ``breakpoints``: all pins; None for a body
    without breakpoints and without ``prompt_cache_options``.
    """

    chat: ChatInput
    prompt: PromptTokens | None = None
    breakpoints: Breakpoints | None = None


async def with_breakpoints(
    service: Service,
    messages: Sequence[Message],
    options: PromptCacheOptions | None,
    chat: ChatInput,
) -> Pinned:
    """Return the chat request ``chat`` with the breakpoints of ``messages`` as pins."""
    has_parts = list in {type(message.content) for message in messages}
    marks = read_marks(messages, options, chat) if has_parts else []
    if not marks and options is None:
        return Pinned(chat)
    prompt, page_size = None, service.llm.page_size
    if marks:
        prompt = await service.chat.render(chat)
        locator = service.shared.setdefault(BreakpointLocator, BreakpointLocator(service.chat))
        chat, _ = await locator.with_pins(marks, chat, prompt.token_ids, page_size)
    pins = sorted(chat.cache.pins, key=lambda pin: pin.num_tokens)
    return Pinned(chat, prompt, Breakpoints(tuple(pins), page_size))


def read_marks(
    messages: Sequence[Message], options: PromptCacheOptions | None, chat: ChatInput
) -> list[Mark]:
    """Return the last breakpoints of a conversation, at most as many as ``options.mode`` allows.

    ``chat``: the chat request with all ``messages``.
    """
    most = MAX_EXPLICIT if is_explicit(options) else MAX_IMPLICIT
    default = (options and options.ttl) or "30m"
    found = [*_breakpoints(messages)][-most:]
    return [
        Mark(partial(_head, chat, messages, index, end), SECONDS[given.ttl or default])
        for index, end, given in found
    ]


def _breakpoints(messages: Sequence[Message]) -> Iterator[tuple[int, int, PromptCacheBreakpoint]]:
    """Yield (index of the message, number of parts up to the breakpoint, breakpoint)."""
    for index, message in enumerate(messages):
        if isinstance(message.content, list):
            for end, part in enumerate(message.content, start=1):
                if part.prompt_cache_breakpoint is not None:
                    yield index, end, part.prompt_cache_breakpoint


def _head(chat: ChatInput, messages: Sequence[Message], index: int, end: int) -> ChatInput:
    content = messages[index].content
    if not isinstance(content, list):
        raise TypeError("a message without content parts cannot have a breakpoint")
    last = messages[index]
    if end < len(content):
        last = structs.replace(last, content=content[:end], token_ids=None)
    head = [*messages[:index], last]
    if all(message.role in SYSTEM for message in head):
        head.append(NEXT)
    return replace(
        chat,
        messages=plain_messages(head),
        images=read_images(head),
        handles=read_handles(head),
        paths=read_paths(head),
    )

"""Compactor: decides when a conversation is compacted, and compacts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from .....core.errors import InvalidRequest, PromptTooLong
from .....core.interface.request import Usage
from ....runtime.conversation.chat_input import ChatInput
from ....serving.compaction import explain_compaction, seal_of, summarizer_of
from ....serving.serving_context import Service
from ....types.request_context import owner_of
from ...openai.bodies import Message
from ..answers import CompactionItem, CompactionUsage
from ..bodies import ResponsesRequest
from ..items import Thread
from ..reading import make_chat_input
from .sealed import (
    TRIGGER,
    Compacted,
    has_more,
    in_effect,
    last_turn,
    lead_of,
    replaced,
    sealed,
)

HOW = "context_management, or POST /v1/responses/compact"


@dataclass(frozen=True, slots=True)
class Compaction:
    """A compacted conversation.

    ``item``: the compaction item. ``chat``: the request that continues the conversation, and
    ``messages``: its messages. ``spent``: the usage of the request for the summary.
    """

    item: CompactionItem
    chat: ChatInput
    messages: Sequence[Message]
    usage: CompactionUsage
    spent: Usage


class Compactor:
    """Compacts conversations of the Responses API."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._seal = seal_of(service)

    def read(self, body: ResponsesRequest, thread: Thread) -> Thread:
        """Return the thread without its ``compaction_trigger``, and without compaction items.

        The last compaction item and the items before it are replaced by its sealed content.
        Raises `InvalidRequest` for a broken compaction item, and for a ``compaction_trigger`` that
        is not the last item.
        """
        thread = in_effect(thread, self._seal, owner_of(body.cache_salt))
        kinds = [item.type for item in thread.items]
        if TRIGGER not in kinds:
            return thread
        at = kinds.index(TRIGGER)
        if at < len(kinds) - 1:
            path = thread.paths[at]
            raise InvalidRequest(f"{path}: {TRIGGER} must be the last item", param=path)
        return Thread(thread.items[:at], thread.paths[:at])

    async def is_due(self, body: ResponsesRequest, thread: Thread, chat: ChatInput) -> bool:
        """Whether ``context_management`` asks for a compaction of the conversation now."""
        if not body.context_management or not _can_shorten(thread):
            return False
        summarizer = summarizer_of(self._service)
        threshold = summarizer.threshold(body.context_management[0].compact_threshold)
        return await summarizer.count(chat) > threshold

    async def compact(
        self, body: ResponsesRequest, thread: Thread, chat: ChatInput, *, keeps_last: bool
    ) -> Compaction:
        """Return the compacted conversation. Raises the errors of `Summarizer.summarize`.

        ``keeps_last``: keep the last turn, and summarize the items before it. Otherwise summarize
        all items, and keep the user's messages.
        """
        summarizer, most = summarizer_of(self._service), self._service.llm.built.max_model_len - 1
        num_before = await summarizer.count(chat)
        least, _ = await self._chat(body, _after(_compacted(thread, "", keeps_last), thread))
        if (num_left := await summarizer.count(least)) > most:
            raise PromptTooLong(num_left, most, param="messages", context=most + 1)
        end = last_turn(thread.items) if keeps_last else len(thread.items)
        head = Thread(thread.items[:end], thread.paths[:end])
        read, _ = await self._chat(body, head)
        # The breakpoints that let the conversation use the cache may all be in its last turn.
        summary = await summarizer.summarize(replace(read, cache=chat.cache))
        compacted, spent = _compacted(thread, summary.text, keeps_last), summary.usage
        shorter, messages = await self._chat(body, _after(compacted, thread))
        usage = CompactionUsage(
            original_input_tokens=num_before,
            compacted_input_tokens=await summarizer.count(shorter),
            input_tokens=spent.prompt_tokens,
            cached_tokens=spent.cached_tokens,
            output_tokens=spent.completion_tokens,
        )
        item = sealed(compacted, self._seal, owner_of(body.cache_salt))
        return Compaction(item, shorter, messages, usage, spent)

    async def explain(self, error: PromptTooLong, body: ResponsesRequest, thread: Thread) -> None:
        """Add to the error's message how many prompt tokens a compaction would leave."""
        summarizer, num_left = summarizer_of(self._service), None
        if _can_shorten(thread):
            compacted = _compacted(thread, "", keeps_last=True)
            shorter, _ = await self._chat(body, _after(compacted, thread))
            num_left = await summarizer.count(shorter)
        explain_compaction(error, num_left, summarizer, how=HOW)

    async def _chat(
        self, body: ResponsesRequest, thread: Thread
    ) -> tuple[ChatInput, list[Message]]:
        chat, _, messages = await self._service.apart(partial(make_chat_input, body, thread))
        return chat, messages


def _can_shorten(thread: Thread) -> bool:
    return has_more(thread.items[: last_turn(thread.items)])


def _compacted(thread: Thread, summary: str, keeps_last: bool) -> Compacted:
    """Return the content of a compaction item that replaces all items of a thread."""
    end = last_turn(thread.items) if keeps_last else len(thread.items)
    return Compacted(
        summary=summary,
        lead=lead_of(thread.items, end),
        tail=list(thread.items[end:]),
        keeps_users=not keeps_last,
    )


def _after(compacted: Compacted, thread: Thread) -> Thread:
    """Return a thread with all its items replaced by the content of a compaction item."""
    path = thread.paths[-1] if thread.paths else "input"
    return replaced(compacted, thread, Thread([], []), path=path)

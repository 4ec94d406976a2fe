"""TemplateWriter: renders conversations with a model's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...parsing.family import as_they_are
from ...parsing.formats.generic import GENERIC
from ...parsing.output_format import Syntax
from ...text.chat_template import MESSAGE_CHARS, TemplateRefusal, check_messages
from ...text.tokenizer import APART_BYTES, log_refusal
from ..engine_client import EngineClient
from .chat_input import ChatInput
from .conversation_tokens import Write
from .fit import Turn, fit, fit_as_text
from .seen_images import NO_IMAGES, SeenImages
from .shield import NO_SHIELD, ContentMarks, Shield
from .template_facts import CONTENTS, PROBES, TemplateFacts, probe

Messages = Sequence[Mapping[str, Any]]
TOOL_CHARS = 512  # processing a tool takes about as long as this many characters
CanSplice = Callable[[Messages, Write], Awaitable[bool]]


class TemplateWriter:
    """Renders conversations with a chat template, in a form that the template supports.

    ``can_splice`` is `ConversationTokens.can_splice`: whether token ids can replace a message.
    """

    def __init__(self, llm: EngineClient, syntax: Syntax, can_splice: CanSplice) -> None:
        self._llm, self._syntax, self._can_splice = llm, syntax, can_splice
        self._facts: TemplateFacts | None = None
        self._marks: ContentMarks | None = None
        self._finding = asyncio.Lock()

    async def facts(self) -> TemplateFacts:
        """Return the abilities of the template. The first call probes them."""
        if self._facts is None:
            async with self._finding:
                if self._facts is None:
                    self._facts = await self._found()
        return self._facts

    async def _found(self) -> TemplateFacts:
        tokenizer = self._llm.tokenizer
        if not tokenizer.chat_template:
            return TemplateFacts(empty_content=CONTENTS[0])
        facts = await probe(tokenizer.try_chat)
        write = partial(self._written, facts=facts, seen=NO_IMAGES, shield=NO_SHIELD)
        splices = {kind: await self._can_splice(PROBES[kind], write) for kind in PROBES}
        return replace(facts, splices=splices)

    async def shield(self, chat: ChatInput) -> Shield:
        """Return the `Shield` that treats special tokens in a conversation's contents as text."""
        if self._llm.config.special_tokens_in_text:
            return NO_SHIELD
        tokenizer = self._llm.tokenizer
        if self._marks is None:
            written = await tokenizer.try_chat(PROBES[False])
            find = partial(ContentMarks.of, tokenizer, self._syntax, written)
            # Runs in a thread, since it is slow for a vocabulary with many added tokens.
            self._marks = await tokenizer.apart(APART_BYTES + 1, find)
        work = partial(self._marks.shield, chat.messages, chat.shown_tools)
        return await tokenizer.apart(_size(chat), work)

    async def write(
        self, chat: ChatInput, seen: SeenImages = NO_IMAGES, shield: Shield = NO_SHIELD
    ) -> str:
        """Return the rendered text of a conversation, with the texts of its images.

        If the template fails, plainer forms of the conversation are tried. If it fails on all of
        them, raises `InvalidRequest`, which names the message and the cause.
        """
        check_messages(chat.messages)
        facts = await self.facts()
        failed: TemplateRefusal | None = None
        for form in _forms(facts):
            try:
                return await self._written(chat, facts=form, seen=seen, shield=shield)
            except TemplateRefusal as error:
                failed = failed or error
        assert failed is not None
        log_refusal(failed)
        raise failed

    async def _written(
        self, chat: ChatInput, *, facts: TemplateFacts, seen: SeenImages, shield: Shield
    ) -> str:
        work = partial(self._turns, chat, facts, shield)
        turns, tools = await self._llm.tokenizer.apart(_size(chat), work)
        messages = seen.messages([turn.message for turn in turns], in_parts=facts.parts_only)
        try:
            text = await self._llm.render_text(messages, chat.template, tools=tools, is_try=True)
        except TemplateRefusal as error:
            index = None if error.index is None else turns[error.index].index
            error.cause = shield.plain(error.cause)
            error.name(None if index is None else chat.path(index))
            raise
        return seen.expanded(shield.written(text))

    def _turns(
        self, chat: ChatInput, facts: TemplateFacts, shield: Shield
    ) -> tuple[list[Turn], list[Mapping[str, Any]]]:
        """Return the turns and the tools to pass to the template, in a form that it supports."""
        parser = self._syntax.tool_parser
        messages, tools = shield.messages(chat.messages), shield.tools(chat.shown_tools)
        if parser == GENERIC:
            return fit_as_text(messages, tools, facts), []
        turns = fit(messages, facts, parser)
        family = self._syntax.family
        if family is not None and family.prepare is not as_they_are:
            written = family.prepare([turn.message for turn in turns])
            turns = [Turn(each, turn.index) for turn, each in zip(turns, written, strict=True)]
        return turns, [tool.body for tool in tools]


def _forms(facts: TemplateFacts) -> Iterator[TemplateFacts]:
    """Yield the forms of a conversation to try, the plainest last."""
    yield facts
    plainest = facts.strictest()
    yield plainest
    yield plainest.without_calls()


def _size(chat: ChatInput) -> int:
    """Return the approximate amount of work for a conversation, as a number of characters."""
    size = MESSAGE_CHARS * len(chat.messages) + TOOL_CHARS * len(chat.tools)
    for message in chat.messages:
        if "content" in message and type(content := message["content"]) is str:
            size += len(content)
    return size

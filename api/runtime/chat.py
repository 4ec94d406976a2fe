"""ChatAnswer: the next message of a conversation, independent of the API.

A route converts its body to a `ChatInput`; `ChatClient` renders it, adds a grammar where the output
is structured, and returns a `ChatAnswer`, whose text is split into reasoning, content and tool
calls while it arrives. The APIs differ only in how they encode that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from typing import Any
from uuid import uuid4

from msgspec.structs import replace

from ...core.errors import InvalidRequest
from ...core.interface.request import Usage
from ..parsing.calls import with_numbered_ids, with_short_ids
from ..parsing.generic import GENERIC, as_text, needs_text
from ..parsing.harmony import with_thinking
from ..parsing.output_format import Syntax, check_tools
from ..parsing.output_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    OutputParser,
    Reasoning,
)
from ..structured.grammar_text import num_chars
from ..text.chat_template import check_messages
from ..types.results import CallDelta, Choice, Completion, TextDelta, ToolChoice
from ..types.sampling_params import SamplingParams
from .chat_input import ChatInput
from .engine_client import EngineClient
from .generation import Answer, Generation, each_of
from .preprocess import needs_closing, warm_params
from .prompt_history import PromptNote

MESSAGE_BYTES = 256  # to note a message takes about as long as to read so many
PROBE = "foretoken"  # a system text whose place in the prompt is looked for
TAIL_IDS = 32  # tokens at the end of a prompt, among which a thought may have been opened


class ChoiceReader:
    """Parses the text of one choice into reasoning, content and calls."""

    def __init__(self, parser: OutputParser, choice: ToolChoice) -> None:
        self.is_done = False
        self._parser = parser
        self._is_single = choice.is_single  # the choice ends with its first call
        self._has_text = choice.mode != "required"  # else it is what a cut left of a call's mark
        self._num_calls = 0
        self._is_called = False  # whether the last call is whole

    def read(self, delta: TextDelta) -> list[TextDelta]:
        """The deltas of a step: one, or more where content or reasoning follows a call.

        None once the choice has ended, even if the engine still generates.
        """
        if self.is_done:
            return []
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events = [*events, *self._parser.end()]
        parts = [replace(delta, text="", finish_reason=None, stop_reason=None)]
        for event in events:
            if isinstance(event, Content | Reasoning) and not _keeps_order(event, parts[-1]):
                parts.append(TextDelta(index=delta.index))
            if self._take(event, parts[-1]):
                self.is_done = True
                break
        self._end(parts[-1], delta)
        return parts

    def _end(self, last: TextDelta, delta: TextDelta) -> None:
        """Set the finish reason, if the choice ended: by its only call or by its text."""
        reason, last.stop_reason = delta.finish_reason, delta.stop_reason
        if self.is_done:
            last.finish_reason = "tool_calls"
        elif reason is not None:
            self.is_done = True
            last.finish_reason = "tool_calls" if self._ends_called(delta) else reason

    def _ends_called(self, delta: TextDelta) -> bool:
        """Whether the finish reason is tool_calls: not for a call that a stop string has cut."""
        was_cut = isinstance(delta.stop_reason, str) and not self._is_called
        return delta.finish_reason == "stop" and self._num_calls > 0 and not was_cut

    def _take(self, event: Event, part: TextDelta) -> bool:
        """Add a parsed event; returns whether the choice ends with it."""
        match event:
            case Reasoning(text):
                part.reasoning += text
            case Content(text):
                part.text += text if self._has_text else ""
            case CallBegin(name):
                call_id = f"call_{uuid4().hex[:24]}"
                part.tool_calls.append(CallDelta(index=self._num_calls, id=call_id, name=name))
                self._num_calls += 1
                self._is_called = False
            case CallArguments(text):
                self._call(part).arguments += text
            case CallEnd():
                self._call(part).is_done = self._is_called = True
                return self._is_single
        return False

    def _call(self, part: TextDelta) -> CallDelta:
        """The delta of the present call."""
        index = self._num_calls - 1
        if not part.tool_calls or part.tool_calls[-1].index != index:
            part.tool_calls.append(CallDelta(index=index))
        return part.tool_calls[-1]


def _keeps_order(event: Content | Reasoning, part: TextDelta) -> bool:
    """Whether the event may join the delta: its order is reasoning, content, calls."""
    return not part.tool_calls and (not part.text or isinstance(event, Content))


class ChatAnswer:
    """A running answer. The code that opens one must `close` it in a ``finally``."""

    def __init__(
        self, llm: EngineClient, answer: Answer, chat: ChatInput, parsers: Sequence[OutputParser]
    ) -> None:
        self._answer = answer
        self._llm = llm
        self._chat = chat
        self._readers = [ChoiceReader(parser, chat.tool_choice) for parser in parsers]

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        return self._answer.usage

    @property
    def num_choices(self) -> int:
        """Number of choices."""
        return len(self._readers)

    def num_tokens(self, index: int) -> int:
        """Tokens of one choice so far."""
        return self._answer.generations[index].usage.completion_tokens

    def close(self) -> None:
        """Abort requests that still run; may be called twice."""
        self._llm.forget(self._answer)

    async def deltas(self) -> AsyncGenerator[TextDelta]:
        """One delta per step and choice; several choices are interleaved."""
        try:
            async with aclosing(self._answer.deltas()) as deltas:
                async for delta in deltas:
                    for part in self._readers[delta.index].read(delta):
                        yield part
                        if part.finish_reason is not None:
                            self._answer.generations[delta.index].close()
        except InvalidRequest as error:
            _name_field(error, self._chat)
            raise

    async def collect(self) -> list[Choice]:
        """Read all of it and close it; the first choice that fails raises."""
        pairs = zip(self._readers, self._answer.generations, strict=True)
        try:
            return await each_of([_read(reader, generation) for reader, generation in pairs])
        except InvalidRequest as error:
            _name_field(error, self._chat)
            raise
        finally:
            self.close()

    async def completion(self) -> Completion:
        """Read all of it and close it, as one result."""
        return self._answer.completion(await self.collect())


async def _read(reader: ChoiceReader, generation: Generation) -> Choice:
    """Read one choice to its end; it is aborted where it ends before its text."""
    choice = Choice(index=generation.index)
    async for delta in generation:
        for part in reader.read(delta):
            choice.add(part)
        if reader.is_done:
            generation.close()
    return choice


class ChatClient:
    """Opens chats on a model. ``tool_parser`` and ``reasoning_parser``: see `Syntax.choose`."""

    def __init__(
        self, llm: EngineClient, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> None:
        self._llm = llm
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._has_system_role: bool | None = None  # of the template; None until a request asks

    @cached_property
    def syntax(self) -> Syntax:
        """The model's output format; available once the model is loaded."""
        tokenizer = self._llm.tokenizer
        return Syntax.choose(
            tokenizer.chat_template,
            tokenizer.vocab,
            tokenizer.special_ids,
            tool_parser=self._tool_parser,
            reasoning_parser=self._reasoning_parser,
        )

    async def open(
        self,
        chat: ChatInput,
        *,
        request_id: str | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ChatAnswer:
        """Render, unless that is done, and submit.

        Raises `InvalidRequest`, `QueueFull` and `EngineDead`.
        """
        self._check_tools(chat)
        if prompt_ids is None:
            prompt_ids = await self.render(chat)
        tools, tail = chat.callable_tools, self._tail(prompt_ids)
        try:
            answer = await self._llm.open(
                prompt_ids,
                self._constrained(chat, tail),
                request_id=request_id,
                shown_ids=self.syntax.shown_ids(tools=bool(tools)),
                cache=chat.cache,
                note=await self._note(chat),
                needs_closing=_needs_closing(chat),
            )
        except InvalidRequest as error:
            _name_field(error, chat)
            raise
        parsers = [self.syntax.parser(tools=tools, prompt_tail=tail) for _ in range(chat.params.n)]
        return ChatAnswer(self._llm, answer, chat, parsers)

    async def check(self, chat: ChatInput, *, is_prewarm: bool = False) -> Sequence[int]:
        """Render and check as `open` does, or as `prewarm`; returns the prompt's token ids.

        Nothing is submitted. Raises `InvalidRequest` and `EngineDead`.
        """
        self._check_tools(chat)
        prompt_ids = await self.render(chat)
        if is_prewarm:
            return await self._llm.check(prompt_ids, warm_params(chat.params))
        try:
            return await self._llm.check(
                prompt_ids,
                self._constrained(chat, self._tail(prompt_ids)),
                needs_closing=_needs_closing(chat),
            )
        except InvalidRequest as error:
            _name_field(error, chat)
            raise

    async def render(self, chat: ChatInput) -> list[int]:
        """Token ids of the conversation, tools included, up to where the answer begins."""
        messages, tools = chat.messages, [tool.body for tool in chat.tools]
        if self.syntax.tool_parser == "mistral":
            messages = with_short_ids(messages)
        elif self.syntax.tool_parser == "kimi":
            messages = with_numbered_ids(messages)
        elif self.syntax.tool_parser == "harmony":
            messages = with_thinking(messages)
        elif self.syntax.tool_parser == GENERIC:
            check_messages(messages)
            if needs_text(messages, chat.tools):
                messages, tools = await self._as_text(chat), []
        try:
            return await self._llm.render(messages, chat.template, tools=tools)
        except InvalidRequest as error:
            if error.param == "prompt":
                error.param = "messages"
            raise

    async def _as_text(self, chat: ChatInput) -> Sequence[Mapping[str, Any]]:
        """The conversation for a template that knows nothing of tools."""
        if self._has_system_role is None:
            self._has_system_role = await self._takes_system_messages()
        work = partial(as_text, chat.messages, chat.tools, has_system_role=self._has_system_role)
        size = num_chars([chat.messages, [tool.body for tool in chat.tools]])
        return await self._llm.tokenizer.apart(size, work)

    async def _takes_system_messages(self) -> bool:
        """Whether the template writes what a system message says."""
        probe = [{"role": "system", "content": PROBE}, {"role": "user", "content": "hi"}]
        try:
            token_ids = await self._llm.render(probe)
        except InvalidRequest:
            return False
        return PROBE in self._llm.tokenizer.decode(token_ids)

    async def _note(self, chat: ChatInput) -> PromptNote:
        """Compute the note of a prompt; in a thread for a long conversation."""
        size = MESSAGE_BYTES * len(chat.messages)
        return await self._llm.tokenizer.apart(size, lambda: chat.note)

    def _check_tools(self, chat: ChatInput) -> None:
        check_tools(chat.tools, chat.tool_choice)
        if chat.callable_tools and not self.syntax.has_tools:
            message = (
                "tools are not supported: the model has no chat template, or --tool-parser is none"
            )
            raise InvalidRequest(message, param="tools")

    def _constrained(self, chat: ChatInput, tail: str) -> SamplingParams:
        """Sampling parameters, with a grammar of the whole answer where one is needed."""
        grammar = self.syntax.constrain(
            chat.params, tools=chat.callable_tools, choice=chat.tool_choice, prompt_tail=tail
        )
        if grammar is None:
            return chat.params
        return dataclasses.replace(
            chat.params, grammar=grammar, json_schema=None, regex=None, choice=None
        )

    def _tail(self, prompt_ids: Sequence[int]) -> str:
        """The end of the prompt, which may open the reasoning of a model that thinks."""
        if self.syntax.thinking is None:
            return ""
        return self._llm.tokenizer.decode(prompt_ids[-TAIL_IDS:], skip_special_tokens=False)

    async def prewarm(
        self,
        chat: ChatInput,
        *,
        request_id: str | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> Completion:
        """Put a conversation into the cache; rendered, unless that is done. Raises as `open`.

        What comes of it tells whether it was given up; its one token is not to be told.
        """
        self._check_tools(chat)
        answer = await self._llm.open(
            await self.render(chat) if prompt_ids is None else prompt_ids,
            warm_params(chat.params),
            request_id=request_id,
            cache=chat.cache,
            note=await self._note(chat),
        )
        return await self._llm.finish(answer)


def _needs_closing(chat: ChatInput) -> bool:
    """Whether the answer must be complete to be useful: calls and JSON must."""
    return bool(chat.callable_tools) or needs_closing(chat.params)


def _name_field(error: InvalidRequest, chat: ChatInput) -> None:
    """Make errors in the block name the field of the body."""
    if error.param == "prompt":
        error.param = "messages"
    elif error.param == "grammar" and chat.params.grammar is None:  # what others became
        error.param = "tools" if chat.callable_tools else chat.params.structured_field or "tools"

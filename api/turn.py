"""Turn: the next message of a conversation, whatever the dialect it was asked for in.

A route reads its body into an `Ask`; `Turns` renders it, constrains what must have a form, and
gives a `Turn`, whose text is told apart into thinking, words and calls as it comes. What the
dialects differ in is only how they write that down.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal
from uuid import uuid4

from ..core.caching import DEFAULT_CACHE, CacheOptions
from ..core.errors import InvalidRequest
from ..core.params import SamplingParams
from ..core.request import Usage
from ..core.step import TokenLogprob
from .answer import Answer
from .host import Host
from .output.call_ids import with_short_ids
from .output.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    OutputParser,
    Thought,
    Words,
)
from .output.syntax import Syntax, check_tools
from .prompts import PromptNote, conversation_parts
from .results import TextDelta

TAIL_IDS = 32  # tokens at the end of a prompt, among which a thought may have been opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. ``parameters`` is a JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # None: whatever object
    strict: bool = False  # arguments must be valid, even when the model need not call at all

    @property
    def body(self) -> Mapping[str, Any]:
        """In OpenAI's shape."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether the model calls a tool: as it likes, not at all, at least one, or one by name."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  # with "required": this one
    parallel: bool = True  # False: at most one call
    allowed: frozenset[str] | None = None  # those that may be called; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a route wants to be answered.

    ``messages`` are in the plain form of chat templates (`plain.plain_messages`). The form of the
    words is asked for in ``params`` (json_schema, regex, grammar, choice).
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    template: Mapping[str, object] = field(default_factory=dict)  # options of the chat template
    cache: CacheOptions = DEFAULT_CACHE
    cache_key: str | None = None  # ``prompt_cache_key``: told when a miss is explained

    @property
    def note(self) -> PromptNote:
        """What is remembered of it, to explain why later prompts miss the cache."""
        parts = conversation_parts(self.messages, [tool.body for tool in self.tools])
        return PromptNote(parts=parts, cache_key=self.cache_key)

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """Those that the model may call in this turn."""
        choice = self.tool_choice
        if choice.mode == "none" or choice.allowed is None:
            return () if choice.mode == "none" else self.tools
        return [tool for tool in self.tools if tool.name in choice.allowed]


@dataclass(slots=True, kw_only=True)
class Call:
    """A call of a tool, or what a delta adds to one."""

    index: int  # among the calls of its choice
    id: str = ""  # in a delta: in its first one alone, as the name is
    name: str = ""
    arguments: str = ""  # JSON text
    is_done: bool = False


@dataclass(slots=True, kw_only=True)
class TurnDelta:
    """What one step adds to a choice. ``finish_reason``: as `TurnChoice` has it, in the last."""

    index: int = 0
    thought: str = ""
    words: str = ""
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # as `TextDelta` has them
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class TurnChoice:
    """One of n answers. ``finish_reason``: "stop", "length", "abort" or "tool_calls"."""

    index: int
    thought: str = ""
    words: str = ""
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_thought_tokens: int = 0  # of the steps that brought thoughts
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None

    def add(self, delta: TurnDelta) -> None:
        """Append what a delta brings."""
        self.thought += delta.thought
        self.words += delta.words
        self.token_ids += delta.token_ids
        self.num_thought_tokens += len(delta.token_ids) if delta.thought else 0
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        self.prompt_logprobs += delta.prompt_logprobs
        for call in delta.calls:
            if call.index == len(self.calls):
                self.calls.append(replace(call))
            else:
                self.calls[call.index].arguments += call.arguments
                self.calls[call.index].is_done = call.is_done
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Turn:
    """An answer on its way. Whoever opens one must `close` it in a ``finally``."""

    def __init__(
        self, llm: Host, answer: Answer, ask: Ask, parsers: Sequence[OutputParser]
    ) -> None:
        self.answer = answer
        self._llm = llm
        self._readers = [
            _Reader(index, parser, ask.tool_choice) for index, parser in enumerate(parsers)
        ]

    @property
    def usage(self) -> Usage:
        """What it cost so far."""
        return self.answer.usage

    @property
    def num_choices(self) -> int:
        """How many answers there are."""
        return len(self._readers)

    def num_tokens(self, index: int) -> int:
        """Tokens of one choice so far."""
        return self.answer.generations[index].usage.completion_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the rendered conversation."""
        return len(self.answer.prompt_token_ids)

    def close(self) -> None:
        """Abort what still runs; may be called twice."""
        self._llm.forget(self.answer)

    async def deltas(self) -> AsyncGenerator[TurnDelta]:
        """One delta per step and choice; those of several choices come mixed."""
        async with aclosing(self.answer.deltas()) as deltas:
            async for delta in deltas:
                reader = self._readers[delta.index]
                if reader.is_done:
                    continue
                turned = reader.read(delta)
                yield turned
                if turned.finish_reason is not None:
                    self.answer.generations[delta.index].close()

    async def collect(self) -> list[TurnChoice]:
        """Read all of it and close it."""
        choices = [TurnChoice(index=index) for index in range(len(self._readers))]
        try:
            async with aclosing(self.deltas()) as deltas:
                async for delta in deltas:
                    choices[delta.index].add(delta)
        finally:
            self.close()
        return choices


class Turns:
    """Opens turns on a model. ``tool_parser`` and ``reasoning_parser``: see `Syntax.choose`."""

    def __init__(
        self, llm: Host, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> None:
        self._llm = llm
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser

    @cached_property
    def syntax(self) -> Syntax:
        """How the model writes thoughts and calls; only once it is loaded."""
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
        ask: Ask,
        *,
        request_id: str | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> Turn:
        """Render, unless that is done, and submit.

        Raises `InvalidRequest`, `QueueFull` and `EngineDead`.
        """
        self._check_tools(ask)
        if prompt_ids is None:
            prompt_ids = await self.render(ask)
        tools, tail = ask.callable_tools, self._tail(prompt_ids)
        try:
            answer = await self._llm.open(
                prompt_ids,
                self._constrained(ask, tail),
                request_id=request_id,
                shown_ids=self.syntax.shown_ids(tools=bool(tools)),
                cache=ask.cache,
                note=ask.note,
            )
        except InvalidRequest as error:
            if error.param == "prompt":  # which the bodies call otherwise
                error.param = "messages"
            elif error.param == "grammar" and ask.params.grammar is None:
                error.param = "tools"  # the grammar that they became
            raise
        parsers = [self.syntax.parser(tools=tools, prompt_tail=tail) for _ in range(ask.params.n)]
        return Turn(self._llm, answer, ask, parsers)

    async def render(self, ask: Ask) -> list[int]:
        """Token ids of the conversation, tools included, up to where the answer begins."""
        messages = ask.messages
        if self.syntax.tool_parser == "mistral":
            messages = with_short_ids(messages)
        try:
            return await self._llm.render(
                messages, ask.template, tools=[tool.body for tool in ask.tools]
            )
        except InvalidRequest as error:
            if error.param == "prompt":
                error.param = "messages"
            raise

    def _check_tools(self, ask: Ask) -> None:
        check_tools(ask.tools, ask.tool_choice)
        if ask.callable_tools and not self.syntax.has_tools:
            message = "the model's chat template has no tools (a --tool-parser may be named)"
            raise InvalidRequest(message, param="tools")

    def _constrained(self, ask: Ask, tail: str) -> SamplingParams:
        """The parameters, with one grammar for thoughts, calls and words where one is needed."""
        grammar = self.syntax.constrain(
            ask.params, tools=ask.callable_tools, choice=ask.tool_choice, prompt_tail=tail
        )
        if grammar is None:
            return ask.params
        return replace(ask.params, grammar=grammar, json_schema=None, regex=None, choice=None)

    def _tail(self, prompt_ids: Sequence[int]) -> str:
        """The end of the prompt, which may have opened a thought."""
        return self._llm.tokenizer.decode(prompt_ids[-TAIL_IDS:], skip_special_tokens=False)


class _Reader:
    """Turns the text of one choice into parts."""

    def __init__(self, index: int, parser: OutputParser, choice: ToolChoice) -> None:
        self.is_done = False
        self._index = index
        self._parser = parser
        self._is_single = not choice.parallel  # the choice ends with its first call
        self._has_words = choice.mode != "required"  # else it is what a cut left of a call's mark
        self._num_calls = 0

    def read(self, delta: TextDelta) -> TurnDelta:
        events = list(self._parser.feed(delta.text))
        reason = delta.finish_reason
        if reason is not None:
            events += self._parser.end()
        turned = TurnDelta(
            index=self._index,
            token_ids=delta.token_ids,
            sources=delta.sources,
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
            stop_reason=delta.stop_reason,
        )
        for event in events:
            self._take(event, turned)
            if self.is_done:
                break
        if self.is_done:
            turned.finish_reason = "tool_calls"
        elif reason is not None:
            self.is_done = True
            turned.finish_reason = "tool_calls" if reason == "stop" and self._num_calls else reason
        return turned

    def _take(self, event: Event, turned: TurnDelta) -> None:
        match event:
            case Thought(text):
                turned.thought += text
            case Words(text):
                turned.words += text if self._has_words else ""
            case CallBegin(name):
                call_id = f"call_{uuid4().hex[:24]}"
                turned.calls.append(Call(index=self._num_calls, id=call_id, name=name))
                self._num_calls += 1
            case CallArguments(text):
                self._call(turned).arguments += text
            case CallEnd():
                self._call(turned).is_done = True
                self.is_done = self._is_single

    def _call(self, turned: TurnDelta) -> Call:
        """The delta of the call under way."""
        index = self._num_calls - 1
        if not turned.calls or turned.calls[-1].index != index:
            turned.calls.append(Call(index=index))
        return turned.calls[-1]

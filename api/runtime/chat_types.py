"""Chat requests and their results, independent of the API that they came through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from ...core.interface.output import TokenLogprob
from ...core.interface.request import DEFAULT_CACHE, CacheOptions
from ..types.results import Tool, ToolChoice
from ..types.sampling_params import SamplingParams
from .prompt_history import PromptNote, conversation_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A chat request.

    ``messages`` are in the plain shape of chat templates (`openai.schema.plain_messages`);
    ``params`` hold what asks for structured output (json_schema, regex, grammar, choice).
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    template: Mapping[str, object] = field(default_factory=dict)  # options of the chat template
    cache: CacheOptions = DEFAULT_CACHE
    cache_key: str | None = None  # ``prompt_cache_key``: reported when a cache miss is explained

    @property
    def note(self) -> PromptNote:
        """The record for explanations of later cache misses."""
        parts = conversation_parts(self.messages, [tool.body for tool in self.tools])
        return PromptNote(parts=parts, cache_key=self.cache_key)

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """The tools that the model may call in this turn."""
        choice = self.tool_choice
        if choice.mode == "none" or choice.allowed is None:
            return () if choice.mode == "none" else self.tools
        return [tool for tool in self.tools if tool.name in choice.allowed]


class Call(Struct, kw_only=True):
    """A tool call, or the addition of a delta to one."""

    index: int  # among the calls of its choice
    id: str = ""  # in a delta: in its first one alone, as the name is
    name: str = ""
    arguments: str = ""  # JSON text
    is_done: bool = False


class TurnDelta(Struct, kw_only=True):
    """One step's addition to a choice. ``finish_reason``: as `TurnChoice` has it, in the last."""

    index: int = 0
    reasoning: str = ""
    words: str = ""
    calls: list[Call] = []
    token_ids: list[int] = []
    sources: list[str] = []  # as `TextDelta` has them
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class TurnChoice(Struct, kw_only=True):
    """One of n answers. ``finish_reason``: "stop", "length", "abort" or "tool_calls"."""

    index: int
    reasoning: str = ""
    words: str = ""
    calls: list[Call] = []
    token_ids: list[int] = []
    num_reasoning_tokens: int = 0  # of the steps that brought thoughts
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] = []
    finish_reason: str = ""
    stop_reason: int | str | None = None

    def add(self, delta: TurnDelta) -> None:
        """Append a delta."""
        self.reasoning += delta.reasoning
        self.words += delta.words
        self.token_ids += delta.token_ids
        self.num_reasoning_tokens += len(delta.token_ids) if delta.reasoning else 0
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        for call in delta.calls:
            if call.index == len(self.calls):
                self.calls.append(copy(call))
            else:
                self.calls[call.index].arguments += call.arguments
                self.calls[call.index].is_done = call.is_done
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

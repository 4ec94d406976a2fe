"""What is asked of a turn, and what comes of it, in no dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.interface.request import DEFAULT_CACHE, CacheOptions
from ...core.interface.step import TokenLogprob
from ..types.results import Tool, ToolChoice
from ..types.sampling_params import SamplingParams
from .prompt_history import PromptNote, conversation_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a route wants to be answered.

    ``messages`` are in the plain form of chat templates (`plain.plain_messages`). The form of the
    words is asked for in ``params`` (json_schema, regex, grammar, choice).
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
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
    reasoning: str = ""
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
    reasoning: str = ""
    words: str = ""
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_reasoning_tokens: int = 0  # of the steps that brought thoughts
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None

    def add(self, delta: TurnDelta) -> None:
        """Append what a delta brings."""
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
                self.calls.append(replace(call))
            else:
                self.calls[call.index].arguments += call.arguments
                self.calls[call.index].is_done = call.is_done
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

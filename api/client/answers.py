"""What `Client` gives back, made of what came over the wire."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...core.interface.request import Usage
from ..types.results import CallDelta, ToolCall, message_of

Raw = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    """One of the n answers to a conversation. ``logprobs`` are as the server writes them."""

    index: int
    text: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = ""  # "stop", "length" or "tool_calls"
    stop_reason: int | str | None = None
    logprobs: Raw | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to its conversation."""
        return message_of(self.text, self.reasoning, self.tool_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The next message of a conversation. The plain attributes are those of the first choice.

    ``usage`` is the engine's own, without its times; ``raw`` is the whole body.
    """

    id: str
    model: str
    choices: list[ChatChoice]
    usage: Usage
    raw: Raw

    @property
    def text(self) -> str:
        """What the model says."""
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        """What it thought before."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """What it wants called."""
        return self.choices[0].tool_calls

    @property
    def finish_reason(self) -> str:
        """ "stop", "length" or "tool_calls"."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token id or stop string that ended it, if one did."""
        return self.choices[0].stop_reason

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to its conversation."""
        return self.choices[0].message


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch(ChatChoice):
    """One branch; ``usage`` is its own."""

    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchesAnswer:
    """Several continuations of one beginning, in their order; ``usage`` is that of all."""

    id: str
    model: str
    branches: list[Branch]
    usage: Usage
    raw: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """What one step adds to a choice; the last one of a stream carries the usage alone."""

    index: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: list[CallDelta] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Raw | None = None
    usage: Usage | None = None
    raw: Raw = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChoice:
    """One continuation of a prompt."""

    index: int
    text: str
    finish_reason: str = ""  # "stop" or "length"
    stop_reason: int | str | None = None
    logprobs: Raw | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAnswer:
    """The continuations of one or of several prompts, in their order."""

    id: str
    model: str
    choices: list[TextChoice]
    usage: Usage
    raw: Raw

    @property
    def text(self) -> str:
        """The first continuation."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str:
        """ "stop" or "length"."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token id or stop string that ended it, if one did."""
        return self.choices[0].stop_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDelta:
    """What one step adds to a continuation; the last one of a stream carries the usage alone."""

    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Raw | None = None
    usage: Usage | None = None
    raw: Raw = field(default_factory=dict)


def message_from(deltas: Iterable[ChatDelta]) -> dict[str, Any]:
    """The message that the deltas of the first choice add up to."""
    text = reasoning = ""
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        if delta.index == 0:
            text, reasoning = text + delta.text, reasoning + delta.reasoning
            for call in delta.tool_calls:
                calls[call.index] = _added(calls.get(call.index), call)
    whole = [ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in calls.values()]
    return message_of(text, reasoning, whole)


def _added(known: CallDelta | None, new: CallDelta) -> CallDelta:
    if known is None:
        return new
    return CallDelta(
        index=known.index, id=known.id, name=known.name, arguments=known.arguments + new.arguments
    )

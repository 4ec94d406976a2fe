"""What `Client` gives back, made of what came over the wire."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...core.request import Usage
from ..results import CallDelta, ToolCall, message_of
from ..wire import (
    BranchBody,
    BranchesBody,
    CallBody,
    ChatBody,
    ChatChoiceBody,
    ChunkBody,
    ChunkChoiceBody,
    PromptDetails,
    SpeculationUsage,
    TextBody,
    UsageBody,
)
from .errors import ServerFailed, error_of_event

Raw = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    """One of the n answers to a conversation. ``logprobs`` are as the server writes them."""

    index: int
    text: str
    thought: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = ""  # "stop", "length" or "tool_calls"
    stop_reason: int | str | None = None
    logprobs: Raw | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to its conversation."""
        return message_of(self.text, self.thought, self.tool_calls)


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
    def thought(self) -> str:
        """What it thought before."""
        return self.choices[0].thought

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
    thought: str = ""
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


# -- whole answers ------------------------------------------------------------------------------


def read_chat(data: bytes) -> ChatAnswer:
    """Of the body of /v1/chat/completions."""
    body = msgspec.json.decode(data, type=ChatBody)
    return ChatAnswer(
        id=body.id,
        model=body.model,
        choices=[_chat_choice(choice) for choice in _filled(body.choices)],
        usage=read_usage(body.usage),
        raw=msgspec.json.decode(data),
    )


def _filled(choices: list[Any]) -> list[Any]:
    if not choices:
        raise ServerFailed("the answer has no choices")
    return choices


def _chat_choice(choice: ChatChoiceBody) -> ChatChoice:
    return ChatChoice(**_parts(choice))


def _parts(choice: ChatChoiceBody) -> dict[str, Any]:
    message = choice.message
    return {
        "index": choice.index,
        "text": message.content or "",
        "thought": message.reasoning_content or "",
        "tool_calls": [_call(call) for call in message.tool_calls or ()],
        "finish_reason": choice.finish_reason or "",
        "stop_reason": choice.stop_reason,
        "logprobs": choice.logprobs,
    }


def _call(call: CallBody) -> ToolCall:
    delta = _call_delta(call)
    return ToolCall(id=delta.id, name=delta.name, arguments=delta.arguments)


def read_branches(data: bytes) -> BranchesAnswer:
    """Of the body of /v1/branches."""
    body = msgspec.json.decode(data, type=BranchesBody)
    return BranchesAnswer(
        id=body.id,
        model=body.model,
        branches=[_branch(branch) for branch in body.branches],
        usage=read_usage(body.usage),
        raw=msgspec.json.decode(data),
    )


def _branch(branch: BranchBody) -> Branch:
    return Branch(**_parts(branch), usage=read_usage(branch.usage))


def read_completion(data: bytes) -> TextAnswer:
    """Of the body of /v1/completions."""
    body = msgspec.json.decode(data, type=TextBody)
    choices = [
        TextChoice(
            index=choice.index,
            text=choice.text,
            finish_reason=choice.finish_reason or "",
            stop_reason=choice.stop_reason,
            logprobs=choice.logprobs,
        )
        for choice in _filled(body.choices)
    ]
    usage = read_usage(body.usage)
    raw = msgspec.json.decode(data)
    return TextAnswer(id=body.id, model=body.model, choices=choices, usage=usage, raw=raw)


def read_usage(body: UsageBody | None) -> Usage:
    """The engine's own words for what it cost."""
    body = body or UsageBody()
    details = body.prompt_tokens_details or PromptDetails()
    speculation = body.speculation or SpeculationUsage()
    return Usage(
        prompt_tokens=body.prompt_tokens,
        cached_tokens=details.cached_tokens,
        cache_write_tokens=details.cache_write_tokens,
        completion_tokens=body.completion_tokens,
        **msgspec.structs.asdict(speculation),
    )


# -- events -------------------------------------------------------------------------------------


def read_chunk(data: bytes) -> list[ChatDelta]:
    """Of one event of a streamed conversation; raises the error that an event may carry."""
    body = msgspec.json.decode(data, type=ChunkBody)
    if body.error is not None:
        raise error_of_event(body.error)
    raw: Raw = msgspec.json.decode(data)
    deltas = [_chat_delta(choice, raw) for choice in body.choices]
    if body.usage is not None:
        deltas.append(ChatDelta(usage=read_usage(body.usage), raw=raw))
    return deltas


def _chat_delta(choice: ChunkChoiceBody, raw: Raw) -> ChatDelta:
    delta = choice.delta
    return ChatDelta(
        index=choice.index,
        text=delta.content or "",
        thought=delta.reasoning_content or "",
        tool_calls=[_call_delta(call) for call in delta.tool_calls or ()],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=choice.logprobs,
        raw=raw,
    )


def _call_delta(call: CallBody) -> CallDelta:
    name = call.function.name if call.function is not None else None
    arguments = call.function.arguments if call.function is not None else None
    return CallDelta(index=call.index, id=call.id or "", name=name or "", arguments=arguments or "")


def read_text_chunk(data: bytes) -> list[CompletionDelta]:
    """Of one event of a streamed continuation; raises the error that an event may carry."""
    body = msgspec.json.decode(data, type=TextBody)
    if body.error is not None:
        raise error_of_event(body.error)
    raw: Raw = msgspec.json.decode(data)
    deltas = [
        CompletionDelta(
            index=choice.index,
            text=choice.text,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            logprobs=choice.logprobs,
            raw=raw,
        )
        for choice in body.choices
    ]
    if body.usage is not None:
        deltas.append(CompletionDelta(usage=read_usage(body.usage), raw=raw))
    return deltas


def message_from(deltas: Iterable[ChatDelta]) -> dict[str, Any]:
    """The message that the deltas of the first choice add up to."""
    text = thought = ""
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        if delta.index == 0:
            text, thought = text + delta.text, thought + delta.thought
            for call in delta.tool_calls:
                calls[call.index] = _added(calls.get(call.index), call)
    whole = [ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in calls.values()]
    return message_of(text, thought, whole)


def _added(known: CallDelta | None, new: CallDelta) -> CallDelta:
    if known is None:
        return new
    return CallDelta(
        index=known.index, id=known.id, name=known.name, arguments=known.arguments + new.arguments
    )

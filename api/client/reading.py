"""What came over the wire, made into what `Client` gives back."""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.interface.request import Usage
from ..openai.wire import (
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
from ..types.results import CallDelta, ToolCall
from .answers import (
    Branch,
    BranchesAnswer,
    ChatAnswer,
    ChatChoice,
    ChatDelta,
    CompletionDelta,
    Raw,
    TextAnswer,
    TextChoice,
)
from .errors import ServerFailed, error_of_event

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
        "reasoning": message.reasoning_content or "",
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
        closed_early=body.closed_early,
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
        reasoning=delta.reasoning_content or "",
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

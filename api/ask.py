"""Conversations of the Python interface: a caller's words become an Ask, a Turn a Completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..core.errors import InvalidRequest
from ..core.interface.step import TokenLogprob
from .forms import NamedChoice, Tools, read_choice, read_tools
from .intake import Conversation, Message, is_one_conversation
from .results import CallDelta, Choice, Completion, TextDelta, ToolCall
from .sampling_params import SamplingParams
from .talk import Ask, Tool, ToolChoice, TurnChoice, TurnDelta
from .turn import Turn

GivenTools = Sequence[Mapping[str, Any]]
"""Tools as OpenAI's clients write them."""
GivenChoice = Literal["auto", "none", "required"] | Mapping[str, Any] | None
"""``tool_choice`` likewise."""


class Asking:
    """What a caller of `chat` wants besides the conversation; raises `InvalidRequest`."""

    def __init__(
        self, tools: GivenTools | None, choice: GivenChoice, *, is_parallel: bool = True
    ) -> None:
        self._tools = _tools(tools)
        self._choice = _choice(choice, self._tools, is_parallel=is_parallel)

    def ask(self, messages: Conversation, params: SamplingParams) -> Ask:
        """The whole question."""
        is_one_conversation(messages)  # for its errors
        return Ask(
            messages=[_plain(message) for message in messages],
            params=params,
            tools=self._tools,
            tool_choice=self._choice,
        )


def _tools(given: GivenTools | None) -> list[Tool]:
    try:
        return read_tools(msgspec.convert(list(given or ()), Tools))
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"tools: {error}", param="tools") from None


def _choice(given: GivenChoice, tools: Sequence[Tool], *, is_parallel: bool) -> ToolChoice:
    known = Literal["auto", "none", "required"] | NamedChoice | None
    try:
        choice: Any = msgspec.convert(given, known)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"tool_choice: {error}", param="tool_choice") from None
    return read_choice(choice, tools, parallel=is_parallel)


def _plain(message: Message) -> Message:
    """Calls of earlier answers as templates want them; the rest is the template's to judge."""
    if not isinstance(message, Mapping) or not message.get("tool_calls"):
        return message
    from .plain import plain_call  # brings starlette

    calls = [plain_call(call, "messages") for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


async def completion_of(turn: Turn) -> Completion:
    """Read all of a turn and close it."""
    choices = await turn.collect()
    answer = turn.answer
    return Completion(
        request_id=answer.request_id,
        prompt_token_ids=list(answer.prompt_token_ids),
        choices=[_whole(choice) for choice in choices],
        usage=turn.usage,
        prompt_logprobs=_prompt_logprobs(answer.params, choices[0].prompt_logprobs),
    )


def _prompt_logprobs(
    params: SamplingParams, found: list[TokenLogprob]
) -> list[TokenLogprob | None] | None:
    return None if params.prompt_logprobs is None else [None, *found]


def _whole(choice: TurnChoice) -> Choice:
    calls = [ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in choice.calls]
    return Choice(
        index=choice.index,
        text=choice.words,
        token_ids=choice.token_ids,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=choice.logprobs,
        reasoning=choice.reasoning,
        tool_calls=calls,
    )


def text_delta(delta: TurnDelta) -> TextDelta:
    """One step of a turn."""
    calls = [
        CallDelta(index=c.index, id=c.id, name=c.name, arguments=c.arguments) for c in delta.calls
    ]
    return TextDelta(
        text=delta.words,
        token_ids=delta.token_ids,
        sources=delta.sources,
        index=delta.index,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        logprobs=delta.logprobs,
        prompt_logprobs=delta.prompt_logprobs,
        reasoning=delta.reasoning,
        tool_calls=calls,
    )

"""Types of the options of the SDK's calls, and the checks of a conversation's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from ...core.errors import InvalidRequest
from ..runtime.conversation.chat_input import ChatInput, Handle
from ..runtime.conversation.messages import num_system, one_system, read_message
from ..runtime.conversation.tools import NamedChoice, Tools, read_choice, read_tools
from ..runtime.preprocess import Conversation, is_one_conversation
from ..text.chat_template import check_messages
from ..types.results import Tool, ToolChoice
from ..types.sampling_params import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None
RequestIds = str | Sequence[str] | None


GivenTools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's form."""
GivenChoice = Literal["auto", "none", "required"] | Mapping[str, Any] | None
"""``tool_choice`` in OpenAI's form."""


class OneCall(TypedDict, total=False):
    """Options of a call with one prompt."""

    request_id: str | None
    lora: str | None


class ManyCalls(TypedDict, total=False):
    """Options of a call with a list of prompts."""

    request_id: Sequence[str] | None
    lora: str | None


class ChatFields(TypedDict, total=False):
    """Options that only calls with conversations have."""

    tools: GivenTools | None
    tool_choice: GivenChoice
    parallel_tool_calls: bool


class OneChat(OneCall, ChatFields, total=False):
    """Options of a call with one conversation."""


class ManyChats(ManyCalls, ChatFields, total=False):
    """Options of a call with a list of conversations."""


class PooledCall(TypedDict, total=False):
    """Options of calls that return vectors or scores."""

    cache_salt: str | None
    lora: str | None


class EmbedCall(PooledCall, total=False):
    """Options of `embed`."""

    dimensions: int | None


class RerankCall(PooledCall, total=False):
    """Options of `rerank`."""

    top_n: int | None
    instruct: str | None


class VerifyCall(ChatFields, total=False):
    """Options of `verify`."""

    finish_reason: str | None
    index: int
    checked_from: int
    lora: str | None


class ChatOptions:
    """Checked options of `chat`. Constructing them raises `InvalidRequest` for invalid ones."""

    def __init__(
        self, tools: GivenTools | None, choice: GivenChoice, *, is_parallel: bool = True
    ) -> None:
        self._tools = _tools(tools)
        self._choice = _choice(choice, self._tools, is_parallel=is_parallel)

    def chat_input(self, messages: Conversation, params: SamplingParams) -> ChatInput:
        """Return the chat request for a conversation. Raises `InvalidRequest`."""
        is_one_conversation(messages)  # raises InvalidRequest for other types
        check_messages(messages)
        read = [read_message(each, f"messages[{index}]") for index, each in enumerate(messages)]
        return ChatInput(
            messages=one_system([message for message, _ in read]),
            images=[image for _, images in read for image in images],
            params=params,
            handles=_handles(messages),
            paths=[f"messages[{index}]" for index in _places(messages)],
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


def _handles(messages: Conversation) -> list[Handle]:
    """Return the token ids of earlier answers, which `Completion.message` put into messages."""
    return [
        Handle(place, messages[index]["token_ids"], f"messages[{index}].token_ids")
        for place, index in enumerate(_places(messages))
        if messages[index].get("token_ids") is not None
    ]


def _places(messages: Conversation) -> list[int]:
    """Return the indices of the messages that remain after merging leading system messages."""
    shift = max(0, num_system(message["role"] for message in messages) - 1)
    every = range(len(messages))
    return [*every[:1], *every[shift + 1 :]]

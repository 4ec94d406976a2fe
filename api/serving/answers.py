"""Parts of answers that all APIs share: speculation, prompts that are only cached, aborts."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ...core.interface.request import Usage
from ..runtime.conversation.chat_input import ChatInput
from ..runtime.conversation.conversation_tokens import PromptTokens
from ..types.results import Completion
from .errors import deadline_exceeded, unavailable
from .serving_context import SHUTTING_DOWN, Service

Free = dict[str, Any]
"""An object whose fields are not fixed."""


class SpeculationUsage(Struct, kw_only=True):
    """``usage.speculation``: draft tokens proposed and accepted."""

    proposed_tokens: int
    accepted_tokens: int
    verify_steps: int
    tree_steps: int
    accepted_by_source: dict[str, int]
    proposed_by_source: dict[str, int]
    steps_by_accepted: dict[int, int]


def speculation_body(usage: Usage) -> SpeculationUsage:
    """``usage.speculation``: draft tokens proposed and accepted, by source."""
    return SpeculationUsage(
        proposed_tokens=usage.proposed_tokens,
        accepted_tokens=usage.accepted_tokens,
        verify_steps=usage.verify_steps,
        tree_steps=usage.tree_steps,
        accepted_by_source=usage.accepted_by_source,
        proposed_by_source=usage.proposed_by_source,
        steps_by_accepted=dict(sorted(usage.steps_by_accepted.items())),
    )


async def prewarm(
    service: Service, chat: ChatInput, *, request_id: str, prompt: PromptTokens | None = None
) -> Usage:
    """Put a conversation into the cache without an answer; raises as `ChatClient.open`."""
    done = await service.chat.prewarm(chat, request_id=request_id, prompt=prompt)
    return warm_usage(service, done)


def warm_usage(service: Service, done: Completion) -> Usage:
    """Usage of a prompt that was put into the cache; raises `ApiError` if it was aborted."""
    refuse_aborted(service, done.choices[0].finish_reason, 0)
    return done.usage


def refuse_aborted(service: Service, reason: str, num_tokens: int) -> None:
    """Raise `ApiError` for an answer aborted before its first token, or by a shutdown."""
    if reason != "abort":
        return
    if service.draining:
        raise unavailable(SHUTTING_DOWN)
    if num_tokens == 0:
        raise deadline_exceeded("the request's deadline passed before its first token")

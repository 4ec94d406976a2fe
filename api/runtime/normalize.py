"""``--normalize``: remove parts of system prompts that clients change in each request.

A prompt is cached from its beginning, so one new number in its first line loses the whole cache
hit. Each rule names the client and the part of a line that is removed; the rest stays unchanged.
Rules apply to system messages only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .chat import ChatClient
from .chat_input import ChatInput
from .conversation_tokens import PromptTokens

LINE = re.MULTILINE | re.IGNORECASE
# Marks of a list, a quotation or an emphasis. Bounded and of one line: a pattern that could go on
# over the next ones would take time with the square of their number, and what stands there.
MARKS = r"[^\w\n]{0,16}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern of one line, its replacement, and the reason."""

    name: str
    pattern: re.Pattern[str]
    instead: str
    why: str


RULES = (
    Rule(
        "billing-header",
        re.compile(r"^x-anthropic-billing-header:.*(?:\n|\Z)", LINE),
        "",
        "Claude Code's first system block counts and signs each request; the line goes",
    ),
    Rule(
        "time-of-day",
        re.compile(
            rf"^(?P<head>{MARKS}(?:the )?current (?:date(?: and |/| ?& ?)?)?time(?: is)?\b"
            r"[^\d\n]{0,40}\d{4}-\d\d-\d\d)[T ]"
            r"\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?",
            LINE,
        ),
        r"\g<head>",
        'agents write "Current time: 2026-11-21T13:34:26Z"; the date stays',
    ),
    Rule(
        "request-id",
        re.compile(
            rf"^{MARKS}(?:x-)?(?:request|trace|correlation)[-_ ]id\b"
            rf"(?:[^\w\n]|_){{1,4}}[\w-]{{8,}}{MARKS}(?:\n|\Z)",
            LINE,
        ),
        "",
        "gateways stamp the id of each request; the line goes",
    ),
)


class NormalizingChatClient(ChatClient):
    """`ChatClient` with normalized system prompts, for every API."""

    async def render(self, chat: ChatInput) -> PromptTokens:
        """Token ids of the normalized conversation."""
        return await super().render(replace(chat, messages=normalized(chat.messages)))


def normalized(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with normalized system messages."""
    return [_normalized(message) for message in messages]


def _normalized(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("role") != "system" or not isinstance(message.get("content"), str):
        return message
    return {**message, "content": steady(message["content"])}


def steady(text: str) -> str:
    """A system text under all rules."""
    for rule in RULES:
        text = rule.pattern.sub(rule.instead, text)
    return text

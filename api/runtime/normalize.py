"""``--normalize``: what clients change in their system text from request to request is left out.

A prompt is cached from its beginning, so one new number in its first line costs all of it. Each
rule names what writes the line and what of it goes; the rest stays as it is, byte for byte. Only
system messages are looked at: they stand first, and no rule may touch what a user says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .chat import Turns
from .chat_types import Ask

LINE = re.MULTILINE | re.IGNORECASE
# Marks of a list, a quotation or an emphasis. Bounded and of one line: a pattern that could go on
# over the next ones would take time with the square of their number, and what stands there.
MARKS = r"[^\w\n]{0,16}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern of one line, what stands in its place, and why."""

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


class SteadyTurns(Turns):
    """Turns of conversations whose system text is steady, in every dialect."""

    async def render(self, ask: Ask) -> list[int]:
        """Token ids of what is left."""
        return await super().render(replace(ask, messages=normalized(ask.messages)))


def normalized(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation without what changes by itself."""
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

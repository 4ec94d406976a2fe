"""``--normalize``: remove parts of prompts that change with every request.

The prefix cache matches from the first token, so a number that changes in the first line prevents
every hit. Each rule of `RULES` removes a known part of a line from system messages and keeps the
rest. The mode "all" also sorts the tools.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...types.results import Tool
from .chat_input import ChatInput

logger = logging.getLogger(__name__)
LINE = re.MULTILINE | re.IGNORECASE
# Punctuation of a list, a quotation or emphasis. The pattern has a limited length and stays on one
# line: an unlimited one would take time quadratic in the number of lines.
MARKS = r"[^\w\n]{0,16}"
TOOL_ORDER = "tool-order"
Mode = Literal["off", "safe", "all"]
""""safe" applies only rules that remove nothing written for the model."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern within one line, its replacement and its reason."""

    name: str
    pattern: re.Pattern[str]
    instead: str
    why: str
    is_safe: bool = False


RULES = (
    Rule(
        "billing-header",
        re.compile(r"\Ax-anthropic-billing-header:.*(?:\n|\Z)", re.IGNORECASE),
        "",
        "the first system block of Claude Code counts and signs the request for Anthropic's "
        "server, which removes it; the line is removed",
        is_safe=True,
    ),
    Rule(
        "time-of-day",
        re.compile(
            rf"^(?P<head>{MARKS}(?:the )?current (?:date(?: and |/| ?& ?)?time|time|date)(?: is)?"
            r"\b[^\d\n]{0,40}\d{4}-\d\d-\d\d)[T ]"
            r"\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?",
            LINE,
        ),
        r"\g<head>",
        'agents write "Current time: 2026-11-21T13:34:26Z"; the time is removed and the date kept',
    ),
    Rule(
        "request-id",
        re.compile(
            rf"^{MARKS}(?:x-)?(?:request|trace|correlation)[-_ ]id\b"
            rf"(?:[^\w\n]|_){{1,4}}[\w-]{{8,}}{MARKS}(?:\n|\Z)",
            LINE,
        ),
        "",
        "gateways add an id that changes with every request; the line is removed",
    ),
)


class Normalizer:
    """Applies the rules of a mode to conversations and reports the rules that changed something."""

    def __init__(self, mode: Mode) -> None:
        self._rules = [rule for rule in RULES if mode == "all" or (mode == "safe" and rule.is_safe)]
        self._sorts_tools = mode == "all"
        self._logged: set[str] = set()

    def apply(self, chat: ChatInput) -> tuple[ChatInput, tuple[str, ...]]:
        """Return the normalized conversation, and the names of the rules that changed it."""
        if not self._rules and not self._sorts_tools:
            return chat, ()
        names: dict[str, None] = {}
        messages = [self._message(message, names) for message in chat.messages]
        tools = sorted(chat.tools, key=_name_of) if self._sorts_tools else chat.tools
        if list(tools) != list(chat.tools):
            names[TOOL_ORDER] = None
        if not names:
            return chat, ()
        for name in names.keys() - self._logged:
            self._logged.add(name)
            logger.info("--normalize: rule %s changes prompts (logged once)", name)
        return replace(chat, messages=messages, tools=tools), tuple(names)

    def _message(self, message: Mapping[str, Any], names: dict[str, None]) -> Mapping[str, Any]:
        content = message.get("content")
        if message.get("role") != "system" or not isinstance(content, str):
            return message
        text, found = steady(content, self._rules)
        names.update(dict.fromkeys(found))
        return {**message, "content": text} if found else message


def _name_of(tool: Tool) -> str:
    return tool.name


def steady(text: str, rules: Sequence[Rule] = RULES) -> tuple[str, list[str]]:
    """Return the text after applying the rules, and the names of the rules that changed it."""
    names = []
    for rule in rules:
        text, count = rule.pattern.subn(rule.instead, text)
        if count:
            names.append(rule.name)
    return text, names

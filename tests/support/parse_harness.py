"""Harness of parsers: a text must give the same events however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from foretoken.api.parsing.output_format import Syntax
from foretoken.api.parsing.output_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    OutputParser,
    Reasoning,
    merged,
)
from foretoken.api.types.results import Tool

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
F = Tool(name="f")
TOOLS = (WEATHER, F)


def syntax(
    family: str,
    *,
    reasoning: str = "none",
    template: str = "",
    vocab: Mapping[str, int] | None = None,
) -> Syntax:
    """Return the syntax of a family, by its name."""
    return Syntax.choose(template, vocab or {}, tool_parser=family, reasoning_parser=reasoning)


def parse(parser: OutputParser, pieces: Iterable[str], *, is_cut: bool = False) -> list[Event]:
    """All of it, neighbours of one kind together."""
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.end(is_cut=is_cut)])


@dataclass
class Read:
    """The same by kind. A call is its name, its arguments, and whether it came to its end."""

    words: str = ""
    thought: str = ""
    calls: list[tuple[str, str, bool]] = field(default_factory=list)


def read(make: Callable[[], OutputParser], text: str) -> Read:
    """Read a text whole, by characters, and by threes: the events must always be the same."""
    ways = [[text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]]
    events, *others = [parse(make(), pieces) for pieces in ways]
    assert all(other == events for other in others)
    return by_kind(events)


def by_kind(events: Iterable[Event]) -> Read:
    """Events put together."""
    found = Read()
    for event in events:
        match event:
            case Content(text):
                found.words += text
            case Reasoning(text):
                found.thought += text
            case CallBegin(name):
                found.calls.append((name, "", False))
            case CallArguments(text):
                name, before, _ = found.calls[-1]
                found.calls[-1] = (name, before + text, False)
            case CallEnd():
                found.calls[-1] = (*found.calls[-1][:2], True)
    return found

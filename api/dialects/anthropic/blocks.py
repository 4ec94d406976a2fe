"""Blocks: converts the deltas of an answer to Anthropic's content blocks and their events.

Answers that are not streamed are made from the same blocks, so both forms have the same content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from ...parsing.reading.json_text import INVALID
from ...runtime.segments import Change, Close, Grow, Kind, Open, Segment, Segments
from ...types.results import TextDelta
from .answers import (
    Addition,
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    InputAddition,
    SignatureAddition,
    TextAddition,
    TextContent,
    ThinkingAddition,
    ThinkingContent,
    ToolUseContent,
)

BlockEvent = BlockStart | BlockDelta | BlockStop

SIGNATURE = "unsigned"  # clients send reasoning back only if it has a signature


ADDITIONS: Mapping[Kind, Callable[[str], Addition]] = {
    "reasoning": lambda text: ThinkingAddition(thinking=text),
    "text": lambda text: TextAddition(text=text),
    "call": lambda text: InputAddition(partial_json=text),
}


class Blocks:
    """Encodes the deltas of an answer as events of content blocks.

    White space between reasoning and a tool call is dropped. It would become a text block of its
    own, which Anthropic's API rejects in the next request.
    """

    def __init__(self, *, shows_thoughts: bool = True, first: int = 0) -> None:
        """``first``: the index of the first block."""
        self._first = first
        self._segments = Segments(holds_space=True)
        self._shows_thoughts = shows_thoughts

    @property
    def has_thoughts(self) -> bool:
        """Whether the answer has a reasoning block."""
        return any(each.kind == "reasoning" for each in self._segments.all)

    @property
    def contents(self) -> list[ContentBlock]:
        """The complete blocks, for an answer that is not streamed."""
        return [self._content(each) for each in self._segments.all]

    def take(self, delta: TextDelta) -> list[BlockEvent]:
        """Add a delta of the answer and return its events."""
        return self._events(self._segments.take(delta))

    def end(self) -> list[BlockEvent]:
        """End the last block and return its events. White space alone becomes a text block."""
        return self._events(self._segments.end())

    def _content(self, segment: Segment) -> ContentBlock:
        match segment.kind:
            case "reasoning":
                thinking = segment.text if self._shows_thoughts else ""
                return ThinkingContent(thinking=thinking, signature=SIGNATURE)
            case "text":
                return TextContent(text=segment.text)
            case "call":
                given = read_arguments(segment.text)
                return ToolUseContent(id=tool_use_id(segment.id), name=segment.name, input=given)

    def _events(self, changes: Sequence[Change]) -> list[BlockEvent]:
        return [event for change in changes for event in self._events_of(change)]

    def _events_of(self, change: Change) -> Iterator[BlockEvent]:
        segment = change.segment
        index = self._first + segment.index
        is_thinking = segment.kind == "reasoning"
        match change:
            case Open():
                yield BlockStart(index=index, content_block=_opening(segment))
            case Grow(text=text):
                if self._shows_thoughts or not is_thinking:
                    yield BlockDelta(index=index, delta=ADDITIONS[segment.kind](text))
            case Close():
                if is_thinking:
                    signature = SignatureAddition(signature=SIGNATURE)
                    yield BlockDelta(index=index, delta=signature)
                yield BlockStop(index=index)


def _opening(segment: Segment) -> ContentBlock:
    """Return the empty block for a ``content_block_start`` event."""
    match segment.kind:
        case "reasoning":
            return ThinkingContent()
        case "text":
            return TextContent()
        case "call":
            return ToolUseContent(id=tool_use_id(segment.id), name=segment.name)


def tool_use_id(call_id: str) -> str:
    """Return the id of a tool call in Anthropic's form, ``toolu_...``."""
    return f"toolu_{call_id.removeprefix('call_')}"


def read_arguments(text: str) -> object:
    """Return the arguments of a tool call as an object.

    If the text is not a JSON object, for example because ``max_tokens`` truncated it, the result is
    an object with the text under the key `INVALID`. Empty text becomes an empty object.
    """
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return _as_written(text)
    return arguments if isinstance(arguments, dict) else {INVALID: text}


def _as_written(text: str) -> object:
    """Return arguments that msgspec rejects, such as an escaped lone surrogate, as raw JSON."""
    try:
        arguments = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {INVALID: text}
    return msgspec.Raw(text.encode()) if isinstance(arguments, dict) else {INVALID: text}


def _refuse(constant: str) -> None:
    raise ValueError(constant)

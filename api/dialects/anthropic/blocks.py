"""Blocks: the deltas of an answer as Anthropic's content blocks, with the events of each.

The answer that is not streamed is made from the same blocks, so both hold the same content.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import msgspec

from ...parsing.reading.json_text import INVALID
from ...types.results import CallDelta, TextDelta
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

SIGNATURE = "unsigned"  # clients send no reasoning back that has none


@dataclass(slots=True)
class BlockBuilder:
    """One content block while it grows.

    ``text``: its text, its thinking, or its arguments as JSON text.
    """

    kind: Literal["thinking", "text", "tool_use"]
    text: str = ""
    id: str = ""
    name: str = ""

    @property
    def opening(self) -> ContentBlock:
        """The empty block, as ``content_block_start`` carries it."""
        match self.kind:
            case "thinking":
                return ThinkingContent()
            case "text":
                return TextContent()
            case "tool_use":
                return ToolUseContent(id=self.id, name=self.name)

    @property
    def content(self) -> ContentBlock:
        """The complete block, as an answer that is not streamed carries it."""
        match self.kind:
            case "thinking":
                return ThinkingContent(thinking=self.text, signature=SIGNATURE)
            case "text":
                return TextContent(text=self.text)
            case "tool_use":
                return ToolUseContent(id=self.id, name=self.name, input=read_arguments(self.text))


class Blocks:
    """Splits the deltas of an answer into content blocks.

    White space is held back until text follows: between thinking and a tool call it would be a
    text block of its own, which Anthropic's API refuses in the next request.
    """

    def __init__(self, *, shows_thoughts: bool = True) -> None:
        self.builders: list[BlockBuilder] = []
        self._is_open = False
        self._held = ""
        self._shows_thoughts = shows_thoughts

    def take(self, delta: TextDelta) -> list[BlockEvent]:
        """Return the events of a delta."""
        events: list[BlockEvent] = []
        # What goes on with a call came before the text, which came before the next call.
        going_on = [call for call in delta.tool_calls if not call.id]
        for call in going_on:
            self._add_arguments(call, events)
        self._add_reasoning(delta.reasoning, events)
        self._add_text(delta.text, events)
        for call in delta.tool_calls[len(going_on) :]:
            self._open(BlockBuilder("tool_use", id=tool_use_id(call.id), name=call.name), events)
            self._add_arguments(call, events)
        return events

    def end(self) -> list[BlockEvent]:
        """Return the events that end the last block; white space alone becomes a text block."""
        events: list[BlockEvent] = []
        if self._held and not self.builders:
            self._show(events)
        self._close(events)
        return events

    def _add_reasoning(self, reasoning: str, events: list[BlockEvent]) -> None:
        if not reasoning:
            return
        if not self._goes_on("thinking"):
            self._open(BlockBuilder("thinking"), events)
        if self._shows_thoughts:
            self._grow(reasoning, ThinkingAddition(thinking=reasoning), events)

    def _add_text(self, text: str, events: list[BlockEvent]) -> None:
        self._held += text
        if self._held and (self._goes_on("text") or not self._held.isspace()):
            self._show(events)

    def _show(self, events: list[BlockEvent]) -> None:
        text, self._held = self._held, ""
        if not self._goes_on("text"):
            self._open(BlockBuilder("text"), events)
        self._grow(text, TextAddition(text=text), events)

    def _add_arguments(self, call: CallDelta, events: list[BlockEvent]) -> None:
        if call.arguments:
            self._grow(call.arguments, InputAddition(partial_json=call.arguments), events)
        if call.is_done:
            self._close(events)

    def _goes_on(self, kind: str) -> bool:
        return self._is_open and self.builders[-1].kind == kind

    def _open(self, block: BlockBuilder, events: list[BlockEvent]) -> None:
        self._close(events)
        self._held = ""
        self.builders.append(block)
        self._is_open = True
        events.append(BlockStart(index=len(self.builders) - 1, content_block=block.opening))

    def _grow(self, text: str, delta: Addition, events: list[BlockEvent]) -> None:
        self.builders[-1].text += text
        events.append(self._delta(delta))

    def _close(self, events: list[BlockEvent]) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self.builders[-1].kind == "thinking":
            events.append(self._delta(SignatureAddition(signature=SIGNATURE)))
        events.append(BlockStop(index=len(self.builders) - 1))

    def _delta(self, delta: Addition) -> BlockDelta:
        return BlockDelta(index=len(self.builders) - 1, delta=delta)


def tool_use_id(call_id: str) -> str:
    """The id of a tool call in Anthropic's form, ``toolu_...``."""
    return f"toolu_{call_id.removeprefix('call_')}"


def read_arguments(text: str) -> object:
    """Tool call arguments as an object.

    What is none, as when ``max_tokens`` cut it, is shown as it is under a name that no tool has:
    half an object would be taken for a whole one. Of no text at all a stream shows `{}`, too.
    """
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return _as_written(text)
    return arguments if isinstance(arguments, dict) else {INVALID: text}


def _as_written(text: str) -> object:
    """Accept arguments that msgspec does not read: half of a surrogate pair, as an escape."""
    try:
        arguments = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {INVALID: text}
    return msgspec.Raw(text.encode()) if isinstance(arguments, dict) else {INVALID: text}


def _refuse(constant: str) -> None:
    raise ValueError(constant)

"""Blocks: the deltas of an answer as Anthropic's content blocks, with the events of each.

The answer that is not streamed is made from the same blocks, so both hold the same content.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import msgspec

from ..types.results import Body, CallDelta, TextDelta

SIGNATURE = "unsigned"  # clients send no thought back that has none
INVALID = "INVALID_JSON"  # what Anthropic calls arguments that are no object


@dataclass(slots=True)
class Part:
    """One content block. ``text``: its text, its thinking, or its arguments as JSON text."""

    kind: Literal["thinking", "text", "tool_use"]
    text: str = ""
    id: str = ""
    name: str = ""

    @property
    def opening(self) -> Body:
        """The empty block, as ``content_block_start`` carries it."""
        match self.kind:
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "text":
                return {"type": "text", "text": ""}
            case "tool_use":
                return {"type": "tool_use", "id": self.id, "name": self.name, "input": {}}

    @property
    def body(self) -> Body:
        """The complete block, as an answer that is not streamed carries it."""
        match self.kind:
            case "thinking":
                return {**self.opening, "thinking": self.text, "signature": SIGNATURE}
            case "text":
                return {**self.opening, "text": self.text}
            case "tool_use":
                return {**self.opening, "input": read_arguments(self.text)}


class Blocks:
    """Splits the deltas of an answer into content blocks.

    White space is held back until text follows: between thinking and a tool call it would be a
    text block of its own, which Anthropic's API refuses in the next request.
    """

    def __init__(self, *, shows_thoughts: bool = True) -> None:
        self.parts: list[Part] = []
        self._is_open = False
        self._held = ""
        self._shows_thoughts = shows_thoughts

    def take(self, delta: TextDelta) -> list[Body]:
        """Return the events of a delta."""
        events: list[Body] = []
        # What goes on with a call came before the words, which came before the next call.
        going_on = [call for call in delta.tool_calls if not call.id]
        for call in going_on:
            self._add_arguments(call, events)
        self._add_thoughts(delta.reasoning, events)
        self._add_words(delta.text, events)
        for call in delta.tool_calls[len(going_on) :]:
            self._open(Part("tool_use", id=tool_use_id(call.id), name=call.name), events)
            self._add_arguments(call, events)
        return events

    def end(self) -> list[Body]:
        """Return the events that end the last block; white space alone becomes a text block."""
        events: list[Body] = []
        if self._held and not self.parts:
            self._show(events)
        self._close(events)
        return events

    def _add_thoughts(self, thought: str, events: list[Body]) -> None:
        if not thought:
            return
        if not self._goes_on("thinking"):
            self._open(Part("thinking"), events)
        if self._shows_thoughts:
            self._grow(thought, {"type": "thinking_delta", "thinking": thought}, events)

    def _add_words(self, words: str, events: list[Body]) -> None:
        self._held += words
        if self._held and (self._goes_on("text") or not self._held.isspace()):
            self._show(events)

    def _show(self, events: list[Body]) -> None:
        words, self._held = self._held, ""
        if not self._goes_on("text"):
            self._open(Part("text"), events)
        self._grow(words, {"type": "text_delta", "text": words}, events)

    def _add_arguments(self, call: CallDelta, events: list[Body]) -> None:
        if call.arguments:
            piece: Body = {"type": "input_json_delta", "partial_json": call.arguments}
            self._grow(call.arguments, piece, events)
        if call.is_done:
            self._close(events)

    def _goes_on(self, kind: str) -> bool:
        return self._is_open and self.parts[-1].kind == kind

    def _open(self, part: Part, events: list[Body]) -> None:
        self._close(events)
        self._held = ""
        self.parts.append(part)
        self._is_open = True
        events.append(
            {
                "type": "content_block_start",
                "index": len(self.parts) - 1,
                "content_block": part.opening,
            }
        )

    def _grow(self, text: str, delta: Body, events: list[Body]) -> None:
        self.parts[-1].text += text
        events.append(self._delta(delta))

    def _close(self, events: list[Body]) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self.parts[-1].kind == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        events.append({"type": "content_block_stop", "index": len(self.parts) - 1})

    def _delta(self, delta: Body) -> Body:
        return {"type": "content_block_delta", "index": len(self.parts) - 1, "delta": delta}


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
    """What msgspec does not read and others do: half of a surrogate pair, as an escape."""
    try:
        arguments = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {INVALID: text}
    return msgspec.Raw(text.encode()) if isinstance(arguments, dict) else {INVALID: text}


def _refuse(constant: str) -> None:
    raise ValueError(constant)

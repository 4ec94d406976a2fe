"""Answers in any of the four dialects: their texts, how each ended, how often it ended.

A stream ends with one *terminal* event: ``[DONE]``, ``response.completed`` and its kin,
``message_stop``, or one error. An answer that is no stream is its own terminal.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from foretoken.bench.load.event_stream import Event, EventParser

Dialect = Literal["completions", "chat", "responses", "messages"]
PATHS: dict[Dialect, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed")
Body = Mapping[str, Any]
decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class Told:
    """One answer as its client read it."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))  # by choice or item
    ends: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))  # reasons
    times: list[float] = field(default_factory=list)  # of the events that brought words
    num_terminals: int = 0
    num_late: int = 0  # events after the terminal, words after a choice's reason
    error: str | None = None  # in a stream whose status was 200
    is_unreadable: bool = False
    completion_tokens: int = 0
    cached_tokens: int = 0
    proposed_tokens: int = 0

    @property
    def reasons(self) -> dict[int, str]:
        """The last reason of each choice."""
        return {index: found[-1] for index, found in self.ends.items()}

    @property
    def text(self) -> str:
        """All words, for answers with one choice."""
        return "".join(self.texts.values())

    def same_as(self, other: Told) -> bool:
        """Whether both say the same and end for the same reasons."""
        words, others = _words(self.texts), _words(other.texts)
        return words == others and self.reasons == other.reasons

    def end(self, index: int, reason: str) -> None:
        """A choice ended."""
        self.ends[index].append(reason)

    def say(self, index: int, words: str) -> None:
        """Words of a choice."""
        if words:
            self.texts[index] += words
            self.num_late += bool(self.ends.get(index))

    def fault(self) -> str | None:
        """Return the fault of its end, or None: one terminal, one reason for each choice."""
        if self.is_unreadable:
            return "unreadable"
        if self.num_terminals != 1:
            return f"{self.num_terminals} terminal events"
        if self.num_late:
            return f"{self.num_late} events after the end"
        if self.error is None and any(len(found) != 1 for found in self.ends.values()):
            return "a choice ended more than once"
        return None if self.error is not None or self.ends else "no choice ended"


class Stream:
    """Server-sent events of one answer, told as they come."""

    def __init__(self, dialect: Dialect) -> None:
        self.told = Told()
        self._parser = EventParser()
        self._read = _EVENTS[dialect]

    def feed(self, now: float, data: bytes) -> None:
        """Bytes that came at ``now``."""
        for event in self._parser.feed(data):
            told = self.told
            told.num_late += told.num_terminals > 0
            before = sum(map(len, told.texts.values()))
            try:
                self._read(told, event)
            except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
                told.is_unreadable = True
            if sum(map(len, told.texts.values())) > before:
                told.times.append(now)


def read_whole(dialect: Dialect, body: bytes) -> Told:
    """An answer that is no stream."""
    told = Told(num_terminals=1)
    try:
        _WHOLE[dialect](told, decode(body))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        told.is_unreadable = True
    return told


def _words(texts: Mapping[int, str]) -> dict[int, object]:
    """Arguments of a call as values: a whole answer may write them in another way."""
    found: dict[int, object] = dict(texts)
    for index, text in texts.items():
        if text.startswith("{"):
            with contextlib.suppress(msgspec.DecodeError):
                found[index] = decode(text)
    return found


def _error(told: Told, error: object) -> None:
    told.error = msgspec.json.encode(error).decode()[:300]
    told.num_terminals += 1


# -- OpenAI's chat and text completions ---------------------------------------------------------


def _openai_event(told: Told, event: Event) -> None:
    if event.data == "[DONE]":
        told.num_terminals += 1
        return
    body = decode(event.data)
    if "error" in body:
        _error(told, body["error"])
        return
    for choice in body["choices"]:
        _openai_choice(told, choice, choice.get("delta"))
    _openai_usage(told, body.get("usage"))


def _openai_whole(told: Told, body: Body) -> None:
    for choice in body["choices"]:
        _openai_choice(told, choice, choice.get("message"))
    _openai_usage(told, body["usage"])


def _openai_choice(told: Told, choice: Body, message: Body | None) -> None:
    index = choice["index"]
    if message is None:
        told.say(index, choice["text"])
    else:
        told.say(index, message.get("content") or "")
        for call in message.get("tool_calls") or ():
            function = call["function"]
            told.say(index, f"<{function['name']}>" if "name" in function else "")
            told.say(index, function.get("arguments", ""))
    if choice["finish_reason"] is not None:
        told.end(index, choice["finish_reason"])


def _openai_usage(told: Told, usage: Body | None) -> None:
    if usage is not None:
        told.completion_tokens = usage["completion_tokens"]
        told.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        told.proposed_tokens = usage["speculation"]["proposed_tokens"]


# -- OpenAI's responses -------------------------------------------------------------------------


def _responses_event(told: Told, event: Event) -> None:
    body = decode(event.data)
    if event.kind == "error":
        _error(told, body)
    elif event.kind.endswith((".output_text.delta", ".function_call_arguments.delta")):
        told.say(body["output_index"], body["delta"])
    elif event.kind in RESPONSE_ENDS:
        told.num_terminals += 1
        response = body["response"]
        if response["status"] == "failed":
            told.error = msgspec.json.encode(response["error"]).decode()[:300]
        told.end(0, response["status"])
        _response_usage(told, response)


def _responses_whole(told: Told, body: Body) -> None:
    for index, item in enumerate(body["output"]):
        if item["type"] == "message":
            told.say(index, "".join(part["text"] for part in item["content"]))
        else:
            told.say(index, item["arguments"])
    told.end(0, body["status"])
    _response_usage(told, body)


def _response_usage(told: Told, body: Body) -> None:
    usage = body["usage"]
    if usage is not None:
        told.completion_tokens = usage["output_tokens"]
        told.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
        told.proposed_tokens = usage["speculation"]["proposed_tokens"]


# -- Anthropic's messages -----------------------------------------------------------------------


def _messages_event(told: Told, event: Event) -> None:
    body = decode(event.data)
    match event.kind:
        case "error":
            _error(told, body["error"])
        case "content_block_delta":
            delta = body["delta"]
            told.say(body["index"], delta.get("text") or delta.get("partial_json") or "")
        case "message_delta":
            told.end(0, body["delta"]["stop_reason"])
            _message_usage(told, body["usage"])
        case "message_stop":
            told.num_terminals += 1


def _messages_whole(told: Told, body: Body) -> None:
    for index, block in enumerate(body["content"]):
        said = block.get("text")
        told.say(index, said if said is not None else msgspec.json.encode(block["input"]).decode())
    told.end(0, body["stop_reason"])
    _message_usage(told, body["usage"])


def _message_usage(told: Told, usage: Body) -> None:
    told.completion_tokens = usage["output_tokens"]
    told.cached_tokens = usage["cache_read_input_tokens"]
    told.proposed_tokens = usage["speculation"]["proposed_tokens"]


_EVENTS: dict[Dialect, Callable[[Told, Event], None]] = {
    "completions": _openai_event,
    "chat": _openai_event,
    "responses": _responses_event,
    "messages": _messages_event,
}
_WHOLE: dict[Dialect, Callable[[Told, Body], None]] = {
    "completions": _openai_whole,
    "chat": _openai_whole,
    "responses": _responses_whole,
    "messages": _messages_whole,
}

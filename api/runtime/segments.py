"""Segments: the output of one choice as the pieces that APIs show.

Each piece is opened once and closed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ...core.interface.output import TokenLogprob
from ..types.results import CallDelta, TextDelta, ToolCall

Kind = Literal["reasoning", "text", "call"]


class GrowingText:
    """A text that grows by appending; the pieces are joined only when it is read."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        """Append a text."""
        self._pieces.append(text)

    def __str__(self) -> str:
        """Return the whole text."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]


@dataclass(slots=True, kw_only=True)
class Segment:
    """One piece of an answer, as far as it has been generated."""

    index: int  # index within the choice
    kind: Kind
    id: str = ""  # id of a call; "" for other segments
    name: str = ""
    written: GrowingText = field(default_factory=GrowingText)

    @property
    def text(self) -> str:
        """The reasoning, the text, or a call's arguments as JSON."""
        return str(self.written)

    @property
    def call(self) -> ToolCall:
        """The segment as a tool call."""
        return ToolCall(id=self.id, name=self.name, arguments=self.text)


class Open(NamedTuple):
    """The beginning of a segment, which has no text yet."""

    segment: Segment


class Grow(NamedTuple):
    """An addition to a segment: text, or log-probabilities of tokens without visible text."""

    segment: Segment
    text: str
    logprobs: list[TokenLogprob]


class Close(NamedTuple):
    """The end of a segment. ``is_complete``: whether the segment was not truncated."""

    segment: Segment
    is_complete: bool


Change = Open | Grow | Close


class Segments:
    """Splits the output of one choice into segments. At most the last segment is open.

    ``holds_space``: white space alone does not open a text segment. It is dropped unless text
    follows or the answer is otherwise empty.
    """

    def __init__(self, *, holds_space: bool = False) -> None:
        self.all: list[Segment] = []
        self._holds_space = holds_space
        self._space = ""  # white space held back
        self._is_open = False
        self._logprobs: list[TokenLogprob] = []  # logprobs of tokens that have shown no text yet

    def joined(self, kind: Kind) -> str:
        """Return the text of all segments of a kind."""
        return "".join([each.text for each in self.all if each.kind == kind])

    def take(self, delta: TextDelta) -> list[Change]:
        """Return the changes of a step in order: the open call, reasoning, text, new calls."""
        changes: list[Change] = []
        if delta.logprobs:
            self._logprobs += delta.logprobs
        going_on = [call for call in delta.tool_calls if not call.id]
        for call in going_on:
            changes += self._call(call)
        if delta.reasoning:
            changes += self._reason(delta.reasoning)
        changes += self._say(delta.text)
        for call in delta.tool_calls[len(going_on) :]:
            changes += self._open("call", call)
            changes += self._call(call)
        return changes

    def end(self, *, is_complete: bool = True, needs_text: bool = False) -> list[Change]:
        """Return the changes at the end of the choice.

        ``is_complete``: whether no limit has truncated the output. ``needs_text``: whether an
        answer without text or calls gets an empty text segment.
        """
        changes: list[Change] = []
        is_silent = all(each.kind == "reasoning" for each in self.all)
        if (self._space and not self.all) or (needs_text and is_silent):
            changes += self._show(self._space)
        return [*changes, *self._close(is_complete=is_complete)]

    def _reason(self, text: str) -> Iterator[Change]:
        self._logprobs = []
        if not self._continues("reasoning"):
            yield from self._open("reasoning")
        yield self._grow(text)

    def _say(self, text: str) -> Iterable[Change]:
        text = self._space + text
        if self._continues("text"):
            return self._show(text) if text or self._logprobs else ()
        if self._holds_space and text.isspace():
            self._space = text
            return ()
        return self._show(text) if text else ()

    def _show(self, text: str) -> Iterator[Change]:
        if not self._continues("text"):
            yield from self._open("text")
        logprobs, self._logprobs = self._logprobs, []
        if text or logprobs:
            yield self._grow(text, logprobs)

    def _call(self, delta: CallDelta) -> Iterator[Change]:
        """Add arguments to the open call, and close it if it is complete."""
        self._logprobs = []
        if not self._continues("call"):
            raise RuntimeError("a delta continues a call that was not opened")
        if delta.arguments:
            yield self._grow(delta.arguments)
        if delta.is_done:
            yield from self._close(is_done=True)

    def _continues(self, kind: Kind) -> bool:
        return self._is_open and self.all[-1].kind == kind

    def _open(self, kind: Kind, call: CallDelta | None = None) -> Iterator[Change]:
        """Close the open segment and open the next one."""
        yield from self._close()
        self._space = ""
        segment = Segment(index=len(self.all), kind=kind)
        if call is not None:
            segment.id, segment.name = call.id, call.name
        self.all.append(segment)
        self._is_open = True
        yield Open(segment)

    def _grow(self, text: str, logprobs: list[TokenLogprob] | None = None) -> Grow:
        self.all[-1].written.add(text)
        return Grow(self.all[-1], text, logprobs or [])

    def _close(self, *, is_complete: bool = True, is_done: bool = False) -> Iterator[Change]:
        """Close the open segment. A call that is not complete was truncated."""
        if self._is_open:
            self._is_open = False
            yield Close(self.all[-1], is_done or (is_complete and self.all[-1].kind != "call"))

"""The parts of a model's text, the parser protocol, and the buffer that readers read from.

A reader is a generator: it yields events, and None when it needs more text. Its result depends only
on the characters, never on the division into pieces. It reads the text once; text that was read is
discarded, unless `Source.keep` was called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Protocol, TypeAlias, TypeVar

from msgspec import Struct


class Reasoning(Struct, frozen=True):
    """Text of a thought, without the delimiters around it."""

    text: str


class Content(Struct, frozen=True):
    """Text for the user."""

    text: str


class CallBegin(Struct, frozen=True):
    """The beginning of a tool call. All arguments up to the next `CallEnd` belong to this call."""

    name: str


class CallArguments(Struct, frozen=True):
    """More of the JSON text of the call's arguments; the pieces add up to one JSON object."""

    text: str


class CallEnd(Struct, frozen=True):
    """The end of a complete tool call."""


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd


class OutputParser(Protocol):
    """Reads one answer as it grows.

    The events of `feed` and `end` together are the same for any division of the text into pieces.
    Text that begins like a call but is no call becomes content; no text is lost.
    """

    def feed(self, text: str) -> Sequence[Event]:
        """Add text and return the events that are certain; a possible delimiter is held back."""

    def end(self, *, is_cut: bool = False) -> Sequence[Event]:
        """Return the remaining events at the end of the text.

        ``is_cut``: a limit or a stop string ended the text, not the model. A call whose closing
        delimiter the model left out is complete; a call that was cut off has no `CallEnd`.
        """


class PlainParser:
    """A parser for which all text is content."""

    def feed(self, text: str) -> Sequence[Event]:
        """Return the text as content."""
        return [Content(text)] if text else []

    def end(self, *, is_cut: bool = False) -> Sequence[Event]:
        """Return no events: no text is held back."""
        del is_cut
        return []


T = TypeVar("T")
Reading: TypeAlias = Generator[Event | None, None, T]
_WHITE = re.compile(r"\s+")


class Malformed(Exception):  # noqa: N818 - the model made it, not the program
    """Raised by a reader if the text is not a call."""


class Cut(Exception):  # noqa: N818
    """Raised by a reader if the text ends inside a call or a value."""


class Ended(Cut):
    """Raised if the text ends between parts of a call or value: only closing delimiters are
    missing.
    """


class Source:
    """The buffer of text that has arrived and was not read yet.

    Offsets (``at``) count from the next unread character.
    """

    def __init__(self) -> None:
        self.is_ended = False
        self.is_cut = False  # ended by a limit or a stop string
        self._text = ""
        self._pos = 0
        self._kept: list[str] = []
        self._is_keeping = False

    def add(self, text: str) -> None:
        """Append text that has arrived."""
        self._text = self._text[self._pos :] + text
        self._pos = 0

    # -- looking back ---------------------------------------------------------------------------

    def keep(self) -> None:
        """Remember text that is read from now on, and forget what was remembered before."""
        self._kept, self._is_keeping = [], True

    def release(self) -> str:
        """Return the text read since `keep`, and stop remembering it."""
        kept, self._kept, self._is_keeping = self._kept, [], False
        return "".join(kept)

    # -- reading --------------------------------------------------------------------------------

    @property
    def _num_left(self) -> int:
        return len(self._text) - self._pos

    def take(self, count: int) -> str:
        """Take and return the next characters, at most ``count`` of the available ones."""
        piece = self._text[self._pos : self._pos + count]
        self._pos += len(piece)
        if self._is_keeping:
            self._kept.append(piece)
        return piece

    def take_all(self) -> str:
        """Take and return all available text."""
        return self.take(self._num_left)

    def match(self, pattern: re.Pattern[str]) -> str:
        """Take and return the available characters that match a pattern; perhaps ""."""
        found = pattern.match(self._text, self._pos)
        return self.take(found.end() - self._pos) if found else ""

    def want(self, count: int) -> Reading[None]:
        """Wait until ``count`` characters are available, or the text has ended."""
        while self._num_left < count and not self.is_ended:
            yield None

    def peek(self) -> Reading[str]:
        """Return the next character without taking it; "" at the end of the text."""
        yield from self.want(1)
        return self._text[self._pos : self._pos + 1]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take and return characters as long as ``pattern`` matches them."""
        pieces = []
        while True:
            pieces.append(self.match(pattern))
            if self._num_left or self.is_ended:
                return "".join(pieces)
            yield None

    def white(self) -> Reading[str]:
        """Take and return white space, if any."""
        return (yield from self.run(_WHITE))

    def ahead(self, literal: str, at: int = 0) -> Reading[bool]:
        """Whether ``literal`` is at offset ``at`` of the unread text; nothing is taken."""
        while not self.is_ended and self._begins(literal, at):
            yield None
        return self._text.startswith(literal, self._pos + at)

    def _begins(self, literal: str, at: int = 0) -> bool:
        """Whether the text available at offset ``at`` is only the beginning of ``literal``."""
        left = max(self._num_left - at, 0)
        return left < len(literal) and self._text.startswith(literal[:left], self._pos + at)

    def which(self, literals: Iterable[str], at: int = 0) -> Reading[str]:
        """Return the literal at offset ``at`` of the unread text; take nothing.

        Returns "" if there is no such literal.
        """
        for literal in literals:
            if (yield from self.ahead(literal, at)):
                return literal
        return ""

    def char(self, at: int) -> Reading[str]:
        """Return the character at offset ``at`` of the unread text, or "" after the end."""
        yield from self.want(at + 1)
        return self._text[self._pos + at : self._pos + at + 1]

    def text(self, start: int, stop: int) -> str:
        """Return the available unread text between two offsets; take nothing."""
        return self._text[self._pos + start : self._pos + stop]

    def after(self, pattern: re.Pattern[str], at: int) -> Reading[int]:
        """Return the offset after the characters from ``at`` on that ``pattern`` matches."""
        while True:
            if found := pattern.match(self._text, self._pos + at):
                at = found.end() - self._pos
            if at < self._num_left or self.is_ended:
                return at
            yield None

    def after_white(self, at: int = 0) -> Reading[int]:
        """Return the offset after any white space at offset ``at``; take nothing."""
        return (yield from self.after(_WHITE, at))

    def literal(self, literal: str) -> Reading[bool]:
        """Take ``literal`` if it comes next; return whether it did."""
        is_there = yield from self.ahead(literal)
        if is_there:
            self.take(len(literal))
        return is_there

    def expect(self, literal: str) -> Reading[None]:
        """Take ``literal``. Raises `Malformed`, or `Cut` if the text ends inside it."""
        if not (yield from self.literal(literal)):
            raise Cut if self._begins(literal) else Malformed

    def close(self, *marks: str) -> Reading[bool]:
        """Take white space and one of ``marks``; at the end of the text also an incomplete
        delimiter.

        Returns False, and takes nothing, if other text comes.
        """
        at = yield from self.after_white()
        mark = yield from self.which(marks, at)
        is_cut_off = self._num_left > at and any(self._begins(each, at) for each in marks)
        self.take(self._num_left if is_cut_off else at + len(mark) if mark else 0)
        return bool(mark) or is_cut_off

    def comma(self) -> Reading[None]:
        """Take all commas before the next member, and the white space around them."""
        yield from self.white()
        while (yield from self.literal(",")):
            yield from self.white()

    def until(self, mark: str, wrap: Callable[[str], Event]) -> Reading[bool]:
        """Yield the text before a delimiter, which is not taken.

        Return False if there is no delimiter.
        """
        return bool((yield from self.until_any((mark,), wrap)))

    def until_any(self, marks: tuple[str, ...], wrap: Callable[[str], Event]) -> Reading[str]:
        """Yield the text before the first delimiter, which is not taken.

        Return the delimiter or "".
        """
        pattern = _any_of(marks)
        while True:
            found = pattern.search(self._text, self._pos)
            held = 0 if found or self.is_ended else max(map(self._num_held, marks))
            end = found.start() if found else len(self._text) - held
            if piece := self.take(end - self._pos):
                yield wrap(piece)
            if found or self.is_ended:
                return found[0] if found else ""
            yield None

    def _num_held(self, mark: str) -> int:
        """Return how many characters at the end may be the beginning of the delimiter."""
        at = max(self._pos, len(self._text) - len(mark) + 1)
        while (at := self._text.find(mark[0], at)) >= 0:
            if mark.startswith(self._text[at:]):
                return len(self._text) - at
            at += 1
        return 0

    def rest(self, wrap: Callable[[str], Event]) -> Reading[None]:
        """Yield all text up to the end."""
        while True:
            if piece := self.take_all():
                yield wrap(piece)
            if self.is_ended:
                return
            yield None


@lru_cache(maxsize=256)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def collected(reading: Reading[object]) -> Reading[str]:
    """Return the joined text of the events instead of yielding them."""
    pieces = []
    for event in reading:
        if event is None:
            yield None
        else:
            assert isinstance(event, (Content, CallArguments))
            pieces.append(event.text)
    return "".join(pieces)


class ReaderParser:
    """An `OutputParser` made of a reader."""

    def __init__(self, reader: Callable[[Source], Reading[None]]) -> None:
        self._source = Source()
        self._reading = reader(self._source)

    def feed(self, text: str) -> Sequence[Event]:
        """Add text and return the events that are certain."""
        if not text:
            return []
        self._source.add(text)
        return self._read_events()

    def end(self, *, is_cut: bool = False) -> Sequence[Event]:
        """Return the remaining events at the end of the text."""
        self._source.is_ended, self._source.is_cut = True, is_cut
        return self._read_events()

    def _read_events(self) -> list[Event]:
        events: list[Event] = []
        for event in self._reading:
            if event is None:
                break
            events.append(event)
        return merged(events)


def merged(events: Iterable[Event]) -> list[Event]:
    """Return the events with neighbouring texts of one kind joined."""
    together: list[Event] = []
    for kind, group in groupby(events, type):
        if kind in (Content, Reasoning, CallArguments):
            text = "".join(event.text for event in group)  # type: ignore[union-attr]
            together.append(kind(text))
        else:
            together += group
    return together

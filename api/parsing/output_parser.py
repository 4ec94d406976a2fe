"""The parts of a model's text, the parser protocol, and the buffer that readers read from.

A reader is a generator: it yields what it found, and None where it needs more text. What it does
depends on the characters alone, never on where the pieces were cut. It goes through the text once;
what was read is let go, unless `Source.keep` asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Protocol, TypeAlias, TypeVar

from msgspec import Struct


class Reasoning(Struct, frozen=True):
    """Text between the marks of thinking, without them."""

    text: str


class Content(Struct, frozen=True):
    """Text for the user."""

    text: str


class CallBegin(Struct, frozen=True):
    """A call of a tool begins. Calls do not overlap: what follows belongs to it until its end."""

    name: str


class CallArguments(Struct, frozen=True):
    """More of the JSON text of the call's arguments; the pieces add up to one JSON object."""

    text: str


class CallEnd(Struct, frozen=True):
    """The call is complete."""


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd


class OutputParser(Protocol):
    """Reads one answer as it grows.

    What `feed` and `end` return adds up to the same parts however the text is cut into pieces.
    Text that turns out to be no call after all is given as words; nothing is lost.
    """

    def feed(self, text: str) -> Sequence[Event]:
        """Add text; returns events that are certain now. The possible start of a mark waits."""

    def end(self, *, is_cut: bool = False) -> Sequence[Event]:
        """Return the last events: no text follows.

        ``is_cut``: a limit or a stop string ended the text, not the model. A closing mark that the
        model left out is forgiven, one that was cut off is not: a call that is cut short has no
        `CallEnd`.
        """


class PlainParser:
    """Everything is words."""

    def feed(self, text: str) -> Sequence[Event]:
        """Return the text."""
        return [Content(text)] if text else []

    def end(self, *, is_cut: bool = False) -> Sequence[Event]:
        """Return no events: no text is held back."""
        del is_cut
        return []


T = TypeVar("T")
Reading: TypeAlias = Generator[Event | None, None, T]
_WHITE = re.compile(r"\s+")


class Malformed(Exception):  # noqa: N818 - models make them, it is no error of ours
    """The text that was being read is no call."""


class Cut(Exception):  # noqa: N818
    """The text ended in the middle of what was being read."""


class Ended(Cut):
    """Only closing marks are missing: the text ended between two parts of what was being read."""


class Source:
    """Text that has arrived and was not read yet."""

    def __init__(self) -> None:
        self.is_ended = False
        self.is_cut = False  # ended, and not by the model
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
        """Remember what is read from here on; what was remembered before is let go."""
        self._kept, self._is_keeping = [], True

    def let_go(self) -> str:
        """Return the text read since `keep`, and stop remembering it."""
        kept, self._kept, self._is_keeping = self._kept, [], False
        return "".join(kept)

    # -- reading --------------------------------------------------------------------------------

    @property
    def _num_left(self) -> int:
        return len(self._text) - self._pos

    def take(self, count: int) -> str:
        """Return the next characters, at most ``count`` of those that are there."""
        piece = self._text[self._pos : self._pos + count]
        self._pos += len(piece)
        if self._is_keeping:
            self._kept.append(piece)
        return piece

    def take_all(self) -> str:
        """All that is there."""
        return self.take(self._num_left)

    def match(self, pattern: re.Pattern[str]) -> str:
        """Take the characters that match a pattern from here on; perhaps none."""
        found = pattern.match(self._text, self._pos)
        return self.take(found.end() - self._pos) if found else ""

    def want(self, count: int) -> Reading[None]:
        """Wait until so many characters are there, or the text has ended."""
        while self._num_left < count and not self.is_ended:
            yield None

    def peek(self) -> Reading[str]:
        """Yield the next character, which stays; "" at the end of the text."""
        yield from self.want(1)
        return self._text[self._pos : self._pos + 1]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Yield a whole run of characters; ``pattern`` matches any part of one."""
        pieces = []
        while True:
            pieces.append(self.match(pattern))
            if self._num_left or self.is_ended:
                return "".join(pieces)
            yield None

    def white(self) -> Reading[str]:
        """White space, if any."""
        return (yield from self.run(_WHITE))

    def ahead(self, literal: str, at: int = 0) -> Reading[bool]:
        """Whether the text goes on like this ``at`` characters from here; nothing is taken."""
        while not self.is_ended and self._begins(literal, at):
            yield None
        return self._text.startswith(literal, self._pos + at)

    def _begins(self, literal: str, at: int = 0) -> bool:
        """Whether what is left from ``at`` on is a beginning of ``literal``, and not all of it."""
        left = max(self._num_left - at, 0)
        return left < len(literal) and self._text.startswith(literal[:left], self._pos + at)

    def which(self, literals: Iterable[str], at: int = 0) -> Reading[str]:
        """Return which of these is ``at`` characters from here; "" for none. Nothing is taken."""
        for literal in literals:
            if (yield from self.ahead(literal, at)):
                return literal
        return ""

    def char(self, at: int) -> Reading[str]:
        """Return the character ``at`` characters from here, "" behind the end; nothing is taken."""
        yield from self.want(at + 1)
        return self._text[self._pos + at : self._pos + at + 1]

    def text(self, start: int, stop: int) -> str:
        """Return the text between two places that were looked at; nothing is taken."""
        return self._text[self._pos + start : self._pos + stop]

    def behind(self, pattern: re.Pattern[str], at: int) -> Reading[int]:
        """Return where a run of characters that begins at ``at`` ends; nothing is taken.

        ``pattern`` matches any part of the run.
        """
        while True:
            if found := pattern.match(self._text, self._pos + at):
                at = found.end() - self._pos
            if at < self._num_left or self.is_ended:
                return at
            yield None

    def behind_white(self, at: int = 0) -> Reading[int]:
        """Return where white space that may begin at ``at`` ends; nothing is taken."""
        return (yield from self.behind(_WHITE, at))

    def literal(self, literal: str) -> Reading[bool]:
        """Take exactly this, if the text goes on so."""
        is_there = yield from self.ahead(literal)
        if is_there:
            self.take(len(literal))
        return is_there

    def expect(self, literal: str) -> Reading[None]:
        """Take exactly this. Raises `Malformed`, or `Cut` if the end of the text is in it."""
        if not (yield from self.literal(literal)):
            raise Cut if self._begins(literal) else Malformed

    def close(self, *marks: str) -> Reading[bool]:
        """Take white space and one of these marks, also one that the end of the text cuts off.

        Returns False, and takes nothing, where something else comes.
        """
        at = yield from self.behind_white()
        mark = yield from self.which(marks, at)
        is_cut_off = self._num_left > at and any(self._begins(each, at) for each in marks)
        self.take(self._num_left if is_cut_off else at + len(mark) if mark else 0)
        return bool(mark) or is_cut_off

    def comma(self) -> Reading[None]:
        """Take the comma between two members, if there is one or more, and white space around."""
        yield from self.white()
        while (yield from self.literal(",")):
            yield from self.white()

    def until(self, mark: str, wrap: Callable[[str], Event]) -> Reading[bool]:
        """Give the text before a mark, which stays; False if the text ends without one."""
        return bool((yield from self.until_any((mark,), wrap)))

    def until_any(self, marks: tuple[str, ...], wrap: Callable[[str], Event]) -> Reading[str]:
        """Give the text before the first of these marks, which stays; "" if there is none."""
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
        """Characters at the end that may be the beginning of the mark."""
        at = max(self._pos, len(self._text) - len(mark) + 1)
        while (at := self._text.find(mark[0], at)) >= 0:
            if mark.startswith(self._text[at:]):
                return len(self._text) - at
            at += 1
        return 0

    def rest(self, wrap: Callable[[str], Event]) -> Reading[None]:
        """Give all that follows."""
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
    """Yield the text of the events, together, instead of the events."""
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
        """Add text; returns events that are certain now."""
        if not text:
            return []
        self._source.add(text)
        return self._go_on()

    def end(self, *, is_cut: bool = False) -> Sequence[Event]:
        """Return the last events: no text follows."""
        self._source.is_ended, self._source.is_cut = True, is_cut
        return self._go_on()

    def _go_on(self) -> list[Event]:
        events: list[Event] = []
        for event in self._reading:
            if event is None:
                break
            events.append(event)
        return merged(events)


def merged(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours of one kind put together."""
    together: list[Event] = []
    for kind, group in groupby(events, type):
        if kind in (Content, Reasoning, CallArguments):
            text = "".join(event.text for event in group)  # type: ignore[union-attr]
            together.append(kind(text))
        else:
            together += group
    return together

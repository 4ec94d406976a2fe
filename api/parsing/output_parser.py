"""The parts of a model's text, the parser protocol, and the buffer that readers read from.

A reader is a generator: it yields what it found, and None where it needs more text. What it does
depends on the characters alone, never on where the pieces were cut. It goes through the text once;
what was read is let go, unless `Source.keep` asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
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

    def end(self) -> Sequence[Event]:
        """Return the last events: no text follows. A call that is cut short has no `CallEnd`."""


class PlainParser:
    """Everything is words."""

    def feed(self, text: str) -> Sequence[Event]:
        """The text."""
        return [Content(text)] if text else []

    def end(self) -> Sequence[Event]:
        """Return no events: no text is held back."""
        return []


T = TypeVar("T")
Reading: TypeAlias = Generator[Event | None, None, T]
_WHITE = re.compile(r"\s+")


class Malformed(Exception):  # noqa: N818 - models make them, it is no error of ours
    """The text that was being read is no call."""


class Cut(Exception):  # noqa: N818
    """The text ended in the middle of what was being read."""


class Source:
    """Text that has arrived and was not read yet."""

    def __init__(self) -> None:
        self.is_ended = False
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
        """The next characters, at most ``count`` of those that are there."""
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
        """The next character, which stays; "" at the end of the text."""
        yield from self.want(1)
        return self._text[self._pos : self._pos + 1]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """A whole run of characters; ``pattern`` matches any part of one."""
        pieces = []
        while True:
            pieces.append(self.match(pattern))
            if self._num_left or self.is_ended:
                return "".join(pieces)
            yield None

    def white(self) -> Reading[str]:
        """White space, if any."""
        return (yield from self.run(_WHITE))

    def ahead(self, literal: str) -> Reading[bool]:
        """Whether the text goes on like this; nothing is taken."""
        while not self.is_ended and self._begins(literal):
            yield None
        return self._text.startswith(literal, self._pos)

    def _begins(self, literal: str) -> bool:
        """Whether what is left is a beginning of ``literal``, and not all of it."""
        left = self._num_left
        return left < len(literal) and self._text.startswith(literal[:left], self._pos)

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

    def closing(self, literal: str) -> Reading[None]:
        """The same; of a mark that the end of the text cuts off nothing is left over."""
        if not (yield from self.literal(literal)):
            if not self._begins(literal):
                raise Malformed
            self.take_all()

    def separator(self, closing: str) -> Reading[None]:
        """Take the comma between two members; a comma before ``closing`` is optional."""
        yield from self.white()
        if (yield from self.literal(",")):
            yield from self.white()
        elif not (yield from self.ahead(closing)):
            raise Malformed if (yield from self.peek()) else Cut

    def until(self, mark: str, wrap: Callable[[str], Event]) -> Reading[bool]:
        """Give the text before a mark, which stays; False if the text ends without one."""
        while True:
            at = self._text.find(mark, self._pos)
            held = 0 if at >= 0 or self.is_ended else self._num_held(mark)
            end = at if at >= 0 else len(self._text) - held
            if piece := self.take(end - self._pos):
                yield wrap(piece)
            if at >= 0 or self.is_ended:
                return at >= 0
            yield None

    def _num_held(self, mark: str) -> int:
        """Characters at the end that may be the beginning of the mark."""
        for count in range(min(len(mark) - 1, self._num_left), 0, -1):
            if self._text.endswith(mark[:count]):
                return count
        return 0

    def rest(self, wrap: Callable[[str], Event]) -> Reading[None]:
        """Give all that follows."""
        while True:
            if piece := self.take_all():
                yield wrap(piece)
            if self.is_ended:
                return
            yield None


def collected(reading: Reading[object]) -> Reading[str]:
    """The text of the events, together, instead of the events."""
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

    def end(self) -> Sequence[Event]:
        """Return the last events: no text follows."""
        self._source.is_ended = True
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

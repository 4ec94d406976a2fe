"""State of a call while it is read.

A call begins when its name is known and its arguments begin. Malformed text before that becomes
content. If text after that is malformed, the arguments read so far are completed to a JSON object,
which ends the call. If the text ends inside a value, the call has no `CallEnd`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..output_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Cut,
    Ended,
    Event,
    Malformed,
    Reading,
    Source,
)
from .json_text import JsonTail
from .offers import Offers

MAX_NAME_CHARS = 256


@dataclass(slots=True)
class CallState:
    """The state of the call that is being read.

    ``is_plain``: no delimiter identifies the call, so it must name an offered tool. A call with a
    delimiter may have any name: the client can tell the model that there is no such tool.
    ``is_held``: events wait until it is certain that the text is a call. ``is_first``: no content
    precedes the call. ``is_final``: set by a reader if the text is a call only if no content
    follows it.
    """

    source: Source
    offers: Offers
    is_plain: bool = False
    is_held: bool = False
    is_first: bool = False
    is_final: bool = False
    is_open: bool = False  # the call has begun and not ended
    has_begun: bool = False  # this call or an earlier one has begun
    tail: JsonTail = field(default_factory=JsonTail)

    def check(self, name: str) -> str:
        """Return the tool's name. Raises `Malformed` if ``name`` cannot be a tool's name."""
        if name not in self.offers and (bare := name.removeprefix("functions.")) in self.offers:
            name = bare
        fits = 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()
        if not fits or (self.is_plain and name not in self.offers):
            raise Malformed
        return name

    def begin(self, name: str) -> Reading[None]:
        """Begin a call: unless events are held, its text can no longer become content."""
        self.is_open = self.has_begun = True
        self.tail = JsonTail()
        if not self.is_held:
            self.source.release()
        yield CallBegin(name)

    def end(self) -> Reading[None]:
        """End a complete call; text after it may be content."""
        self.is_open = False
        self.settle()
        yield CallEnd()

    def settle(self) -> None:
        """Make the text read so far part of calls, so that it can no longer become content."""
        if not self.is_held:
            self.source.keep()

    def whole(self, name: str, arguments: str) -> Reading[None]:
        """Yield a complete call."""
        yield from self.begin(name)
        yield CallArguments(arguments)
        yield from self.end()

    def closed(self) -> Reading[None]:
        """Complete the arguments of an unfinished call, and end the call."""
        if closing := self.tail.closing():
            yield CallArguments(closing)
        yield from self.end()


CallReader = Callable[[CallState], Reading[None]]


def followed(call: CallState, read: CallReader) -> Reading[None]:
    """Yield the events of ``read``, and complete a call that becomes malformed.

    The call stays open if the text ends inside a value or was cut. Raises the reader's `Malformed`
    and `Cut`.
    """
    try:
        for event in read(call):
            if isinstance(event, CallArguments):
                call.tail.add(event.text)
            yield event
    except Malformed:
        if call.is_open:
            yield from call.closed()
        raise
    except Cut as cut:
        if call.is_open and isinstance(cut, Ended) and not call.source.is_cut:
            yield from call.closed()
        elif call.is_open and (rest := call.source.take_all()):
            yield CallArguments(rest)  # text that was examined but not taken
        raise


def gathered(reading: Reading[None]) -> Reading[list[Event]]:
    """Return all events as one list instead of yielding them."""
    events: list[Event] = []
    for event in reading:
        if event is None:
            yield None
        else:
            events.append(event)
    return events

"""Reads an answer by a response template: text, reasoning and calls, as they arrive.

The reader searches for delimiters after each character, so that the result does not depend on how
the answer is divided into pieces. Inside a field it searches for the field's end only, elsewhere
for beginnings of fields only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import regex

from ..output_parser import (
    Event,
    OutputParser,
    PlainParser,
    ReaderParser,
    Reading,
    Source,
)
from ..reading.answer import Beginning, read_content
from ..reading.offers import Offers
from .sinks import Sink, TextSink, call_sink
from .spec import Delimiter, Field, Kind, ResponseTemplate

MAX_HELD_CHARS = 1024  # a longer text is not held as the beginning of a delimiter
SECONDS = 0.05  # time limit of one search, which blocks the event loop
NUM_BEFORE = 64  # number of characters before a delimiter that its pattern may look at
NUM_SEARCHED = 64  # number of characters that are searched at once where no delimiter begins


class _Watch(NamedTuple):
    """A delimiter that may come next. ``opens``: the field that it begins; None if it ends one."""

    delimiter: Delimiter
    opens: Field | None


class _Found(NamedTuple):
    watch: _Watch
    match: regex.Match[str]


class TemplateReader:
    """Reads one answer. ``prefix``: the end of the prompt that belongs to the answer's text."""

    def __init__(
        self,
        template: ResponseTemplate,
        beginnings: Sequence[Beginning],
        offers: Offers,
        prefix: str,
    ) -> None:
        self._beginnings, self._offers = beginnings, offers
        has_calls = bool(offers.names)
        self._sinks = {
            field.name: self._sink(field)
            for field in template.fields
            if has_calls or field.kind is not Kind.CALLS
        }
        self._implicit = template.implicit
        self._opens = [
            _Watch(field.open, field)
            for field in template.fields
            if field.open is not None and field.name in self._sinks
        ]
        self._field: Field | None  # the field of the open region, or None
        self._before, self._pending, self._body = "", "", ""
        self._has_ended = self._has_failed = False
        self._field = self._implicit
        for _ in self._fed(prefix):
            pass
        self._leave_call()
        if self._pending.isspace():
            self._drop(len(self._pending))
        self._sink_of_region().settle()

    def read(self, source: Source) -> Reading[None]:
        """Yield the events of an answer."""
        while True:
            yield from self._fed(source.take_all())
            if source.is_ended:
                yield from self._finished(is_cut=source.is_cut)
                return
            yield None

    def _sink(self, field: Field) -> Sink:
        if field.kind is Kind.CALLS:
            return call_sink(field, self._offers)
        is_read = field.kind is Kind.CONTENT and self._offers.names
        return TextSink(field, self._content_parser if is_read else PlainParser)

    def _content_parser(self) -> OutputParser:
        """Return a parser of content, which finds calls without their delimiters."""
        return ReaderParser(partial(read_content, beginnings=self._beginnings, offers=self._offers))

    # -- text ---------------------------------------------------------------------------------

    def _fed(self, text: str) -> Iterator[Event]:
        at = 0
        while at < len(text):
            if not self._pending:
                num_plain = self._num_plain(text[at : at + NUM_SEARCHED])
                self._body += text[at : at + num_plain]
                self._before = (self._before + text[at : at + num_plain])[-NUM_BEFORE:]
                at += num_plain
                if num_plain:
                    continue
            self._pending += text[at]
            at += 1
            yield from self._step()
        yield from self._flushed()

    def _num_plain(self, text: str) -> int:
        """Return the number of characters before the first that may begin a delimiter."""
        found = [self._search(watch.delimiter, text) for watch in self._watches()]
        starts: list[int] = [each.start() - len(self._before) for each in found if each is not None]
        return min(starts, default=len(text))

    def _finished(self, *, is_cut: bool) -> Iterator[Event]:
        self._has_ended = True
        yield from self._step()
        self._take(len(self._pending))
        yield from self._closed("", {}, is_cut=is_cut)

    def _take(self, count: int) -> None:
        """Move pending text to the text of the region."""
        taken, self._pending = self._pending[:count], self._pending[count:]
        self._body += taken
        self._before = (self._before + taken)[-NUM_BEFORE:]

    def _drop(self, count: int) -> None:
        """Drop pending text that is a delimiter."""
        self._before = (self._before + self._pending[:count])[-NUM_BEFORE:]
        self._pending = self._pending[count:]

    # -- regions ------------------------------------------------------------------------------

    def _leave_call(self) -> None:
        """Leave a field of calls that the prompt has begun: the answer begins with content."""
        if self._field is not None and self._field.kind is Kind.CALLS:
            self._field = self._implicit

    def _sink_of_region(self) -> Sink:
        return _NOWHERE if self._field is None else self._sinks[self._field.name]

    def _flushed(self) -> Iterator[Event]:
        text, self._body = self._body, ""
        if text:
            yield from self._sink_of_region().feed(text)

    def _closed(
        self, written: str, captures: dict[str, str], *, is_cut: bool = False
    ) -> Iterator[Event]:
        yield from self._flushed()
        yield from self._sink_of_region().close(written, captures, is_cut=is_cut)
        self._field = self._implicit
        if not self._has_ended:
            yield from self._sink_of_region().open("", {})

    # -- delimiters ---------------------------------------------------------------------------

    def _watches(self) -> list[_Watch]:
        field = self._field
        close = [] if field is None or field.close is None else [_Watch(field.close, None)]
        return [*self._opens, *close] if field is self._implicit else close

    def _step(self) -> Iterator[Event]:
        """Process the delimiters in the pending text, and the text before them."""
        while self._pending:
            found, start = self._scan()
            if found is None:
                self._take(max(start, len(self._pending) - MAX_HELD_CHARS))
                return
            begin, end = (at - len(self._before) for at in found.match.span())
            self._take(begin)
            if begin == end and not self._body:
                self._take(1)  # otherwise the same empty delimiter would be found again
                continue
            yield from self._flushed()
            is_text = found.watch.opens is None and self._is_text(end - begin)
            if is_text is None:
                return
            if is_text:
                self._take(max(end - begin, 1))
                continue
            self._drop(end - begin)
            yield from self._passed(found)

    def _passed(self, found: _Found) -> Iterator[Event]:
        written, opens = found.match[0], found.watch.opens
        groups = {key: each for key, each in found.match.groupdict().items() if each is not None}
        if opens is None:
            yield from self._closed(written, groups)
            return
        yield from self._closed("", {})
        self._field = opens
        yield from self._sink_of_region().open(written, groups)

    def _is_text(self, length: int) -> bool | None:
        """Whether the delimiter that comes next is part of a string.

        Inside a string a delimiter ends the field only if the text ends after it, or if the next
        field begins there. Returns None if that is not known yet.
        """
        if not self._sink_of_region().is_in_string:
            return False
        rest = self._pending[length:].lstrip()
        if len(self._pending) > MAX_HELD_CHARS:
            return False
        if not rest:
            return False if self._has_ended else None
        is_open = False
        for watch in self._opens:
            found = self._match(watch.delimiter, rest, partial=not self._has_ended)
            if found is not None and not found.partial:
                return False
            is_open |= found is not None
        return None if is_open else True

    def _scan(self) -> tuple[_Found | None, int]:
        """Return the first delimiter that is certain, or None.

        Also returns the number of pending characters that are certainly no delimiter.
        """
        best: _Found | None = None
        held = len(self._pending)
        for watch in self._watches():
            found = self._search(watch.delimiter, self._pending)
            if found is None:
                continue
            start = found.start() - len(self._before)
            if not self._has_ended and (found.partial or self._may_change(watch, found)):
                held = min(held, start)
            elif best is None or _rank(found) < _rank(best.match):
                best = _Found(watch, found)
        if best is not None and best.match.start() - len(self._before) >= held:
            best = None
        return best, held

    def _search(self, delimiter: Delimiter, text: str) -> regex.Match[str] | None:
        """Return the first match in ``text``, the text after all text that was taken or dropped.

        After a pattern has exceeded its time limit, nothing is found any more: all further text
        belongs to the present region.
        """
        if self._has_failed:
            return None
        whole, at = self._before + text, len(self._before)
        try:
            found = delimiter.pattern.search(
                whole, at, partial=not self._has_ended, timeout=SECONDS
            )
        except TimeoutError:
            self._has_failed = True
            return None
        return found if found is None or not found.partial or found.end() > found.start() else None

    def _match(
        self, delimiter: Delimiter, text: str, at: int = 0, *, partial: bool = False
    ) -> regex.Match[str] | None:
        """Return the match at an offset. After a timeout nothing is found, as in `_search`."""
        try:
            return delimiter.pattern.match(text, at, partial=partial, timeout=SECONDS)
        except TimeoutError:
            self._has_failed = True
            return None

    def _may_change(self, watch: _Watch, found: regex.Match[str]) -> bool:
        """Whether further text may change a match."""
        delimiter, whole = watch.delimiter, self._before + self._pending
        if found.end() == len(whole):
            return delimiter.can_grow
        if delimiter.literals:
            return False
        again = self._match(delimiter, f"{whole}\0", found.start())
        return again is None or again.span() != found.span() or again.groups() != found.groups()


def _rank(found: regex.Match[str]) -> tuple[int, int]:
    """Return the sort key of a match: earlier matches first, longer ones first at one position."""
    return found.start(), found.start() - found.end()


class _Nowhere:
    """The sink of text between fields, which is dropped."""

    is_in_string = False

    def open(self, written: str, captures: object) -> Iterator[Event]:
        del written, captures
        yield from ()

    def feed(self, text: str) -> Iterator[Event]:
        del text
        yield from ()

    def close(self, written: str, captures: object, *, is_cut: bool = False) -> Iterator[Event]:
        del written, captures, is_cut
        yield from ()

    def settle(self) -> None: ...


_NOWHERE = _Nowhere()

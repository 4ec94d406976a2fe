"""Reading an answer: content, and calls that may begin anywhere in it.

Content is yielded as soon as it is certain that no call begins in it. White space around calls is
dropped. A delimiter inside code is content, but only if the code is closed later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto

from ..output_parser import (
    CallArguments,
    CallBegin,
    Content,
    Cut,
    Event,
    Malformed,
    Reading,
    Source,
)
from .call_state import CallReader, CallState, followed, gathered
from .code import CodeState
from .offers import Offers

MAX_LAST_CONTENT = 512
_IN_LINE = re.compile(r"[^\n`~]+")
_SEPARATORS = re.compile(r"[\s,;\])}]+")
_EXAMPLE = re.compile(r"\b(examples?|e\.g|for instance|looks? like|syntax)\b", re.IGNORECASE)


class Where(Enum):
    """Places where a call may begin: anywhere, at a line's start, or at the answer's start."""

    ANYWHERE = auto()
    LINE = auto()
    START = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """A text with which calls begin, and the reader of such calls.

    ``is_ahead``: returns, without taking any text, whether a call begins at the delimiter.
    ``ends``: delimiters that are dropped after a call. ``is_plain``: no delimiter identifies the
    call (see `CallState`). ``is_sure``: the text is a call whatever follows, so its events are
    yielded at once. Other calls are held until it is certain that they come before or after all
    content.
    """

    mark: str
    read: CallReader
    is_ahead: Callable[[Source], Reading[bool]] | None = None
    ends: tuple[str, ...] = ()
    where: Where = Where.ANYWHERE
    is_plain: bool = False
    is_sure: bool = True

    def comes(self, source: Source) -> Reading[bool]:
        """Whether a call with this beginning comes next."""
        if not (yield from source.ahead(self.mark)):
            return False
        return self.is_ahead is None or (yield from self.is_ahead(source))


class AnswerReader:
    """Reads one answer. If several ``beginnings`` fit at a position, the first is used."""

    def __init__(self, source: Source, beginnings: Sequence[Beginning], offers: Offers) -> None:
        self._source, self._offers = source, offers
        self._beginnings: dict[str, list[Beginning]] = {}
        for each in beginnings:
            self._beginnings.setdefault(each.mark[0], []).append(each)
        starts = re.escape("".join(self._beginnings))
        self._plain = re.compile(rf"[^\n`~{starts}]+")
        self._code = CodeState()
        self._space = ""  # white space that is dropped if a call follows
        self._has_content = self._is_after_call = False
        self._last_content = ""  # the end of the content so far
        self._num_quoted = 0  # next characters that are known to be in code

    def read(self) -> Reading[None]:
        """Yield content and calls up to the end of the text."""
        while True:
            self._take_space((yield from self._source.white()) if not self._is_in_content else "")
            if not (yield from self._source.peek()):
                if not self._is_after_call:
                    yield from self._content("")
                return
            beginning = yield from self._beginning()
            if beginning is None:
                yield from self._word()
            elif not beginning.is_sure:
                yield from self._held_calls(beginning)
            elif (yield from self._is_quoted()):
                yield from self._word()
            else:
                yield from self._call(beginning)

    # -- content ------------------------------------------------------------------------------

    @property
    def _is_in_content(self) -> bool:
        return self._has_content and not self._is_after_call

    def _take_space(self, space: str) -> None:
        self._space += space
        self._code.add(space)

    def _word(self) -> Reading[None]:
        text = self._source.take(1) + self._source.match(self._plain)
        self._num_quoted = max(self._num_quoted - len(text), 0)
        self._code.add(text)
        yield from self._content(text)

    def _content(self, text: str) -> Reading[None]:
        """Yield content and the white space before it."""
        text, self._space = self._space + text, ""
        if text:
            self._has_content |= not text.isspace()
            self._is_after_call = False
            self._last_content = (self._last_content + text)[-MAX_LAST_CONTENT:]
            yield Content(text)

    # -- calls ----------------------------------------------------------------------------------

    def _beginning(self) -> Reading[Beginning | None]:
        """Return the beginning of a call that comes next, or None."""
        for each in self._beginnings.get((yield from self._source.peek()), ()):
            if self._may_be_here(each) and (yield from each.comes(self._source)):
                return each
        return None

    def _may_be_here(self, beginning: Beginning) -> bool:
        if beginning.where is Where.ANYWHERE:
            return True
        if not self._code.is_line_start or self._code.is_code:
            return False
        return beginning.where is Where.LINE or not (self._has_content or self._is_after_call)

    def _is_quoted(self) -> Reading[bool]:
        """Whether the next text is inside code that is closed later."""
        if self._num_quoted or not self._code.is_code:
            return self._num_quoted > 0
        source, code, at = self._source, copy(self._code), 0
        is_block = code.is_block
        while True:
            end = yield from source.after(_IN_LINE, at)
            char = yield from source.char(end)
            code.add(source.text(at, end) + char)
            at = end + 1
            if not char or (char == "\n" and not is_block):
                break
            if (yield from source.char(at)) not in ("`", "~") and not code.is_code:
                self._num_quoted = at
                return True
        if is_block and source.is_cut:
            return True
        self._code = CodeState()
        return False

    def _call(self, beginning: Beginning) -> Reading[None]:
        """Yield calls as they arrive; text that is no call is yielded as content."""
        source = self._source
        call = CallState(source, self._offers, is_plain=beginning.is_plain)
        source.keep()
        try:
            yield from followed(call, beginning.read)
        except (Malformed, Cut):
            kept = source.release()
        else:
            source.release()
            kept = ""
        if call.has_begun:
            self._end_call()
            self._take_space(kept[: len(kept) - len(kept.lstrip())])
            kept = kept.lstrip()
        if kept:
            yield from self._no_call(kept)
        elif call.has_begun:
            yield from self._surplus_ends(beginning.ends)

    def _end_call(self) -> None:
        self._space, self._is_after_call = "", True
        self._code = CodeState()

    def _no_call(self, kept: str) -> Reading[None]:
        kept = kept or self._source.take(1)
        self._code.add(kept)
        yield from self._content(kept)

    def _surplus_ends(self, ends: Sequence[str]) -> Reading[None]:
        """Take superfluous closing delimiters, and separators and brackets before them."""
        while ends:
            at = yield from self._source.after_white()
            if not (end := (yield from self._source.which(ends, at))):
                at = yield from self._source.after(_SEPARATORS, at)
                if not (end := (yield from self._source.which(ends, at))):
                    return
            self._source.take(at + len(end))

    def _held_calls(self, beginning: Beginning) -> Reading[None]:
        """Read calls to their end, then yield them, or content if they are no calls."""
        source = self._source
        source.keep()
        try:
            events = yield from self._gathered(beginning)
        except (Malformed, Cut):
            yield from self._no_call(source.release())
            return
        source.release()
        self._end_call()
        yield from events

    def _gathered(self, beginning: Beginning) -> Reading[list[Event]]:
        """Return the events of calls: one call that precedes content, or all calls at the end.

        Raises `Malformed` and `Cut` if there are no such calls.
        """
        source, events, is_first = self._source, list[Event](), not self._has_content
        if beginning.is_plain and _EXAMPLE.search(
            self._last_content.rstrip().rpartition("\n\n")[2]
        ):
            raise Malformed
        while True:
            call = CallState(
                source, self._offers, is_plain=beginning.is_plain, is_held=True, is_first=is_first
            )
            found = yield from gathered(followed(call, beginning.read))
            if beginning.is_plain and not self._fit(found):
                raise Malformed
            events += found
            yield from self._surplus_ends(beginning.ends)
            if is_first and not call.is_final:
                return events
            yield from source.white()
            if not (char := (yield from source.peek())):
                if source.is_cut:
                    raise Malformed
                return events
            beginning = yield from self._next(char)

    def _fit(self, events: Sequence[Event]) -> bool:
        """Whether all calls name offered tools and have arguments that fit them."""
        calls: list[list[str]] = []
        for event in events:
            if isinstance(event, CallBegin):
                calls.append([event.name, ""])
            elif isinstance(event, CallArguments):
                calls[-1][1] += event.text
        return all(self._offers.fit(name, text) for name, text in calls)

    def _next(self, char: str) -> Reading[Beginning]:
        """Return the beginning of a further call. Raises `Malformed` if none comes."""
        for each in self._beginnings.get(char, ()):
            if each.where is not Where.START and (yield from each.comes(self._source)):
                return each
        raise Malformed


def read_content(source: Source, beginnings: Sequence[Beginning], offers: Offers) -> Reading[None]:
    """Read content, and calls that begin with one of ``beginnings``."""
    return AnswerReader(source, beginnings, offers).read()

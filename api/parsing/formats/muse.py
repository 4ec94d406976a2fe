"""Muse: each message names its recipient; a message to a tool contains a call in tags.

``<|start|>assistant to=self<|message|>Hm.<|eom|>`` is a thought, ``to=user`` content, and ``to=f``
encloses ``<atem:function_calls>`` with ``<atem:invoke name="f">``. The prompt ends with
``<|start|>assistant``. Source: the chat template that llama.cpp publishes for Muse Glimmer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..call_grammars import MAX_CALLS
from ..family import Family
from ..grammars import Lark
from ..output_parser import Content, Event, ReaderParser, Reading, Reasoning, Source
from ..reading.answer import Beginning, read_content
from ..reading.offers import Offers
from ..reasoning import Thinking
from .tagged import NAME, Tags, tagged_arguments, tagged_beginnings

if TYPE_CHECKING:
    from ...types.results import Tool

START, MESSAGE, END, END_OF_TURN = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
ROLE = "assistant"
MUSE_THINK = Thinking(f"to=self{MESSAGE}", f"{END}{START}{ROLE}")
MUSE_TAGS = Tags(
    begin="<atem:function_calls>", end="</atem:function_calls>",
    function='<atem:invoke name="', named=">", quote='"', function_end="</atem:invoke>",
    parameter='<atem:parameter name="', value=(">",), value_end="</atem:parameter>",
    name=NAME, argument=NAME,
)  # fmt: skip
MAX_HEADER_CHARS = 512
_IN_HEADER = re.compile(r"[\w.=, -]")
_BEGINS = (MESSAGE, ROLE, "to=", "to =")  # beginnings of a header without ``START``
_RECIPIENT = re.compile(r"\bto\s*=\s*([\w.-]+)")
_SELF, _USER = "self", "user"
_ENDS = (END, END_OF_TURN, START)


def read_muse(source: Source, beginnings: Sequence[Beginning], offers: Offers) -> Reading[None]:
    """Read the messages of an answer. Text without a header is content.

    In a message to the user, tags of calls are content, too.
    """
    quoted = [each for each in beginnings if not each.mark.startswith("<atem:")]
    while (yield from source.peek()):
        recipient = yield from _recipient(source)
        if recipient == _SELF:
            yield from _text(source, Reasoning)
        else:
            known = quoted if recipient == _USER else beginnings
            yield from _content(source, known if offers.names else (), offers)
        if (yield from source.literal(END)) or (yield from source.literal(END_OF_TURN)):
            yield from source.white()


def _recipient(source: Source) -> Reading[str]:
    """Take the header of a message and return the recipient; "" if there is no header."""
    at = yield from source.after_white()
    if is_start := (yield from source.ahead(START, at)):
        at += len(START)
    elif not (yield from source.which(_BEGINS, at)):
        return ""
    end = at
    while end - at <= MAX_HEADER_CHARS and _IN_HEADER.match((yield from source.char(end))):
        end += 1
    written = source.text(at, end)
    if len(written) > MAX_HEADER_CHARS or not (yield from source.ahead(MESSAGE, end)):
        source.take(at if is_start else 0)
        return ""
    source.take(end + len(MESSAGE))
    found = _RECIPIENT.search(written)
    return found[1] if found else _USER


def _text(source: Source, wrap: Callable[[str], Event]) -> Reading[None]:
    """Yield the text of a message, without the token that ends it.

    Such a token ends a message only at the end of the answer or before the next message.
    """
    while mark := (yield from source.until_any(_ENDS, wrap)):
        at = yield from source.after_white(len(mark))
        if mark == START:
            is_end = yield from source.ahead(ROLE, at)
        else:
            is_end = not (yield from source.char(at)) or (yield from source.ahead(START, at))
        if is_end:
            return
        yield wrap(source.take(len(mark)))


def _content(source: Source, beginnings: Sequence[Beginning], offers: Offers) -> Reading[None]:
    """Read the text of a message and the calls in it."""
    inner = ReaderParser(partial(read_content, beginnings=beginnings, offers=offers))
    for event in _text(source, Content):
        if event is None:
            yield None
        else:
            assert isinstance(event, Content)
            yield from inner.feed(event.text)
    is_cut = source.is_cut and not (yield from source.peek())
    yield from inner.end(is_cut=is_cut)


# -- grammars -------------------------------------------------------------------------------------


class MuseGrammar:
    """Grammar rules for answers: an optional thought, then a message to the user, or calls."""

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the rule for calls, each in a message of its own."""
        return lark.rule("calls", f"{_thought(lark)} {self._calls(lark, tools, parallel)}")

    def mixed(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the rule for free text, or a message to the user that valid calls may follow."""
        words = lark.without_any((START, END, END_OF_TURN), "inside")
        free = lark.not_beginning(("to=", START), "words")
        calls = self._calls(lark, tools, parallel)
        after = f"({_next(lark)} {calls})?"
        text = f"{_header(lark, _USER)} {words} {after}"
        return lark.rule("mixed", f"{_thought(lark)} ({text} | {calls}) | {free}")

    def around(self, lark: Lark, structured: str) -> str:
        """Return the expression for structured output in a message to the user."""
        return f"{_thought(lark)} {_header(lark, _USER)} ({structured})"

    def _calls(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        tags = MUSE_TAGS

        def written(tool: Tool) -> str:
            begin = f"{tags.begin}\n{tags.function}{tool.name}{tags.quote}{tags.named}\n"
            inside = tagged_arguments(lark, tool, tools.index(tool), tags)
            end = lark.mark(f"{tags.function_end}\n{tags.end}")
            return f"{_header(lark, tool.name)} {lark.mark(begin)} {inside} {end}"

        call = lark.rule("inner", lark.each(tools, written))
        more = f"({_next(lark)} {call}){{0,{MAX_CALLS - 1}}}" if parallel else ""
        return f"{call} {more}"


def _header(lark: Lark, recipient: str) -> str:
    return lark.mark(f" to={recipient}{MESSAGE}")


def _next(lark: Lark) -> str:
    return lark.mark(f"{END}{START}{ROLE}")


def _thought(lark: Lark) -> str:
    thought = lark.up_to(END, "thought", marks=(START, MESSAGE))
    return f"({_header(lark, _SELF)} {thought} {lark.mark(START + ROLE)})?"


MUSE = MuseGrammar()
MUSE_FAMILY = Family(
    (START, MESSAGE, END),
    ("<atem:function_calls>",),
    tagged_beginnings(MUSE_TAGS),
    lambda *_: MUSE,
    read_muse,
    reads_thoughts=True,
    thinking=MUSE_THINK,
    around=MUSE.around,
)

"""Kimi K3: sections and calls between tags that are written with tokens.

``<|open|>response<|sep|>Hi<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f"
index="1"<|sep|><|open|>argument key="x" type="number"<|sep|>1<|close|>argument<|sep|>...``. Source:
the chat template that llama.cpp publishes for the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...structured.grammar_text import lark_text
from ..call_grammars import several
from ..family import Family
from ..grammars import Lark
from ..output_parser import Content, ReaderParser, Reading, Source
from ..reading.answer import Beginning, read_content
from ..reading.offers import KINDS, Offers
from ..reasoning import Thinking
from .tagged import NAME, Tags, tagged_arguments, tagged_beginnings

if TYPE_CHECKING:
    from ...types.results import Tool

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"


def _opened(tag: str) -> str:
    return f"{OPEN}{tag}{SEP}"


def _closed(tag: str) -> str:
    return f"{CLOSE}{tag}{SEP}"


KIMI_K3_THINK = Thinking(_opened("think"), _closed("think"))
RESPONSE, RESPONSE_END, MESSAGE_END = _opened("response"), _closed("response"), _closed("message")
_AROUND = (RESPONSE, RESPONSE_END, MESSAGE_END, END_OF_MESSAGE)
KIMI_K3_TAGS = Tags(
    begin=_opened("tools"), end=_closed("tools"),
    function=f'{OPEN}call tool="', named=SEP, quote='"', function_end=_closed("call"),
    parameter=f'{OPEN}argument key="', value=(SEP,), value_end=_closed("argument"),
    name=NAME, argument=NAME, line="",
    types={kind: f'type="{kind.replace("integer", "number")}"' for kind in sorted(KINDS)},
    object_marks=(f'{OPEN}json type="object"{SEP}', _closed("json")),
)  # fmt: skip
_CALL, _ARGUMENTS = f"{OPEN}call ", (f"{OPEN}argument ", f"{OPEN}json ")
_ARGUMENT_ENDS, _CALL_ENDS = (_closed("argument"), _closed("json")), KIMI_K3_TAGS.closing[1:]
_IN_CALL = (*_AROUND, *_ARGUMENTS, *_CALL_ENDS)


def read_kimi_k3(source: Source, beginnings: Sequence[Beginning], offers: Offers) -> Reading[None]:
    """Read content and calls, and drop the tags around the sections, except in arguments."""
    known = beginnings if offers.names else ()
    inner = ReaderParser(partial(read_content, beginnings=known, offers=offers))
    outside: tuple[str, ...] = (*_AROUND, _CALL) if known else _AROUND
    marks = outside
    while True:
        reading = source.until_any(marks, Content)
        while True:
            try:
                event = next(reading)
            except StopIteration as end:
                mark = str(end.value)
                break
            if event is None:
                yield None
            else:
                assert isinstance(event, Content)
                yield from inner.feed(event.text)
        if not mark:
            yield from inner.end(is_cut=source.is_cut)
            return
        taken = source.take(len(mark))
        if mark in _AROUND:
            continue
        yield from inner.feed(taken)
        if mark in _ARGUMENTS:
            marks = (*_ARGUMENT_ENDS, *_CALL_ENDS)
        else:
            marks = outside if mark in _CALL_ENDS else _IN_CALL


class KimiK3Grammar:
    """Grammar rules for answers after a thought: a response, and calls after it."""

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the rule for calls after an empty response."""
        calls = f"{lark.mark(KIMI_K3_TAGS.begin)} {self._calls(lark, tools, parallel)}"
        return lark.rule("calls", self.around(lark, '""', calls))

    def mixed(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the rule for a response that valid calls may follow."""
        begin, calls = KIMI_K3_TAGS.begin, self._calls(lark, tools, parallel)
        if lark.has_token(OPEN):
            words = lark.without_any((OPEN, CLOSE), "words")
            mixed = self.around(lark, words, f"({lark.mark(begin)} {calls})?")
        else:
            mixed = f"{lark.up_to(begin, 'words')} {calls} | {lark.without(begin, 'rest')}"
        return lark.rule("mixed", mixed)

    def around(self, lark: Lark, inside: str, after: str = "") -> str:
        """Return the expression for a response, whose tags may be left out."""
        begin, end, last = map(lark.mark, (RESPONSE, RESPONSE_END, MESSAGE_END))
        return f"({begin})? ({inside}) ({end})? {after} ({last})?"

    def _calls(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        tags = KIMI_K3_TAGS
        lark.rule("INDEX", "/[1-9][0-9]?/")
        end = lark.mark(tags.function_end)
        index = f"""{lark_text('" index="')} INDEX {lark_text('"')} {lark.mark(SEP)}"""

        def written(tool: Tool) -> str:
            inside = tagged_arguments(lark, tool, tools.index(tool), tags)
            return f"{lark.mark(tags.function + tool.name)} {index} {inside} {end}"

        call = lark.rule("inner", lark.each(tools, written))
        calls = several(call, parallel=parallel)
        return f"{calls} {lark.mark(tags.end)}"


KIMI_K3 = KimiK3Grammar()
KIMI_K3_FAMILY = Family(
    (OPEN, CLOSE, SEP),
    (OPEN, CLOSE, "'call'"),
    tagged_beginnings(KIMI_K3_TAGS),
    lambda *_: KIMI_K3,
    read_kimi_k3,
    reads_all=True,
    thinking=KIMI_K3_THINK,
    around=KIMI_K3.around,
)

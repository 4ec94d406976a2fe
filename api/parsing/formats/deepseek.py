"""DeepSeek: delimiters around each call, and delimiters around all calls.

V3 and V3.1 write the text between the delimiters differently. Source: the models' published chat
templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..call_grammars import CallGrammar, Marked, after_name, between, several
from ..family import Family
from ..grammars import Lark
from ..output_parser import Reading
from ..reading.answer import Beginning
from ..reading.call_state import CallState
from ..reading.ends import Ends
from ..reading.json_call import json_block, named_call
from ..reading.names import NAME, expect_arguments, read_name, skip_to

if TYPE_CHECKING:
    from ...types.results import Tool

DEEPSEEK_CALLS_BEGIN, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEP = "<｜tool▁sep｜>"
FENCE_BEGIN = "```json"


def _deepseek(call: CallState) -> Reading[None]:
    source = call.source
    names = ("function", *call.offers.names)
    begins = {DEEPSEEK_BEGIN: tuple(f"{name}{DEEPSEEK_SEP}" for name in names)}
    ends = Ends((DEEPSEEK_END, DEEPSEEK_CALLS_END), begins)
    is_first = yield from source.literal(DEEPSEEK_CALLS_BEGIN)
    yield from source.white()
    while (yield from source.literal(DEEPSEEK_BEGIN)) or is_first:
        yield from source.white()
        if (yield from source.peek()) in ("{", "["):
            yield from json_block(call, ends)
            break
        name = yield from _deepseek_name(call)
        yield from named_call(call, call.check(name), ends)
        yield from source.close(DEEPSEEK_END)
        yield from skip_to(source, DEEPSEEK_BEGIN)
        is_first = False
    yield from source.close(DEEPSEEK_CALLS_END)


def _deepseek_name(call: CallState) -> Reading[str]:
    """Read the name of the tool; V3 writes the type, "function", before it."""
    source = call.source
    name = yield from read_name(source)
    if not (yield from source.close(DEEPSEEK_SEP)):
        yield from expect_arguments(source)
        return name
    yield from source.white()
    second = source.text(0, (yield from source.after(NAME, 0)))
    if second and (name == "function" or second in call.offers):
        source.take(len(second))
        yield from source.close(DEEPSEEK_SEP)
        return second
    return name


DEEPSEEK = tuple(
    Beginning(mark=mark, read=_deepseek, ends=(DEEPSEEK_END, DEEPSEEK_CALLS_END))
    for mark in (DEEPSEEK_CALLS_BEGIN, DEEPSEEK_BEGIN)
)


def _deepseek_block(lark: Lark, one: str, between: str, parallel: bool) -> str:
    call = lark.rule("inner", f"{lark.mark(DEEPSEEK_BEGIN)} {one} {lark.mark(DEEPSEEK_END)}")
    return f"{several(call, between, parallel=parallel)} {lark.mark(DEEPSEEK_CALLS_END)}"


def _deepseek_v3(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    one = lark.each(tools, between("%s\n```json\n", "\n```"))
    return _deepseek_block(lark, f'"function" {lark.mark(DEEPSEEK_SEP)} {one}', "\n", parallel)


def _deepseek_v31(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    one = lark.each(tools, after_name(lark.mark(DEEPSEEK_SEP)))
    return _deepseek_block(lark, one, "", parallel)


DEEPSEEK_V3 = Marked(DEEPSEEK_CALLS_BEGIN, _deepseek_v3, repeats=False)
DEEPSEEK_V31 = Marked(DEEPSEEK_CALLS_BEGIN, _deepseek_v31, repeats=False)


def _grammar(template: str, _: Mapping[str, int]) -> CallGrammar:
    return DEEPSEEK_V3 if FENCE_BEGIN in template else DEEPSEEK_V31


DEEPSEEK_FAMILY = Family(
    (DEEPSEEK_CALLS_BEGIN, DEEPSEEK_CALLS_END, DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_SEP),
    (DEEPSEEK_CALLS_BEGIN,),
    DEEPSEEK,
    _grammar,
)

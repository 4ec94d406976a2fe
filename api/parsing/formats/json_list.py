"""Granite, Phi 4, Cohere, Hunyuan: a list of JSON objects after a delimiter, or between two
delimiters.

Source: the models' published chat templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..call_grammars import CallGrammar, Marked, between, several
from ..family import Family
from ..grammars import Lark
from ..output_parser import Reading
from ..reading.answer import Beginning
from ..reading.call_state import CallState
from ..reading.ends import Ends
from ..reading.json_call import json_block

if TYPE_CHECKING:
    from ...types.results import Tool

GRANITE_CALLS = "<|tool_call|>"
PHI_CALLS_END = "<|/tool_call|>"
COHERE_CALLS, COHERE_CALLS_END = "<|START_ACTION|>", "<|END_ACTION|>"
HUNYUAN_CALLS, HUNYUAN_CALLS_END = "<tool_calls>", "</tool_calls>"


def json_list(begin: str, end: str) -> tuple[Beginning, ...]:
    """Return how calls in a JSON list begin: the list is between two delimiters or after one."""

    def read(call: CallState) -> Reading[None]:
        yield from call.source.expect(begin)
        yield from call.source.white()
        yield from json_block(call, Ends((end,) if end else (), {begin: ('[{"', '{"name"')}))
        if end:
            yield from call.source.close(end)

    return (Beginning(mark=begin, read=read, ends=(end,) if end else ()),)


def _json_list(begin: str, end: str, each: str = '{"name": "%s", "arguments": ') -> Marked:
    """Return the grammar for a list of objects; ``each`` is an object's text before its
    arguments.
    """

    def block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        one = lark.each(tools, between(each, "}"))
        written = f'"[" {several(one, ", ", parallel=parallel)} "]"'
        return f"{written} {lark.mark(end)}" if end else written

    return Marked(begin, block, repeats=False)


GRANITE = _json_list(GRANITE_CALLS, "")
PHI4 = _json_list(GRANITE_CALLS, PHI_CALLS_END)
COHERE = _json_list(COHERE_CALLS, COHERE_CALLS_END, '{"tool_name": "%s", "parameters": ')
HUNYUAN = _json_list(HUNYUAN_CALLS, HUNYUAN_CALLS_END)


def _family(begin: str, end: str, grammar: CallGrammar, *clues: str) -> Family:
    marks = (begin, end) if end else (begin,)
    return Family(marks, clues or (begin,), json_list(begin, end), lambda *_: grammar)


COHERE_FAMILY = _family(COHERE_CALLS, COHERE_CALLS_END, COHERE)
PHI4_FAMILY = _family(GRANITE_CALLS, PHI_CALLS_END, PHI4, "<|/tool|>")
GRANITE_FAMILY = _family(GRANITE_CALLS, "", GRANITE)
HUNYUAN_FAMILY = _family(HUNYUAN_CALLS, HUNYUAN_CALLS_END, HUNYUAN)

"""Kimi K2: each call between delimiters, after ``functions.name:index``; delimiters around all
calls.

Source: the models' published chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...structured.grammar_text import lark_text
from ..call_grammars import Marked, several
from ..family import Family
from ..grammars import Lark, arguments
from ..output_parser import Reading
from ..reading.answer import Beginning
from ..reading.call_state import CallState
from ..reading.ends import Ends
from ..reading.json_call import json_block, named_call
from ..reading.names import expect_arguments, read_name, skip_to

if TYPE_CHECKING:
    from ...types.results import Tool

KIMI_SECTION, KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_INDEX = re.compile(r":\d*$")


def _kimi(call: CallState) -> Reading[None]:
    source = call.source
    begins = {KIMI_CALL: tuple(f"functions.{name}:" for name in call.offers.names)}
    ends = Ends((KIMI_CALL_END, KIMI_SECTION_END), begins)
    is_first = yield from source.literal(KIMI_SECTION)
    yield from source.white()
    while (yield from source.literal(KIMI_CALL)) or is_first:
        yield from source.white()
        if (yield from source.peek()) in ("{", "["):
            yield from json_block(call, ends)
            break
        written = yield from read_name(source)
        name = call.check(_KIMI_INDEX.sub("", written).removeprefix("functions."))
        if not (yield from source.close(KIMI_ARGUMENTS)):
            yield from expect_arguments(source)
        yield from named_call(call, name, ends)
        yield from source.close(KIMI_CALL_END)
        yield from skip_to(source, KIMI_CALL)
        is_first = False
    yield from source.close(KIMI_SECTION_END)


KIMI = tuple(
    Beginning(mark=mark, read=_kimi, ends=(KIMI_CALL_END, KIMI_SECTION_END))
    for mark in (KIMI_SECTION, KIMI_CALL)
)


def _kimi_block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    def written(tool: Tool) -> str:
        name = lark_text(f"functions.{tool.name}:")
        return f"{name} INDEX {lark.mark(KIMI_ARGUMENTS)} {arguments(tool)}"

    lark.rule("INDEX", r"/[0-9]{1,3}/")
    one = f"{lark.mark(KIMI_CALL)} {lark.each(tools, written)} {lark.mark(KIMI_CALL_END)}"
    call = lark.rule("inner", one)
    return f"{several(call, parallel=parallel)} {lark.mark(KIMI_SECTION_END)}"


KIMI_GRAMMAR = Marked(KIMI_SECTION, _kimi_block, repeats=False)


def with_numbered_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the conversation with call ids of the form ``functions.name:index``.

    Kimi's templates write the id in place of the call's name. Calls are numbered through the whole
    conversation.
    """
    ids: dict[str, str] = {}
    return [_numbered(message, ids) for message in messages]


def _numbered(message: Mapping[str, Any], ids: dict[str, str]) -> Mapping[str, Any]:
    changed = dict(message)
    if isinstance(changed.get("tool_calls"), list | tuple):
        changed["tool_calls"] = [_renamed(call, ids) for call in changed["tool_calls"]]
    given = changed.get("tool_call_id")
    if isinstance(given, str) and given in ids:
        changed["tool_call_id"] = ids[given]
    return changed


def _renamed(call: Mapping[str, Any], ids: dict[str, str]) -> Mapping[str, Any]:
    function = call.get("function")
    name = function.get("name", "") if isinstance(function, Mapping) else ""
    written = f"functions.{name}:{len(ids)}"
    ids[str(call.get("id", written))] = written
    return {**call, "id": written}


KIMI_FAMILY = Family(
    (KIMI_SECTION, KIMI_SECTION_END, KIMI_CALL, KIMI_CALL_END, KIMI_ARGUMENTS),
    (KIMI_SECTION,),
    KIMI,
    lambda *_: KIMI_GRAMMAR,
    prepare=with_numbered_ids,
)

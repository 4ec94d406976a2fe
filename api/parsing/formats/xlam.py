"""xLAM 2: the whole answer is a JSON list, ``[{"name": "f", "arguments": {...}}, ...]``.

Source: the chat templates that vLLM publishes for xLAM 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..call_grammars import Bare, between, several
from ..family import Family
from ..grammars import Lark
from ..output_parser import Reading, Source
from ..reading.answer import Beginning, Where
from ..reading.json_call import json_calls

if TYPE_CHECKING:
    from ...types.results import Tool


def _is_list(source: Source) -> Reading[bool]:
    at = yield from source.after_white(1)
    return (yield from source.char(at)) == "{"


XLAM = (Beginning(mark="[", read=json_calls, is_ahead=_is_list, where=Where.START, is_plain=True),)


def _block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    one = lark.each(tools, between('{"name": "%s", "arguments": ', "}"))
    return f'"[" {several(one, ", ", parallel=parallel)} "]"'


XLAM_GRAMMAR = Bare(("[",), _block)
XLAM_FAMILY = Family(
    (), ("tool_call_name", "in a single JSON array"), XLAM, lambda *_: XLAM_GRAMMAR
)

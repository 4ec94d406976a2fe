"""Llama 3: the whole answer is ``{"name": ..., "parameters": {...}}``, or several joined by ";".

Source: the models' published chat templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..call_grammars import Bare, between, several
from ..family import Family
from ..grammars import Lark
from ..output_parser import Reading
from ..reading.answer import Beginning, Where
from ..reading.call_state import CallState
from ..reading.ends import Ends
from ..reading.json_call import json_calls

if TYPE_CHECKING:
    from ...types.results import Tool

PYTHON_TAG = "<|python_tag|>"


def _llama3(call: CallState) -> Reading[None]:
    source = call.source
    if (yield from source.literal(PYTHON_TAG)):
        yield from source.white()
    yield from json_calls(call, Ends(begins={PYTHON_TAG: ()}))


LLAMA3 = (
    Beginning(mark="{", read=_llama3, where=Where.START, ends=(";",), is_plain=True),
    Beginning(mark=PYTHON_TAG, read=_llama3, ends=(";",)),
)


def _llama3_block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    one = lark.each(tools, between('{"name": "%s", "parameters": ', "}"))
    return several(one, "; ", parallel=parallel)


LLAMA3_GRAMMAR = Bare(("{", PYTHON_TAG), _llama3_block)
LLAMA3_FAMILY = Family(
    (PYTHON_TAG,), ("<|start_header_id|>", '"parameters"'), LLAMA3, lambda *_: LLAMA3_GRAMMAR
)

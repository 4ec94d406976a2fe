"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Source: the models' published chat templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..call_grammars import Marked, between
from ..family import Family
from ..grammars import Lark
from ..reading.answer import Beginning
from .tagged import read_block

if TYPE_CHECKING:
    from ...types.results import Tool

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"


HERMES = (Beginning(mark=HERMES_BEGIN, read=read_block, ends=(HERMES_END,)),)


def _hermes(lark: Lark, tools: Sequence[Tool], _: bool) -> str:
    one = lark.each(tools, between('\n{"name": "%s", "arguments": ', "}\n"))
    return f"{one} {lark.mark(HERMES_END)}"


HERMES_GRAMMAR = Marked(HERMES_BEGIN, _hermes, between="\n")
HERMES_FAMILY = Family(
    (HERMES_BEGIN, HERMES_END), (HERMES_BEGIN,), HERMES, lambda *_: HERMES_GRAMMAR
)

"""GigaChat 3: one call, ``{"name": "f", "arguments": {...}}``, in a message of its own.

Version 3 writes ``<|message_sep|>``, an empty line and ``function call<|role_sep|>`` before it, 3.1
``<|function_call|>``. Sources: the chat templates that llama.cpp publishes for these models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..call_grammars import Marked, between
from ..family import Family
from ..grammars import Lark
from ..output_parser import Reading
from ..reading.answer import Beginning
from ..reading.call_state import CallState
from ..reading.ends import Ends
from ..reading.json_call import json_block

if TYPE_CHECKING:
    from ...types.results import Tool

MESSAGE_SEP, ROLE_SEP, FUNCTION_CALL = "<|message_sep|>", "<|role_sep|>", "<|function_call|>"
_ROLE = f"function call{ROLE_SEP}"
_NEXT = f"{MESSAGE_SEP}\n\n{_ROLE}"
BEGINS = (_NEXT, _ROLE, FUNCTION_CALL)


def _gigachat(call: CallState) -> Reading[None]:
    source = call.source
    mark = yield from source.which(BEGINS)
    yield from source.expect(mark)
    yield from source.white()
    begins = {MESSAGE_SEP: ("function call",), FUNCTION_CALL: ('{"name"',)}
    yield from json_block(call, Ends((MESSAGE_SEP,), begins))


GIGACHAT = tuple(Beginning(mark=mark, read=_gigachat, ends=(MESSAGE_SEP,)) for mark in BEGINS)


def _marked(mark: str) -> Marked:
    def block(lark: Lark, tools: Sequence[Tool], _: bool) -> str:
        one = lark.each(tools, between('{"name": "%s", "arguments": ', "}"))
        return f'"\\n" {one}' if mark == _NEXT else one

    return Marked(mark, block, repeats=False)


GIGACHAT3, GIGACHAT31 = _marked(_NEXT), _marked(FUNCTION_CALL)


# 3.1 ends its answers with <|message_sep|>, so this token is not one of its marks.
GIGACHAT31_FAMILY = Family(
    (FUNCTION_CALL,), (ROLE_SEP, FUNCTION_CALL), GIGACHAT, lambda *_: GIGACHAT31
)
GIGACHAT_FAMILY = Family(
    (MESSAGE_SEP, ROLE_SEP), (ROLE_SEP, MESSAGE_SEP), GIGACHAT, lambda *_: GIGACHAT3
)

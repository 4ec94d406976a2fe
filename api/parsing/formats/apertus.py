"""Apertus: ``<|tools_prefix|>[{"f": {...}}, {"g": {}}]<|tools_suffix|>``, with names as keys.

Source: the chat template that llama.cpp publishes for Apertus 8B Instruct.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..call_grammars import Marked, between, several
from ..family import Family
from ..grammars import Lark
from ..output_parser import Reading, Source
from ..reading.answer import Beginning
from ..reading.call_state import CallState
from ..reading.ends import Ends
from ..reading.json_call import PLAIN_KEYS, json_block, named_call
from ..reading.json_text import json_string

if TYPE_CHECKING:
    from ...types.results import Tool

APERTUS_CALLS, APERTUS_CALLS_END = "<|tools_prefix|>", "<|tools_suffix|>"
_BEFORE_NAME = re.compile(r"[\s,;{\[]+")
_BEFORE_KEY = re.compile(r"[\s{\[]+")
_IN_KEY = re.compile(r'[^"]+')


def _apertus(call: CallState) -> Reading[None]:
    source = call.source
    ends = Ends((APERTUS_CALLS_END,), {APERTUS_CALLS: ("[{",)})
    yield from source.expect(APERTUS_CALLS)
    yield from source.white()
    if not (yield from _has_name_as_key(call)):
        yield from json_block(call, ends)
    else:
        yield from source.run(_BEFORE_NAME)
        while True:
            name = call.check((yield from json_string(source)))
            yield from source.white()
            yield from source.expect(":")
            yield from named_call(call, name, ends)
            if not (yield from _is_name(source)):
                break
            yield from source.run(_BEFORE_NAME)
    yield from source.close(APERTUS_CALLS_END)


def _has_name_as_key(call: CallState) -> Reading[bool]:
    """Whether the first key is a tool's name, not a key such as ``name`` of another format."""
    source = call.source
    at = yield from source.after(_BEFORE_KEY, 0)
    if at == 0 or (yield from source.char(at)) != '"':
        return False
    key = source.text(at + 1, (yield from source.after(_IN_KEY, at + 1)))
    return key in call.offers or key not in PLAIN_KEYS


def _is_name(source: Source) -> Reading[bool]:
    """Whether a further name follows, in the same object or in the next one."""
    at = yield from source.after(_BEFORE_NAME, 0)
    return at > 0 and (yield from source.char(at)) == '"'


APERTUS = (Beginning(mark=APERTUS_CALLS, read=_apertus, ends=(APERTUS_CALLS_END,)),)


def _block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    one = lark.each(tools, between('{"%s": ', "}"))
    return f'"[" {several(one, ", ", parallel=parallel)} "]" {lark.mark(APERTUS_CALLS_END)}'


APERTUS_GRAMMAR = Marked(APERTUS_CALLS, _block, repeats=False)
APERTUS_FAMILY = Family(
    (APERTUS_CALLS, APERTUS_CALLS_END), (APERTUS_CALLS,), APERTUS, lambda *_: APERTUS_GRAMMAR
)

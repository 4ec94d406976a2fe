"""Reading calls of Gemma: ``call:f{city:<|"|>Paris<|"|>,days:3}`` between marks.

The arguments become JSON as they come: keys have no quotes, texts stand between marks of their
own. Sources: the published chat templates of Gemma 4 and FunctionGemma.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..structured.grammar_text import lark_text
from .calls import CallState, marked_calls
from .grammars import Lark, listed, not_strict, properties_of, required_of
from .output_parser import CallArguments, Cut, Malformed, Reading, Source
from .tagged import is_json, kinds, listed_values

if TYPE_CHECKING:
    from ..types.results import Tool

MAX_DEPTH = 64  # objects within objects
_CALL = "call:"
_NAME = re.compile(r"[\w.:-]+")
_KEY = re.compile(r"[^\s:,{}\[\]<]+")
_SCALAR = re.compile(r"[^\s,{}\[\]<]+")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class GemmaMarks:
    """Around a call, and around a text within it."""

    begin: str
    end: str
    quote: str


GEMMA4 = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")


def read_gemma(source: Source, marks: GemmaMarks) -> Reading[None]:
    """Words and calls."""

    def read(call: CallState) -> Reading[None]:
        return _call(call, marks)

    yield from marked_calls(source, marks.begin, read, marks.end)


def _call(call: CallState, marks: GemmaMarks) -> Reading[None]:
    source = call.source
    yield from source.expect(marks.begin)
    yield from source.white()
    yield from source.expect(_CALL)
    name = yield from source.run(_NAME)
    if not name and not (yield from source.peek()):
        raise Cut
    name = call.check(name)
    yield from source.white()
    if not (yield from source.ahead("{")):
        if (yield from source.peek()):
            raise Malformed
        yield from call.begin(name)
        raise Cut
    yield from call.begin(name)
    yield from _object(source, marks, 0)
    yield from call.end()
    yield from source.white()
    yield from source.closing(marks.end)


def _object(source: Source, marks: GemmaMarks, depth: int) -> Reading[None]:
    source.take(1)
    yield CallArguments("{")
    between = ""
    yield from source.white()
    while not (yield from source.literal("}")):
        yield CallArguments(between)
        yield from _key(source, marks)
        yield from source.white()
        yield from source.expect(":")
        yield CallArguments(": ")
        yield from source.white()
        yield from _value(source, marks, depth + 1)
        yield from source.separator("}")
        between = ", "
    yield CallArguments("}")


def _key(source: Source, marks: GemmaMarks) -> Reading[None]:
    if (yield from source.ahead(marks.quote)):
        yield from _text(source, marks)
        return
    key = yield from source.run(_KEY)
    if not key:
        raise Malformed if (yield from source.peek()) else Cut
    yield CallArguments(json.dumps(key, ensure_ascii=False))


def _value(source: Source, marks: GemmaMarks, depth: int) -> Reading[None]:
    first = yield from source.peek()
    if depth > MAX_DEPTH:
        raise Malformed
    if first == "{":
        yield from _object(source, marks, depth)
    elif first == "[":
        yield from _list(source, marks, depth)
    elif (yield from source.ahead(marks.quote)):
        yield from _text(source, marks)
    else:
        word = yield from source.run(_SCALAR)
        if not word:
            raise Malformed if first else Cut
        yield CallArguments(_scalar(word))


def _list(source: Source, marks: GemmaMarks, depth: int) -> Reading[None]:
    source.take(1)
    yield CallArguments("[")
    between = ""
    yield from source.white()
    while not (yield from source.literal("]")):
        yield CallArguments(between)
        yield from _value(source, marks, depth + 1)
        yield from source.separator("]")
        between = ", "
    yield CallArguments("]")


def _text(source: Source, marks: GemmaMarks) -> Reading[None]:
    yield from source.expect(marks.quote)
    yield CallArguments('"')
    for event in source.until(marks.quote, CallArguments):
        if event is None:
            yield None
        else:
            assert isinstance(event, CallArguments)
            yield CallArguments(json.dumps(event.text, ensure_ascii=False)[1:-1])
    if not (yield from source.literal(marks.quote)):
        raise Cut
    yield CallArguments('"')


def _scalar(word: str) -> str:
    """A number or a constant; a word without marks is a text."""
    word = _CONSTANTS.get(word, word)
    return word if is_json(word) else json.dumps(word, ensure_ascii=False)


# -- grammars -------------------------------------------------------------------------------------

_RULES = {"integer": "INT", "number": "NUMBER", "boolean": "BOOL", "null": '"null"'}


def gemma_block(lark: Lark, tools: Sequence[Tool], marks: GemmaMarks) -> str:
    """Grammar of one call, from behind its first mark."""
    lark.rule("INT", r"/-?(0|[1-9][0-9]{0,17})/")
    lark.rule("NUMBER", r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/")
    lark.rule("BOOL", '"true" | "false"')
    quote = lark.mark(marks.quote)
    lark.rule("text", f"{quote} {lark.up_to(marks.quote, 'inside')}")
    lark.rule("KEY", r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}/")
    lark.rule("list", '"[" (any ("," any)*)? "]"')
    lark.rule("pair", 'KEY ":" any')
    lark.rule("object", '"{" (pair ("," pair)*)? "}"')
    lark.rule("any", 'text | NUMBER | BOOL | "null" | list | object')

    def written(tool: Tool) -> str:
        begin = lark_text(f"{_CALL}{tool.name}{{")
        return f'{begin} {_arguments(lark, tool, tools.index(tool), quote)} "}}"'

    return f"{lark.each(tools, written)} {lark.mark(marks.end)}"


def _arguments(lark: Lark, tool: Tool, index: int, quote: str) -> str:
    properties = properties_of(tool)
    if not properties and (tool.parameters or {}).get("additionalProperties") is not False:
        return '(pair ("," pair)*)?'
    required, root = required_of(tool), tool.parameters or {}
    members = [
        (f"{lark_text(key + ':')} ({_of(tool, schema, root, quote)})", key in required)
        for key, schema in properties.items()
    ]
    return listed(lark, members, f"args_{index}", comma=",")


def _of(tool: Tool, schema: Mapping[str, Any], root: Mapping[str, Any], quote: str) -> str:
    """A value of a schema by its type; a strict tool is refused where that is not all."""
    values = listed_values(schema)
    if values and all(isinstance(each, str | bool | int) or each is None for each in values):
        return " | ".join(
            f"{quote} {lark_text(each)} {quote}" if isinstance(each, str)
            else lark_text(json.dumps(each))
            for each in values
        )  # fmt: skip
    names = kinds(schema, root)
    told = set(schema) - {"type", "description", "title", "default", "$defs", "definitions"}
    if tool.strict and (told or not names <= {"string", *_RULES}):
        raise not_strict(tool, "a keyword of its schema")
    others = {"string": "text", "array": "list", "object": "object", **_RULES}
    return " | ".join(others[name] for name in sorted(names) if name in others) or "any"

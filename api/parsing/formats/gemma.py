"""Reads Gemma's calls: ``call:f{city:<|"|>Paris<|"|>,days:3}`` between delimiters.

The arguments are converted to JSON as they arrive: keys are unquoted, and strings are quoted by a
special delimiter. Sources: the published chat templates of Gemma 4 and FunctionGemma.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...structured.grammar_text import lark_text
from ..call_grammars import Marked
from ..family import Family
from ..grammars import Lark, listed, not_strict, properties_of, required_of, takes_any
from ..output_parser import CallArguments, Cut, Malformed, Reading, collected
from ..reading.answer import Beginning
from ..reading.call_state import CallState
from ..reading.ends import Ends
from ..reading.json_call import json_block, surplus
from ..reading.json_text import json_string, scalar
from ..reading.offers import kinds, listed_values

if TYPE_CHECKING:
    from ...types.results import Tool

MAX_DEPTH = 64  # maximum depth of nested objects
_CALL = "call:"
_NAME = re.compile(r"[\w.:-]+")
_KEY = re.compile(r"[^\s:,{}\[\]<]+")
_BETWEEN = re.compile(r"[\s,;]+")
_IN_WORD = re.compile(r"[^,{}\[\]<]+")


@dataclass(frozen=True, slots=True)
class GemmaMarks:
    """The delimiters around a call, and the delimiter around a string in it."""

    begin: str
    end: str
    quote: str


GEMMA4 = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")


def gemma_beginnings(marks: GemmaMarks) -> tuple[Beginning, ...]:
    """Return the only beginning of calls in this format."""
    return (Beginning(mark=marks.begin, read=partial(_calls, marks=marks), ends=(marks.end,)),)


def _calls(call: CallState, marks: GemmaMarks) -> Reading[None]:
    source = call.source
    yield from source.expect(marks.begin)
    yield from source.white()
    if (yield from source.peek()) in ("{", "[", "`"):
        yield from json_block(call, Ends((marks.end,), {marks.begin: ('{"name"', '[{"')}))
    else:
        yield from _Call(call, marks).read()
        while (yield from source.ahead(_CALL, (at := (yield from source.after(_BETWEEN, 0))))):
            source.take(at)
            yield from _Call(call, marks).read()
    yield from source.close(marks.end)


class _Call:
    """Reads one call."""

    def __init__(self, call: CallState, marks: GemmaMarks) -> None:
        self._call, self._source, self._marks = call, call.source, marks
        self._ends = Ends((marks.end,), {marks.begin: (_CALL,)})

    def read(self) -> Reading[None]:
        """Read the call. Raises `Malformed` and `Cut`."""
        call, source = self._call, self._source
        is_marked = yield from source.literal(_CALL)
        yield from source.white()
        name = yield from source.run(_NAME)
        if not name and not (yield from source.peek()):
            raise Cut
        name = call.check(name)
        if not is_marked and name not in call.offers:
            raise Malformed
        yield from source.white()
        if (yield from self._ends.here(source)):
            yield from call.whole(name, "{}")
            return
        if not (yield from source.ahead("{")):
            if (yield from source.peek()):
                raise Malformed
            yield from call.begin(name)
            raise Cut
        yield from call.begin(name)
        yield from self._object(0)
        yield from call.end()
        yield from surplus(call)
        call.settle()

    def _object(self, depth: int) -> Reading[None]:
        source = self._source
        source.take(1)
        yield CallArguments("{")
        between = ""
        yield from source.white()
        while not (yield from self._ends.closes(source, "}")):
            key = yield from self._key()
            yield from source.white()
            if not (yield from source.literal(":")):
                yield from self._expect_no_value()
            yield CallArguments(f"{between}{key}: ")
            yield from source.white()
            yield from self._value(depth + 1)
            yield from source.comma()
            between = ", "
        yield CallArguments("}")

    def _expect_no_value(self) -> Reading[None]:
        """Check that a member ends after its key; its value is then null.

        Raises `Malformed` and `Cut`.
        """
        char = yield from self._source.peek()
        if not char:
            raise Cut
        if char not in ",}":
            raise Malformed

    def _key(self) -> Reading[str]:
        source = self._source
        if (yield from source.ahead(self._marks.quote)):
            return (yield from collected(self._text()))
        if (yield from source.peek()) in ('"', "'"):
            return json.dumps((yield from json_string(source)), ensure_ascii=False)
        key = yield from source.run(_KEY)
        if not key:
            raise Malformed if (yield from source.peek()) else Cut
        return json.dumps(key, ensure_ascii=False)

    def _value(self, depth: int) -> Reading[None]:
        source = self._source
        first = yield from source.peek()
        if depth > MAX_DEPTH:
            raise Malformed
        if first == "{":
            yield from self._object(depth)
        elif first == "[":
            yield from self._list(depth)
        elif first in ('"', "'"):
            yield CallArguments(json.dumps((yield from json_string(source)), ensure_ascii=False))
        elif (yield from source.ahead(self._marks.quote)):
            yield from self._text()
        else:
            word = yield from self._word()
            if not word and not (yield from source.peek()):
                raise Cut
            yield CallArguments(scalar(word))

    def _word(self) -> Reading[str]:
        """Read unquoted text up to the end of a value."""
        source, pieces = self._source, list[str]()
        while True:
            pieces.append((yield from source.run(_IN_WORD)))
            if (yield from source.peek()) != "<" or (yield from self._ends.here(source)):
                return "".join(pieces).strip()
            pieces.append(source.take(1))

    def _list(self, depth: int) -> Reading[None]:
        source = self._source
        source.take(1)
        yield CallArguments("[")
        between = ""
        yield from source.white()
        while not (yield from self._ends.closes(source, "]")):
            yield CallArguments(between)
            yield from self._value(depth + 1)
            yield from source.comma()
            between = ", "
        yield CallArguments("]")

    def _text(self) -> Reading[None]:
        """Read a string between quote marks; a delimiter that ends the call may end it too."""
        source, quote = self._source, self._marks.quote
        yield from source.expect(quote)
        yield CallArguments('"')
        while True:
            mark = yield from _escaped(source.until_any((quote, *self._ends.marks), CallArguments))
            if (yield from source.literal(quote)):
                break
            if not mark:
                raise Cut
            if (yield from self._ends.in_string(source)):
                raise Malformed
            yield CallArguments(source.take(len(mark)))
        yield CallArguments('"')


def _escaped(reading: Reading[str]) -> Reading[str]:
    """Yield the events of ``reading``, with their text escaped for a JSON string."""
    while True:
        try:
            event = next(reading)
        except StopIteration as end:
            return str(end.value)
        if isinstance(event, CallArguments):
            event = CallArguments(json.dumps(event.text, ensure_ascii=False)[1:-1])
        yield event


# -- grammars -------------------------------------------------------------------------------------

_RULES = {"integer": "INT", "number": "NUMBER", "boolean": "BOOL", "null": '"null"'}


def gemma_block(lark: Lark, tools: Sequence[Tool], marks: GemmaMarks) -> str:
    """Return the rule for one call without its first delimiter."""
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
        return f'{begin} {_arguments(lark, tool, tools.index(tool), marks)} "}}"'

    return f"{lark.each(tools, written)} {lark.mark(marks.end)}"


def _arguments(lark: Lark, tool: Tool, index: int, marks: GemmaMarks) -> str:
    properties = properties_of(tool)
    if not properties and takes_any(tool):
        return '(pair ("," pair)*)?'
    required, root = required_of(tool), tool.parameters or {}
    if tool.input_pattern is not None:
        text = lark.matching(tool.input_pattern, marks.quote, f"input_{index}")
        return f'"input:" {lark.mark(marks.quote)} {text}'
    members = [
        (
            f"{lark_text(key + ':')} ({_of(tool, schema, root, lark.mark(marks.quote))})",
            key in required,
        )
        for key, schema in properties.items()
    ]
    return listed(lark, members, f"args_{index}", comma=",")


def _of(tool: Tool, schema: Mapping[str, Any], root: Mapping[str, Any], quote: str) -> str:
    """Return the rule for a value, by the types of its schema.

    Raises `InvalidRequest` for a strict tool whose schema has keywords that the rule cannot
    enforce.
    """
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
        raise not_strict(tool, "the model's format cannot enforce all keywords of the schema")
    others = {"string": "text", "array": "list", "object": "object", **_RULES}
    return " | ".join(others[name] for name in sorted(names) if name in others) or "any"


def _gemma(marks: GemmaMarks) -> Marked:
    def block(lark: Lark, tools: Sequence[Tool], _: bool) -> str:
        return gemma_block(lark, tools, marks)

    return Marked(marks.begin, block)


GEMMA_MARKS = {"gemma4": GEMMA4, "function-gemma": FUNCTION_GEMMA}
GEMMA = {name: _gemma(marks) for name, marks in GEMMA_MARKS.items()}


def _family(name: str) -> Family:
    marks = GEMMA_MARKS[name]
    all_marks = (marks.begin, marks.end, marks.quote)
    clues = (marks.begin, marks.quote)
    return Family(all_marks, clues, gemma_beginnings(marks), lambda *_: GEMMA[name])


GEMMA4_FAMILY, FUNCTION_GEMMA_FAMILY = _family("gemma4"), _family("function-gemma")

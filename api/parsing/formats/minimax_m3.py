"""MiniMax M3: elements whose tags follow a token, ``]<]minimax[>[``, written ``~`` here.

``~<tool_call>~<invoke name="f">~<city>Oslo~</city>~<list>~<item>1~</item>~</list>~</invoke>``: an
argument is an element of its name, an object has elements, and a list has elements ``item``. The
tool's schema determines the type of each value. Source: the chat template that llama.cpp publishes
for the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...structured.grammar_text import lark_text
from ..call_grammars import Marked, several
from ..family import Family
from ..grammars import Lark, not_strict, properties_of, required_of, takes_any
from ..output_parser import CallArguments, Cut, Ended, Malformed, Reading, Source, collected
from ..reading.answer import Beginning
from ..reading.call_state import CallState
from ..reading.offers import child, kinds, listed_values
from .tagged import as_json

if TYPE_CHECKING:
    from ...types.results import Tool

MAX_DEPTH = 64  # maximum depth of nested elements
NS = "]<]minimax[>["
CALLS, CALLS_END = f"{NS}<tool_call>", f"{NS}</tool_call>"
INVOKE, INVOKE_END = f"{NS}<invoke", f"{NS}</invoke>"
_ATTRIBUTE = re.compile(r"[^<>\n]+")
_NAME = re.compile(r"""\s+name\s*=\s*["']?([^"']+)["']?\s*""")
_TAG = re.compile(r"[^<>\n\]]+")
_ITEM = "item"
Schema = Mapping[str, Any]


def _minimax_m3(call: CallState) -> Reading[None]:
    source = call.source
    yield from source.literal(CALLS)
    yield from source.white()
    is_first = True
    while is_first or (yield from source.ahead(INVOKE)):
        yield from _Invoke(call).read()
        at = yield from source.after_white()
        if (yield from source.ahead(INVOKE, at)):
            source.take(at)
        is_first = False
    yield from source.close(CALLS_END)


class _Invoke:
    """Reads one call."""

    def __init__(self, call: CallState) -> None:
        self._call, self._source = call, call.source
        self._root: Schema = {}
        self._open: list[str] = []  # the names of the elements that are open

    def read(self) -> Reading[None]:
        """Read the call. Raises `Malformed` and `Cut`."""
        call, source = self._call, self._source
        yield from source.expect(INVOKE)
        found = _NAME.fullmatch((yield from source.run(_ATTRIBUTE)))
        if found is None:
            raise Malformed if (yield from source.peek()) else Cut
        yield from source.expect(">")
        name = call.check(found[1].strip())
        self._root = call.offers.schema(name)
        yield from call.begin(name)
        yield CallArguments("{")
        yield from self._members(self._root)
        yield CallArguments("}")
        yield from call.end()
        yield from source.close(INVOKE_END)
        call.settle()

    # -- elements -----------------------------------------------------------------------------

    def _members(self, schema: Schema) -> Reading[None]:
        """Read the elements of an object, but not the tag that ends the object."""
        before = ""
        while (name := (yield from self._next())) is not None:
            yield CallArguments(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
            yield from self._element(name, child(schema, self._root, name))
            before = ", "

    def _items(self, schema: Schema) -> Reading[None]:
        """Read the elements of a list, but not the tag that ends the list."""
        before = ""
        while (name := (yield from self._next())) is not None:
            yield CallArguments(before)
            yield from self._element(name, child(schema, self._root, None))
            before = ", "

    def _next(self) -> Reading[str | None]:
        """Take the tag that opens the next element and return its name.

        Returns None, and takes nothing, if a tag closes an open element or the call. Text between
        elements is dropped, and so are tags that close nothing.
        """
        source = self._source
        while True:
            if not (yield from _dropped(source)):
                raise Ended
            if (yield from source.which((CALLS, CALLS_END, INVOKE, INVOKE_END))):
                return None
            at = len(NS)
            if (yield from source.char(at)) != "<":
                source.take(at)
                continue
            is_end = (yield from source.char(at + 1)) == "/"
            start = at + 2 if is_end else at + 1
            stop = yield from source.after(_TAG, start)
            if (yield from source.char(stop)) != ">":
                source.take(stop)
                continue
            name = source.text(start, stop).strip()
            if is_end and name in self._open:
                return None
            source.take(stop + 1)
            if not is_end and name:
                return name

    def _element(self, name: str, schema: Schema) -> Reading[None]:
        """Read the value of an element, and the tag that closes it."""
        if len(self._open) >= MAX_DEPTH:
            raise Malformed
        self._open.append(name)
        yield from self._value(kinds(schema, self._root), schema)
        self._open.pop()
        yield from self._source.literal(f"{NS}</{name}>")

    def _value(self, types: frozenset[str], schema: Schema) -> Reading[None]:
        source = self._source
        if types == {"string"}:
            yield CallArguments('"')
            yield from _escaped(source)
            yield CallArguments('"')
            return
        text = yield from collected(source.until(NS, CallArguments))
        if not (yield from source.peek()):
            raise Cut
        nested = None if text.strip() else (yield from self._nested())
        if nested is None:
            yield CallArguments(_scalar(text, types))
        elif nested == _ITEM and ("array" in types or "object" not in types):
            yield CallArguments("[")
            yield from self._items(schema)
            yield CallArguments("]")
        else:
            yield CallArguments("{")
            yield from self._members(schema)
            yield CallArguments("}")

    def _nested(self) -> Reading[str | None]:
        """Return the name of the element that opens next; None if the next tag opens no element."""
        source, at = self._source, len(NS) + 1
        if (yield from source.which((CALLS, INVOKE))):
            return None
        if not (yield from source.ahead(f"{NS}<")) or (yield from source.char(at)) == "/":
            return None
        return source.text(at, (yield from source.after(_TAG, at)))


def _dropped(source: Source) -> Reading[bool]:
    """Drop the text before the next token `NS`; return whether there is such a token."""
    for event in source.until(NS, CallArguments):
        if event is None:
            yield None
    return bool((yield from source.peek()))


def _escaped(source: Source) -> Reading[None]:
    """Yield the text before the next token `NS`, escaped for a JSON string, without quotes."""
    for event in source.until(NS, CallArguments):
        if isinstance(event, CallArguments):
            event = CallArguments(json.dumps(event.text, ensure_ascii=False)[1:-1])
        yield event
    if not (yield from source.peek()):
        raise Cut


def _scalar(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that is a text, not elements."""
    if not text.strip() and "string" not in types and types & {"array", "object"}:
        return "[]" if "array" in types else "{}"
    return as_json(text.strip(), text, types)


def _is_invoke(source: Source) -> Reading[bool]:
    return (yield from source.char(len(INVOKE))) in (" ", "=")


def _is_block(source: Source) -> Reading[bool]:
    at = yield from source.after_white(len(CALLS))
    return (yield from source.ahead(INVOKE, at))


MINIMAX_M3 = (
    Beginning(mark=CALLS, read=_minimax_m3, is_ahead=_is_block, ends=(INVOKE_END, CALLS_END)),
    Beginning(
        mark=INVOKE, read=_minimax_m3, is_ahead=_is_invoke, ends=(INVOKE_END, CALLS_END),
        is_plain=True,
    ),
)  # fmt: skip


# -- grammars -------------------------------------------------------------------------------------

_RULES = {"integer": "INT", "number": "NUMBER", "boolean": "BOOL", "null": '"null"'}


def _block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    lark.rule("INT", r"/-?(0|[1-9][0-9]{0,17})/")
    lark.rule("NUMBER", r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/")
    lark.rule("BOOL", '"true" | "false"')
    lark.rule("NAME", r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}/")
    token, leaf = lark.mark(NS), lark.up_to(NS, "leaf")
    lark.rule("pair", f'{token} "<" NAME ">" any "</" NAME ">"')
    lark.rule("one", f'{token} "<{_ITEM}>" any "</{_ITEM}>"')
    # A value, followed by the token that begins the tag after it.
    lark.rule("any", f"{leaf} | pair+ {token} | one+ {token}")

    def written(tool: Tool) -> str:
        begin = lark.mark(f'{INVOKE} name="{tool.name}">')
        return f"{begin} {_arguments(lark, tool, tools.index(tool))} {lark.mark(INVOKE_END)}"

    calls = several(lark.rule("inner", lark.each(tools, written)), "\n", parallel=parallel)
    return f'"\\n" {calls} "\\n" {lark.mark(CALLS_END)}'


def _arguments(lark: Lark, tool: Tool, index: int) -> str:
    properties = properties_of(tool)
    if not properties and takes_any(tool):
        return "pair*"
    if tool.input_pattern is not None:
        text = lark.matching(tool.input_pattern, f"{NS}</input>", f"input_{index}")
        return f"{lark.mark(f'{NS}<input>')} {text}"
    required, root = required_of(tool), tool.parameters or {}
    parts = []
    for key, schema in properties.items():
        begin, end = lark.mark(f"{NS}<{key}>"), f"{NS}</{key}>"
        types = kinds(schema, root)
        _check(tool, schema, types)
        if texts := [e for e in listed_values(schema) if isinstance(e, str | bool | int)]:
            each = [lark_text(e if isinstance(e, str) else json.dumps(e)) for e in texts]
            part = f"{begin} ({' | '.join(each)}) {lark.mark(end)}"
        elif "string" in types:
            part = f"{begin} leaf {lark_text(end.removeprefix(NS))}"
        else:
            others = {"array": "one*", "object": "pair*", **_RULES}
            value = " | ".join(others[kind] for kind in sorted(types) if kind in others)
            part = f"{begin} ({value}) {lark.mark(end)}"
            if not value:
                part = f"{begin} any {lark_text(end.removeprefix(NS))}"
        parts.append(part if key in required else f"({part})?")
    return " ".join(parts)


def _check(tool: Tool, schema: Schema, types: frozenset[str]) -> None:
    keywords = schema.keys() - {"type", "description", "title", "default", "$defs", "definitions"}
    is_listed = bool(listed_values(schema)) and keywords <= {"enum", "const"}
    if tool.strict and not is_listed and (keywords or not types <= {"string", *_RULES}):
        raise not_strict(tool, "the model's format cannot enforce all keywords of the schema")


MINIMAX_M3_GRAMMAR = Marked(CALLS, _block, repeats=False)
MINIMAX_M3_FAMILY = Family(
    (NS, "<tool_call>", "</tool_call>"), (NS,), MINIMAX_M3, lambda *_: MINIMAX_M3_GRAMMAR
)

"""Reading calls whose arguments stand between tags, one by one, as plain text.

What kind of value a text stands for the tool's schema says. Sources: the published chat templates
of Qwen3-Coder, Seed-OSS, MiniMax M2 and GLM 4.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .calls import CallState, marked_calls
from .output_parser import CallArguments, Cut, Malformed, Reading, Source, collected

MAX_SCHEMAS = 64  # looked at for the types of one value: its alternatives, and references
MAX_REF_CHARS = 1024
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_TYPES = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null",
    list: "array", dict: "object",
}  # fmt: skip
Schemas = Mapping[str, Mapping[str, Any]]  # of the tools' parameters, by tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The marks around calls, functions and arguments.

    ``function`` stands before a name and ``named`` behind it; an argument's name stands between
    ``parameter`` and ``value``, its value before ``value_end``. ``name``: what a function may be
    called. ``has_breaks``: a line break on either side of a value is not in it. ``repeats``: one
    pair of marks may hold several functions.
    """

    begin: str
    end: str
    function: str = ""
    named: str = ""
    function_end: str = ""  # "": the call ends with ``end``
    parameter: str
    value: tuple[str, ...]  # with white space between them
    value_end: str
    name: re.Pattern[str]
    has_breaks: bool = False
    repeats: bool = False


_QWEN_NAME = re.compile(r"[^<>\n]+")
_QUOTED_NAME = re.compile(r"[^\"<>\n]+")
_WORD = re.compile(r"[\w.:-]+")
_INSIDE_QWEN: dict[str, Any] = {
    "function": "<function=", "named": ">", "function_end": "</function>",
    "parameter": "<parameter=", "value": (">",), "value_end": "</parameter>",
    "name": _QWEN_NAME, "has_breaks": True,
}  # fmt: skip
QWEN_CODER = Tags(begin="<tool_call>", end="</tool_call>", **_INSIDE_QWEN)
SEED = Tags(begin="<seed:tool_call>", end="</seed:tool_call>", **_INSIDE_QWEN)
MINIMAX = Tags(
    begin="<minimax:tool_call>", end="</minimax:tool_call>",
    function='<invoke name="', named='">', function_end="</invoke>",
    parameter='<parameter name="', value=('">',), value_end="</parameter>",
    name=_QUOTED_NAME, repeats=True,
)  # fmt: skip
GLM = Tags(
    begin="<tool_call>", end="</tool_call>", parameter="<arg_key>",
    value=("</arg_key>", "<arg_value>"), value_end="</arg_value>", name=_WORD,
)  # fmt: skip


def read_tagged(source: Source, tags: Tags, schemas: Schemas) -> Reading[None]:
    """Words and calls; an argument that the schema does not know is a string."""

    def read(call: CallState) -> Reading[None]:
        return _calls(call, tags, schemas)

    yield from marked_calls(source, tags.begin, read, tags.end)


def _calls(call: CallState, tags: Tags, schemas: Schemas) -> Reading[None]:
    source = call.source
    yield from source.expect(tags.begin)
    while True:
        yield from source.white()
        yield from _call(call, tags, schemas)
        if not tags.function_end:
            return
        yield from source.white()
        if not tags.repeats or not (yield from source.ahead(tags.function)):
            break
    yield from source.closing(tags.end)


def _call(call: CallState, tags: Tags, schemas: Schemas) -> Reading[None]:
    source = call.source
    yield from source.expect(tags.function)
    name = call.check((yield from source.run(tags.name)))
    yield from source.expect(tags.named)
    try:
        yield from _parameters(call, name, tags, schemas.get(name, {}))
    except Cut:
        if not call.is_open:
            yield from call.begin(name)
        raise
    yield from call.end()


def _parameters(call: CallState, name: str, tags: Tags, schema: Mapping[str, Any]) -> Reading[None]:
    source = call.source
    properties = schema.get("properties", {})
    yield from source.white()
    while (yield from source.literal(tags.parameter)):
        key = yield from _key(source, tags)
        before = ", " if call.is_open else "{"
        if not call.is_open:
            yield from call.begin(name)
        yield CallArguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _value(source, tags, kinds(properties.get(key), schema))
        yield from source.white()
    yield from source.expect(tags.function_end or tags.end)
    if not call.is_open:
        yield from call.begin(name)
        yield CallArguments("{")
    yield CallArguments("}")


def _key(source: Source, tags: Tags) -> Reading[str]:
    key = yield from source.run(_QUOTED_NAME)
    if not key:
        raise Malformed if (yield from source.peek()) else Cut
    for index, mark in enumerate(tags.value):
        if index:
            yield from source.white()
        yield from source.expect(mark)
    return key


def kinds(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema names, or those of its values; none if it tells nothing.

    ``root``: what its references point into. They may go in circles, and each may stand for many:
    no schema is looked at twice, and no more than `MAX_SCHEMAS` are.
    """
    names: set[str] = set()
    seen: set[int] = set()
    left = [schema]
    while left and len(seen) < MAX_SCHEMAS:
        each = left.pop(0)
        if isinstance(each, Mapping) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(path := each.get("$ref"), str):
                left.append(_target(root, path))
            else:
                names |= _own_kinds(each)
                left += _alternatives(each)
    return frozenset(names)


def _own_kinds(schema: Mapping[str, Any]) -> set[str]:
    found = schema.get("type")
    listed = found if isinstance(found, list) else [found]
    names = {name for name in listed if isinstance(name, str)}
    if found is None:
        names = {_TYPES[type(each)] for each in listed_values(schema)}
    return names


def _alternatives(schema: Mapping[str, Any]) -> list[object]:
    lists = [schema.get("anyOf"), schema.get("oneOf")]
    return [one for each in lists if isinstance(each, list) for one in each[:MAX_SCHEMAS]]


def _target(root: Mapping[str, Any], path: str) -> object:
    found: object = root if len(path) <= MAX_REF_CHARS else None
    for key in path[:MAX_REF_CHARS].removeprefix("#").strip("/").split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """The only values that a schema allows, if it lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def _value(source: Source, tags: Tags, types: frozenset[str]) -> Reading[None]:
    if tags.has_breaks:
        yield from source.literal("\n")
    if types <= {"string"}:
        yield CallArguments('"')
        yield from _text(source, tags)
        yield from _end(source, tags)
        yield CallArguments('"')
        return
    text = yield from collected(source.until(tags.value_end, CallArguments))
    yield from _end(source, tags)
    plain = text.removesuffix("\n") if tags.has_breaks else text
    yield CallArguments(_as_json(text.strip(), plain, types))


def _end(source: Source, tags: Tags) -> Reading[None]:
    if not (yield from source.literal(tags.value_end)):
        raise Cut


def _text(source: Source, tags: Tags) -> Reading[None]:
    """The inside of a JSON string as it comes; the line break before the tag may not be in it."""
    held = ""
    for event in source.until(tags.value_end, CallArguments):
        if event is None:
            yield None
            continue
        assert isinstance(event, CallArguments)
        text = held + event.text
        held = "\n" if tags.has_breaks and text.endswith("\n") else ""
        if text := text[: len(text) - len(held)]:
            yield CallArguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _as_json(word: str, text: str, types: frozenset[str]) -> str:
    word = _PYTHON.get(word, word)
    if "string" in types and word != "null":
        return json.dumps(text, ensure_ascii=False)
    return word if is_json(word) else json.dumps(text, ensure_ascii=False)


def is_json(word: str) -> bool:
    """Whether a text is a JSON value; NaN and Infinity are none."""
    try:
        json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)

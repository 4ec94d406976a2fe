"""Reading calls as Qwen3-Coder writes them, each argument between tags, as plain text.

``<tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>``, with a line
break around each value. What kind of value a text stands for the tool's schema says.
Source: the model's published chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .calls import CallState, marked_calls
from .events import CallArguments
from .input_buffer import Cut, Reading, Source, collected
from .tool_call_formats import HERMES_BEGIN, HERMES_END

MAX_SCHEMAS = 64  # looked at for the types of one value: its alternatives, and references
MAX_REF_CHARS = 1024
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]+")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_TYPES = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null",
    list: "array", dict: "object",
}  # fmt: skip
Schemas = Mapping[str, Mapping[str, Any]]  # of the tools' parameters, by tool


def read_qwen_coder(source: Source, schemas: Schemas) -> Reading[None]:
    """Words and calls; an argument that the schema does not know is a string."""

    def read(call: CallState) -> Reading[None]:
        return _call(call, schemas)

    yield from marked_calls(source, HERMES_BEGIN, read, HERMES_END)


def _call(call: CallState, schemas: Schemas) -> Reading[None]:
    source = call.source
    yield from source.expect(HERMES_BEGIN)
    yield from source.white()
    yield from source.expect(FUNCTION)
    name = call.check((yield from source.run(_NAME)))
    yield from source.expect(">")
    try:
        yield from _parameters(call, name, schemas.get(name, {}))
    except Cut:
        if not call.is_open:
            yield from call.begin(name)
        raise
    yield from call.end()
    yield from source.white()
    yield from source.closing(HERMES_END)


def _parameters(call: CallState, name: str, schema: Mapping[str, Any]) -> Reading[None]:
    source = call.source
    properties = schema.get("properties", {})
    yield from source.white()
    while (yield from source.literal(PARAMETER)):
        key = yield from source.run(_NAME)
        yield from source.expect(">")
        before = ", " if call.is_open else "{"
        if not call.is_open:
            yield from call.begin(name)
        yield CallArguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _value(source, kinds(properties.get(key), schema))
        yield from source.white()
    yield from source.expect(FUNCTION_END)
    if not call.is_open:
        yield from call.begin(name)
        yield CallArguments("{")
    yield CallArguments("}")


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


def _value(source: Source, types: frozenset[str]) -> Reading[None]:
    yield from source.literal("\n")
    if types <= {"string"}:
        yield CallArguments('"')
        yield from _text(source)
        yield from _end(source)
        yield CallArguments('"')
        return
    text = yield from collected(source.until(PARAMETER_END, CallArguments))
    yield from _end(source)
    yield CallArguments(_as_json(text.strip(), text.removesuffix("\n"), types))


def _end(source: Source) -> Reading[None]:
    if not (yield from source.literal(PARAMETER_END)):
        raise Cut


def _text(source: Source) -> Reading[None]:
    """The inside of a JSON string as it comes; the line break before the tag is not in it."""
    held = ""
    for event in source.until(PARAMETER_END, CallArguments):
        if event is None:
            yield None
            continue
        assert isinstance(event, CallArguments)
        text = held + event.text
        held = "\n" if text.endswith("\n") else ""
        if text := text[: len(text) - len(held)]:
            yield CallArguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _as_json(word: str, text: str, types: frozenset[str]) -> str:
    word = _PYTHON.get(word, word)
    if "string" in types and word != "null":
        return json.dumps(text, ensure_ascii=False)
    try:
        json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return word


def _refuse(constant: str) -> None:
    raise ValueError(constant)

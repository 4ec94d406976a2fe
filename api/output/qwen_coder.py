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
from .formats import HERMES_BEGIN, HERMES_END
from .source import Cut, Reading, Source, collected

MAX_REFS = 8  # one behind the other
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


def kinds(schema: object, root: Mapping[str, Any], num_refs: int = 0) -> frozenset[str]:
    """The JSON types that a schema names, or those of its values; none if it tells nothing.

    ``root``: what its references point into.
    """
    if not isinstance(schema, Mapping):
        return frozenset()
    if isinstance(path := schema.get("$ref"), str) and num_refs < MAX_REFS:
        return kinds(_target(root, path), root, num_refs + 1)
    found = schema.get("type")
    listed = found if isinstance(found, list) else [found]
    names = {name for name in listed if isinstance(name, str)}
    if found is None:
        names = {_TYPES[type(each)] for each in listed_values(schema)}
    for each in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(each, list):
            names.update(*(kinds(one, root, num_refs) for one in each))
    return frozenset(names)


def _target(root: Mapping[str, Any], path: str) -> object:
    found: object = root
    for key in path.removeprefix("#").strip("/").split("/"):
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

"""Tools of one request: their names, the types of their arguments, and a check of arguments.

Text without a call's delimiter is a call only if its arguments fit. The check is partial: it reads
types, names and listed values, and ignores other keywords.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from ...structured.lark_regex import matches
from .json_text import INVALID

if TYPE_CHECKING:
    from ...types.results import Tool

MAX_SCHEMAS = 64  # maximum number of schemas read to find the types of one value
MAX_REF_CHARS = 1024
_TYPES = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null",
    list: "array", dict: "object",
}  # fmt: skip
KINDS = frozenset(_TYPES.values())
READ_KEYWORDS = {
    "type", "enum", "const", "anyOf", "oneOf", "$ref", "items", "required", "properties",
    "additionalProperties",
}  # fmt: skip
NOTES = {"title", "description", "default", "examples", "$schema", "$defs", "definitions"}
Schema = Mapping[str, Any]


class Offers:
    """The tools that a request's answer may call."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._schemas: dict[str, Schema] = {tool.name: tool.parameters or {} for tool in tools}
        self._strict = {tool.name for tool in tools if tool.strict}
        self._patterns = {tool.name: tool.input_pattern for tool in tools}

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    @property
    def names(self) -> Sequence[str]:
        """Names of the tools."""
        return list(self._schemas)

    def schema(self, name: str) -> Schema:
        """Return the schema of a tool's parameters; for a tool that is not offered, {}."""
        return self._schemas.get(name, {})

    def argument_names(self, name: str) -> list[str]:
        """Return the names of the arguments that a tool declares, in order."""
        return list(_properties(self.schema(name)))

    def fit(self, name: str, arguments: str) -> bool:
        """Whether a tool is offered and accepts the arguments (JSON).

        A strict tool requires valid arguments, so none fit if its schema has keywords that are not
        checked. For other tools, null stands for an optional argument that is left out.
        """
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError):
            return False
        if name not in self or not isinstance(given, dict) or INVALID in given:
            return False
        schema = self.schema(name)
        if name in self._strict:
            pattern = self._patterns[name]
            is_valid = _is_readable(schema) and _fits(given, schema, schema)
            return is_valid and (pattern is None or matches(pattern, given["input"]))
        required = required_names(schema)
        told = {key: each for key, each in given.items() if each is not None or key in required}
        return not _is_schema(given, _properties(schema)) and _fits(told, schema, schema)


def _fits(value: object, schema: object, root: Schema, refs: int = 0) -> bool:
    """Whether a schema, as far as it is read, allows a value."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if isinstance(path := schema.get("$ref"), str):
        return refs >= MAX_SCHEMAS or _fits(value, _target(root, path), root, refs + 1)
    listed, names = listed_values(schema), _own_kinds(schema) & KINDS
    if (listed and value not in listed) or (names and not _is_kind(value, names)):
        return False
    if (some := _alternatives(schema)) and not any(_fits(value, e, root, refs + 1) for e in some):
        return False
    if isinstance(value, dict):
        return _fits_object(value, schema, root, refs)
    items = schema.get("items")
    return not isinstance(value, list) or all(_fits(each, items, root, refs) for each in value)


def _fits_object(value: Schema, schema: Schema, root: Schema, refs: int) -> bool:
    if not all(key in value for key in required_names(schema)):
        return False
    properties, others = _properties(schema), schema.get("additionalProperties")
    return all(_fits(each, properties.get(key, others), root, refs) for key, each in value.items())


def _is_kind(value: object, names: Set[str]) -> bool:
    name = "integer" if isinstance(value, float) and value.is_integer() else _TYPES[type(value)]
    return name in names or (name == "integer" and "number" in names)


def _is_readable(schema: Schema) -> bool:
    """Whether a schema has only `READ_KEYWORDS` and `NOTES`."""
    left: list[object] = [schema]
    while left:
        each = left.pop()
        if not isinstance(each, Mapping):
            continue
        if not each.keys() <= READ_KEYWORDS | NOTES:
            return False
        for key in ("properties", "$defs", "definitions"):
            named = each.get(key)
            left += named.values() if isinstance(named, Mapping) else ()
        left += [each.get("items"), each.get("additionalProperties"), *_alternatives(each)]
    return True


def _is_schema(given: Schema, properties: Schema) -> bool:
    """Whether the arguments are a copy of a tool's schema instead of values."""
    return (
        given.get("type") == "object"
        and isinstance(given.get("properties"), dict)
        and not {"type", "properties"} & properties.keys()
    )


def _properties(schema: Schema) -> Schema:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def required_names(schema: Schema | None) -> Sequence[str]:
    """Return the names of a schema's required arguments."""
    required = (schema or {}).get("required")
    listed = required if isinstance(required, list | tuple) else ()
    return [key for key in listed if isinstance(key, str)]


def kinds(schema: object, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema names, or the types of its listed values.

    The result may be empty. ``root``: the schema that references point into. References may be
    circular or lead to many schemas: each schema is read once, and at most `MAX_SCHEMAS` are read.
    """
    names: set[str] = set()
    for each in _variants(schema, root):
        names |= _own_kinds(each)
    return frozenset(names)


def child(schema: object, root: Schema, name: str | None) -> Schema:
    """Return the schema of a member of an object, or of the items of a list (``name`` is None).

    Returns {} if the schema does not describe it. ``root``: the schema that references point into.
    """
    for each in _variants(schema, root):
        found = each.get("items") if name is None else _properties(each).get(name)
        found = each.get("additionalProperties") if name and found is None else found
        if isinstance(found, Mapping):
            return found
    return {}


def _variants(schema: object, root: Schema) -> Iterator[Schema]:
    """Yield a schema and its alternatives, with references followed.

    Each schema is yielded once, and at most `MAX_SCHEMAS` are read.
    """
    seen: set[int] = set()
    left = [schema]
    while left and len(seen) < MAX_SCHEMAS:
        each = left.pop(0)
        if isinstance(each, Mapping) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(path := each.get("$ref"), str):
                left.append(_target(root, path))
            else:
                yield each
                left += _alternatives(each)


def _own_kinds(schema: Schema) -> set[str]:
    found = schema.get("type")
    listed = found if isinstance(found, list) else [found]
    names = {name for name in listed if isinstance(name, str)}
    if found is None:
        names = {_TYPES[type(each)] for each in listed_values(schema)}
    return names


def _alternatives(schema: Schema) -> list[object]:
    lists = [schema.get("anyOf"), schema.get("oneOf")]
    return [one for each in lists if isinstance(each, list) for one in each[:MAX_SCHEMAS]]


def _target(root: Schema, path: str) -> object:
    found: object = root if len(path) <= MAX_REF_CHARS else None
    for key in path[:MAX_REF_CHARS].removeprefix("#").strip("/").split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def listed_values(schema: Schema) -> list[Any]:
    """Return the values that a schema lists as the only allowed ones, or []."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []

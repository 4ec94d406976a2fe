"""Whether two schemas can accept the same value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from .references import References
from .regexes import NotRegularError, translated
from .walk import Compiles

Schema = Mapping[str, object]
FORMATS = frozenset(  # formats that the grammar library supports
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
MAX_TRIALS = 50  # maximum number of pairs of patterns to compare per document
ALL_TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
MAX_DEPTH = 6


class Disjoint:
    """Finds out which schemas of one document exclude each other.

    Schemas are assumed to have a common value unless the opposite is shown.
    """

    def __init__(self, references: References, compiles: Compiles) -> None:
        self._references = references
        self._compiles = compiles
        self._num_trials = 0

    def are(self, first: object, second: object, depth: int = 0) -> bool:
        """Whether no value can match both schemas."""
        if first is False or second is False:
            return True
        if not isinstance(first, Mapping) or not isinstance(second, Mapping) or depth > MAX_DEPTH:
            return False
        for ours in self._parts(first):
            for theirs in self._parts(second):
                if self._are_alone(ours, theirs, depth):
                    return True
        return any(
            bool(branches) and all(self.are(each, other, depth + 1) for each in branches)
            for one, other in ((first, second), (second, first))
            for branches in self._branches(one)
        )

    def _parts(self, schema: Schema, depth: int = 0) -> Iterator[Schema]:
        """Yield the schemas that a value must match: the schema, its allOf and its $ref."""
        yield schema
        if depth > MAX_DEPTH:
            return
        inner = schema.get("allOf")
        parts = [*inner] if isinstance(inner, list) else []
        if "$ref" in schema:
            parts.append(self._references.target(schema["$ref"]))
        for each in parts:
            if isinstance(each, Mapping):
                yield from self._parts(each, depth + 1)

    def _branches(self, schema: Schema) -> Iterator[list[object]]:
        for part in self._parts(schema):
            for key in ("anyOf", "oneOf"):
                if isinstance(found := part.get(key), list):
                    yield found

    def _are_alone(self, first: Schema, second: Schema, depth: int) -> bool:
        """Whether two schemas exclude each other by their own keywords, without nested schemas."""
        if not (_types(first) & _types(second)):
            return True
        ours, theirs = _values(first), _values(second)
        if ours is not None and theirs is not None and not (ours & theirs):
            return True
        for one, values in ((first, theirs), (second, ours)):
            if values is not None and not any(_may_be(json.loads(value), one) for value in values):
                return True
        if _ranges_apart(first, second) or self._objects_apart(first, second, depth):
            return True
        return _types(first) & _types(second) == {"string"} and self._texts_apart(first, second)

    def _texts_apart(self, first: Schema, second: Schema) -> bool:
        """Whether no text matches both schemas: each compiles alone, but not both together."""
        parts = [_of_text(first), _of_text(second)]
        self._num_trials += 1
        if not all(parts) or self._num_trials > MAX_TRIALS:
            return False
        return self._compiles({"type": "string", "allOf": parts}) is not None and all(
            self._compiles({"type": "string", **each}) is None for each in parts if each
        )

    def _objects_apart(self, first: Schema, second: Schema, depth: int) -> bool:
        if _types(first) & _types(second) != {"object"}:
            return False
        for name in {*_required(first), *_required(second)}:
            ours, theirs = _property(first, name), _property(second, name)
            if self.are(ours, theirs, depth + 1):
                return True
        return False


def _of_text(schema: Schema) -> dict[str, object]:
    """Return a schema's keywords for text, in the form that the grammar library supports."""
    found = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
    if schema.get("format") in FORMATS:
        found["format"] = schema["format"]
    try:
        if isinstance(pattern := schema.get("pattern"), str):
            found["pattern"] = translated(pattern)
    except NotRegularError:
        return {}
    return found


def _types(schema: Schema) -> frozenset[str]:
    found = schema.get("type")
    if found is None:
        values = _values(schema)
        return ALL_TYPES if values is None else frozenset(_type_of(json.loads(v)) for v in values)
    names = found if isinstance(found, list) else [found]
    return frozenset("number" if name == "integer" else str(name) for name in names)


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds.get(type(value), "number")


def _values(schema: Schema) -> set[str] | None:
    """Return the values of ``enum`` or ``const`` as JSON; None if the schema has neither."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {json.dumps(_normal(value), sort_keys=True) for value in values}


def _normal(value: object) -> object:
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value  # type: ignore[call-overload]


def _may_be(value: object, schema: Schema) -> bool:
    """Whether a value may match a schema, judged by the type, the pattern and the bounds."""
    if _type_of(value) not in _types(schema):
        return False
    if schema.get("type") == "integer" and isinstance(value, float) and not value.is_integer():
        return False
    pattern = schema.get("pattern")
    if isinstance(value, str) and isinstance(pattern, str):
        try:
            return re.search(pattern, value) is not None
        except re.error:
            return True
    return not (isinstance(value, int | float) and _is_out(value, schema))


def _is_out(value: float, schema: Schema) -> bool:
    low, high = _range(schema)
    return value < low or value > high


def _range(schema: Schema) -> tuple[float, float]:
    low, high = schema.get("minimum"), schema.get("maximum")
    return (
        low if isinstance(low, int | float) else float("-inf"),
        high if isinstance(high, int | float) else float("inf"),
    )


def _ranges_apart(first: Schema, second: Schema) -> bool:
    common = _types(first) & _types(second)
    if common == {"number"}:
        (low, high), (other_low, other_high) = _range(first), _range(second)
        return high < other_low or other_high < low
    for name, least, most in (
        ("string", "minLength", "maxLength"), ("array", "minItems", "maxItems"),
        ("object", "minProperties", "maxProperties"),
    ):  # fmt: skip
        if common == {name}:
            return any(
                isinstance(limit := one.get(most), int)
                and isinstance(number := other.get(least), int)
                and limit < number
                for one, other in ((first, second), (second, first))
            )
    return False


def _required(schema: Schema) -> list[str]:
    found = schema.get("required")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _property(schema: Schema, name: str) -> object:
    """Return the schema of a property; False if the property is not allowed."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    is_closed = schema.get("additionalProperties", True) is False
    return not (is_closed and not schema.get("patternProperties"))

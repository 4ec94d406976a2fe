"""Schemas that accept values that another schema rejects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .references import References
from .regexes import none_of

Schema = Mapping[str, object]
TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_DEPTH = 12
MAX_BRANCHES = 64


class Negation:
    """Negates schemas of one document."""

    def __init__(self, references: References) -> None:
        self._references = references

    def of(self, schema: object, depth: int = 0) -> list[object] | None:
        """Return schemas that match only values that ``schema`` rejects; None if unknown.

        Some values that ``schema`` rejects may match none of them.
        """
        if isinstance(schema, bool):
            return [] if schema else [True]
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return None
        found: list[object] = []
        is_known = True
        for key, value in schema.items():
            negate = _BY_KEY.get(key)
            branches = negate(self, value, schema, depth + 1) if negate else None
            if branches is not None:
                found += branches
            elif key in _CONSTRAINTS:
                is_known = False
        if len(found) > MAX_BRANCHES or (not found and not is_known):
            return None
        return found

    def _type(self, value: object, _: Schema, __: int) -> list[object] | None:
        names = value if isinstance(value, list) else [value]
        others = [name for name in TYPES if name not in names]
        if "integer" in names and "number" in others:
            others.remove("number")
        return [{"type": others}] if others else []

    def _const(self, value: object, schema: Schema, depth: int) -> list[object] | None:
        return self._enum([value], schema, depth)

    def _enum(self, values: object, schema: Schema, __: int) -> list[object] | None:
        if not isinstance(values, list):
            return None
        given = schema.get("type", [*TYPES])
        names = {"number" if name == "integer" else name
                 for name in (given if isinstance(given, list) else [given])}  # fmt: skip
        if any(isinstance(each, list | dict) for each in values):
            names -= {"array", "object"}
        found: list[object] = [{"type": name} for name in ("array", "object") if name in names]
        if None not in values and "null" in names:
            found.append({"type": "null"})
        if "boolean" in names:
            flags = [each for each in values if isinstance(each, bool)]
            found += [{"const": flag} for flag in (True, False) if flag not in flags]
        if "string" in names:
            texts = [each for each in values if isinstance(each, str)]
            pattern = {"pattern": none_of(texts)} if texts else {}
            found.append({"type": "string", **pattern})
        return [*found, *_other_numbers(values)] if "number" in names else found

    def _required(self, value: object, _: Schema, __: int) -> list[object] | None:
        names = value if isinstance(value, list) else []
        return [{"type": "object", "properties": {name: False}} for name in names]

    def _properties(self, value: object, _: Schema, depth: int) -> list[object] | None:
        found: list[object] = []
        for name, each in value.items() if isinstance(value, Mapping) else ():
            branches = self.of(each, depth)
            if branches is None:
                continue
            inner = branches[0] if len(branches) == 1 else {"anyOf": branches}
            if branches:
                found.append({"type": "object", "required": [name], "properties": {name: inner}})
        return found or None

    def _not(self, value: object, _: Schema, __: int) -> list[object] | None:
        return [value]

    def _all(self, value: object, _: Schema, depth: int) -> list[object] | None:
        found: list[object] = []
        for each in value if isinstance(value, list) else ():
            found += self.of(each, depth) or ()
        return found or None

    def _any(self, value: object, _: Schema, depth: int) -> list[object] | None:
        negated: list[object] = []
        for each in value if isinstance(value, list) else ():
            branches = self.of(each, depth)
            if branches is None:
                return None
            negated.append({"anyOf": branches} if len(branches) != 1 else branches[0])
        return [{"allOf": negated}] if negated else None

    def _ref(self, value: object, _: Schema, depth: int) -> list[object] | None:
        return self.of(self._references.target(value), depth)

    def _low(self, value: object, _: Schema, __: int) -> list[object] | None:
        return [{"type": "number", "exclusiveMaximum": value}]

    def _high(self, value: object, _: Schema, __: int) -> list[object] | None:
        return [{"type": "number", "exclusiveMinimum": value}]


def _other_numbers(values: Sequence[object]) -> list[object]:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if not numbers:
        return [{"type": "number"}]
    return [
        {"type": "number", "exclusiveMinimum": max(numbers)},
        {"type": "number", "exclusiveMaximum": min(numbers)},
    ]


def _least(name: str, key: str) -> Rule:
    def negate(_: Negation, value: object, __: Schema, ___: int) -> list[object] | None:
        return [{"type": name, key: value - 1}] if isinstance(value, int) and value > 0 else []

    return negate


def _most(name: str, key: str) -> Rule:
    def negate(_: Negation, value: object, __: Schema, ___: int) -> list[object] | None:
        return [{"type": name, key: value + 1}] if isinstance(value, int) else None

    return negate


Rule = Callable[[Negation, object, Schema, int], "list[object] | None"]
_BY_KEY: dict[str, Rule] = {
    "type": Negation._type,
    "const": Negation._const,
    "enum": Negation._enum,
    "required": Negation._required,
    "properties": Negation._properties,
    "not": Negation._not,
    "allOf": Negation._all,
    "anyOf": Negation._any,
    "$ref": Negation._ref,
    "minimum": Negation._low,
    "maximum": Negation._high,
    "minLength": _least("string", "maxLength"),
    "maxLength": _most("string", "minLength"),
    "minItems": _least("array", "maxItems"),
    "maxItems": _most("array", "minItems"),
    "minProperties": _least("object", "maxProperties"),
    "maxProperties": _most("object", "minProperties"),
}
_CONSTRAINTS: Sequence[str] = (
    *_BY_KEY, "pattern", "format", "multipleOf", "exclusiveMinimum", "exclusiveMaximum", "oneOf",
    "items", "prefixItems", "contains", "uniqueItems", "additionalProperties", "patternProperties",
    "propertyNames", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas",
)  # fmt: skip

"""Bounds on the number of tokens by which one token may lengthen the completion of an answer.

A token may begin a value that takes hundreds of tokens: after a comma, for example, an object with
many required properties. Tokens are judged early enough that any such value still fits.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping

from ..schemas.walk import json_blocks, resolve

LEAST_GROWTH = 8
FRAME = 32  # number of tokens around a call, in addition to the texts of its rules
MOST = 2**16
OF_NUMBER = 12
ENOUGH = 2.0  # minimum number of characters per token of a key or listed value
_RULE_NUMBER = re.compile(r"^[a-z_]*?_?(\d+)?(?:_\w+)?(?:\[\w+\])?:")
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"')


def growth_of(field: str, source: str, least_text: Callable[[str], int]) -> int:
    """Return by how many tokens one token may lengthen the shortest completion.

    The bound is an estimate that holds in most cases.

    ``least_text``: returns the length of the shortest JSON of a schema without objects and lists.
    """
    try:
        if field == "json_schema":
            return _Sizes(json.loads(source), least_text).most()
        if field == "grammar":
            return _of_grammar(source, least_text)
    except RecursionError:
        return MOST
    return LEAST_GROWTH


def _of_grammar(source: str, least_text: Callable[[str], int]) -> int:
    """Return a bound for a grammar, from its largest schema and the largest rules of one tool."""
    totals: dict[str, float] = defaultdict(float)
    most, rest, end = LEAST_GROWTH, [], 0
    for schema, begin, after in json_blocks(source):
        sizes = _Sizes(schema, least_text)
        most = max(most, sizes.most())
        rest += [source[end:begin], "\0" * int(min(sizes.of(schema), MOST) * ENOUGH)]
        end = after
    for line in "".join([*rest, source[end:]]).splitlines():
        found = _RULE_NUMBER.match(line)
        number = found[1] or "" if found else ""
        totals[number] += sum(map(len, _LITERAL.findall(line))) + line.count("\0")
    return min(MOST, max(most, int(max(totals.values(), default=0) / ENOUGH)) + FRAME)


class _Sizes:
    """Upper bounds on the number of tokens of the shortest value of each schema in a document."""

    def __init__(self, root: object, least_text: Callable[[str], int]) -> None:
        self._root = root
        self._least_text = least_text
        self._known: dict[int, float] = {}

    def most(self) -> int:
        """Return the largest finite bound."""
        self.of(self._root)
        finite = [size for size in self._known.values() if size < MOST]
        return int(max([LEAST_GROWTH, *finite]))

    def of(self, schema: object) -> float:
        """Return the bound of one schema; infinite for a schema that contains itself."""
        if not isinstance(schema, Mapping):
            return float("inf") if schema is False else 1
        if id(schema) not in self._known:
            self._known[id(schema)] = float("inf")
            self._known[id(schema)] = self._size(schema)
        return self._known[id(schema)]

    def _size(self, schema: Mapping[str, object]) -> float:
        if "const" in schema:
            return _length(schema["const"])
        if isinstance(values := schema.get("enum"), list) and values:
            return min(map(_length, values))
        parts = [self._own(schema)]
        if "$ref" in schema:
            parts.append(self.of(resolve(self._root, schema["$ref"])))
        parts += map(self.of, _listed(schema, "allOf"))
        for key in ("anyOf", "oneOf"):
            if branches := _listed(schema, key):
                sizes = [*map(self.of, branches)]
                finite = [size for size in sizes if size < MOST]
                parts.append(max(finite, default=float("inf")))
        for key in ("$defs", "definitions", "properties", "patternProperties"):
            if isinstance(found := schema.get(key), Mapping):
                for each in found.values():
                    self.of(each)
        for key in ("additionalProperties", "items", "then", "else"):
            self.of(schema.get(key))
        return sum(parts)

    def _own(self, schema: Mapping[str, object]) -> float:
        types = schema.get("type")
        names = types if isinstance(types, list) else [types]
        sizes = []
        if "object" in names or (
            types is None and ("properties" in schema or "required" in schema)
        ):
            sizes.append(self._of_object(schema))
        if "array" in names or (types is None and ("items" in schema or "prefixItems" in schema)):
            sizes.append(self._of_array(schema))
        if "string" in names or (types is None and ("pattern" in schema or "format" in schema)):
            sizes.append(self._of_text(schema))
        if "number" in names or "integer" in names:
            sizes.append(OF_NUMBER)
        return max(sizes, default=1)

    def _of_object(self, schema: Mapping[str, object]) -> float:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = [name for name in _listed(schema, "required") if isinstance(name, str)]
        size = 2.0
        for name in required:
            size += _length(name) + 3 + self.of(properties.get(name, True))
        least = schema.get("minProperties")
        return size + (6 * max(0, least - len(required)) if isinstance(least, int) else 0)

    def _of_array(self, schema: Mapping[str, object]) -> float:
        least = schema.get("minItems")
        least = min(least, MOST) if isinstance(least, int) else 0
        items = schema.get("items")
        first = [*_listed(schema, "prefixItems"), *(items if isinstance(items, list) else [])]
        size = 2.0 + sum(self.of(each) + 1 for each in first[:least])
        others = 1 if isinstance(items, list) else self.of(items)
        return size + (others + 1) * max(0, least - len(first)) if least > len(first) else size

    def _of_text(self, schema: Mapping[str, object]) -> float:
        leaf = {key: schema[key] for key in ("pattern", "format", "minLength") if key in schema}
        return self._least_text(json.dumps({"type": "string", **leaf})) if leaf else 2


def _listed(schema: Mapping[str, object], key: str) -> list[object]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _length(value: object) -> float:
    return len(json.dumps(value, ensure_ascii=False)) / ENOUGH + 1

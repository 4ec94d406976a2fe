"""The schemas inside a JSON schema, and inside the text of a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

# returns why a document does not compile; None if it does
Compiles = Callable[[object], "str | None"]
Path = tuple[str | int, ...]
IN_MAPPINGS = (
    "properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies",
)  # fmt: skip
IN_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
ALONE = (
    "items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if",
    "then", "else", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
JSON_BLOCK = "%json "
_DECODER = json.JSONDecoder()


def subschemas(schema: Mapping[str, object]) -> Iterator[tuple[Path, object]]:
    """Yield the direct subschemas, each with its path."""
    for key in IN_MAPPINGS:
        if isinstance(found := schema.get(key), Mapping):
            for name, each in found.items():
                if isinstance(each, Mapping | bool):
                    yield (key, name), each
    for key in IN_LISTS:
        if isinstance(found := schema.get(key), list):
            yield from (((key, index), each) for index, each in enumerate(found))
    for key in ALONE:
        if isinstance(found := schema.get(key), Mapping | bool):
            yield (key,), found


def walk(schema: object) -> Iterator[Mapping[str, object]]:
    """Yield a schema and all nested schemas, each object once."""
    left, seen = [schema], set()
    while left:
        each = left.pop()
        if isinstance(each, Mapping) and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [inner for _, inner in subschemas(each)]


def schemas_of(field: str, source: str) -> list[object]:
    """Return the JSON schemas of a source: the source itself, or those inside a grammar."""
    if field == "json_schema":
        return [json.loads(source)]
    return [schema for schema, _, _ in json_blocks(source)] if field == "grammar" else []


def json_blocks(text: str) -> Iterator[tuple[object, int, int]]:
    """Yield the schemas in a grammar's text, each with the start and the end of its JSON."""
    end = 0
    while (at := text.find(JSON_BLOCK, end)) >= 0:
        begin = end = at + len(JSON_BLOCK)
        try:
            schema, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            continue
        yield schema, begin, end


def resolve(root: object, reference: object) -> object:
    """Return the target of a reference in the same document; None if it does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found

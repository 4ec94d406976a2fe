"""Random JSON schemas whose every instance is short, and small schemas as agents send them."""

from __future__ import annotations

import random
from collections.abc import Callable

Schema = dict[str, object]
WORDS = (
    "id", "name", "path", "line", "kind", "tags", "value", "unit", "due", "owner", "score", "note",
    "état", "a b", 'quo"te', "x/y", "$ref2", "10",
)  # fmt: skip
PATTERNS = ("^[a-z]{2,6}$", "^[A-Z][a-z]{1,5}( [A-Z][a-z]{1,5})?$", r"^\d{3}-\d{2}$", "^(ab|cd)+x$")
FORMATS = ("date", "uuid", "ipv4")  # "time" may have decimals without end
MAX_DEPTH = 3


def random_schema(seed: int) -> Schema:
    """The schema of this number; an object at its top more often than not."""
    rng = random.Random(seed)
    schema = _object(rng, 0) if rng.random() < 0.7 else _any(rng, 0)
    if rng.random() < 0.2:
        holder: Schema = {"anyOf": [{"$ref": "#/$defs/part"}, {"type": "null"}]}
        schema = {
            "type": "object",
            "properties": {"whole": schema, "part": holder},
            "required": ["whole", "part"],
            "additionalProperties": False,
            "$defs": {"part": _any(rng, MAX_DEPTH - 1)},
        }
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    leaves: list[Callable[[random.Random], Schema]]
    leaves = [_string, _pattern, _format, _integer, _number, _enum, _const, _boolean]
    if depth < MAX_DEPTH and rng.random() < 0.5:
        return rng.choice([_object, _array, _union])(rng, depth + 1)
    return rng.choice(leaves)(rng)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.3:
        schema["title"] = "Thing"
        schema["description"] = "What is said of it binds nobody."
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    if rng.random() < 0.2:
        items = [_any(rng, depth + 1) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
    return {
        "type": "array",
        "items": _any(rng, depth + 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random) -> Schema:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 16}


def _format(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-1000, 1000)
    if rng.random() < 0.3:
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 5}
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _number(rng: random.Random) -> Schema:
    return {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": rng.randint(1, 99)}


def _enum(rng: random.Random) -> Schema:
    values = ["red", "deep blue", 3, None, True, "naïve \u2713", 'say "hi"', [1, 2], {"a": 1}, -1.5]
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice(["a fixed text", 42, False, {"kind": "x", "n": [1, "two"]}])}


def _boolean(rng: random.Random) -> Schema:
    return {"type": "boolean"}

"""What the types of the bodies leave to later checks, for /openapi.json: bounds, kinds, choices.

The document says them so that it can be believed; the routes check them by themselves. That both
agree is what tests/fuzz is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.interface.sampling_params import MAX_ALLOWED, MAX_BIASED_TOKENS, MAX_INT, MAX_LISTED
from .responses.route import MAX_PAGE
from .sampling_params import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_N,
    MAX_PREDICTION_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
)

Schema = dict[str, Any]
Keywords = Mapping[str, Schema]
"""Keywords of JSON schema, by the JSON type of the value that they belong to."""

TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_INT}
STOP: Schema = {"minLength": 1, "maxLength": MAX_STOP_CHARS}
GRAMMAR: Keywords = {"string": {"minLength": 1, "maxLength": MAX_GRAMMAR_CHARS}}
CHOICES: Keywords = {
    "array": {"minItems": 1, "maxItems": MAX_CHOICES, "items": {"type": "string", "minLength": 1}}
}
GUESS: Keywords = {"string": {"maxLength": MAX_PREDICTION_CHARS}}


def _integer(low: int, high: int) -> Keywords:
    return {"integer": {"minimum": low, "maximum": high}}


def _number(low: float, high: float) -> Keywords:
    return {"number": {"minimum": low, "maximum": high}}


def _texts(most: int, text: Schema) -> Keywords:
    return {"array": {"maxItems": most, "items": {"type": "string", **text}}}


SAMPLING: Mapping[str, Keywords] = {
    "n": _integer(1, MAX_N),
    "temperature": _number(0, 100),
    "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
    "top_k": _integer(-1, MAX_INT),
    "min_p": _number(0, 1),
    "min_tokens": _integer(0, MAX_INT),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 100),
    "seed": _integer(-(2**63), 2**64 - 1),
    "stop": {"string": STOP, **_texts(MAX_STOP_STRINGS, STOP)},
    "stop_sequences": _texts(MAX_STOP_STRINGS, STOP),
    "bad_words": _texts(MAX_LISTED, STOP),
    "stop_token_ids": {"array": {"maxItems": MAX_LISTED, "items": TOKEN_ID}},
    "allowed_token_ids": {"array": {"minItems": 1, "maxItems": MAX_ALLOWED, "items": TOKEN_ID}},
    "logit_bias": {
        "object": {
            "maxProperties": MAX_BIASED_TOKENS,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    },
    "cache_salt": {"string": {"minLength": 1, "maxLength": 1024}},
    "regex": GRAMMAR,
    "grammar": GRAMMAR,
    "choice": CHOICES,
    "prediction": GUESS,
}
"""Fields of every body that asks for tokens, and of a branch."""

TEXT_ITEM_PARTS = ["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
ITEMS = [
    "message", "reasoning", "item_reference", "function_call", "function_call_output",
    "custom_tool_call", "custom_tool_call_output",
]  # fmt: skip

COMPONENTS: Mapping[str, Mapping[str, Keywords]] = {
    "ContentPart": {"type": {"string": {"enum": ["text"]}}},
    "Item": {"type": {"string": {"enum": ITEMS}}},
    "Part": {"type": {"string": {"enum": TEXT_ITEM_PARTS}}},
    "BranchesRequest": {"messages": {"array": {"minItems": 1}}, "n": _integer(1, 1)},
    "ResponsesRequest": {"n": _integer(1, 1)},
    "TokenizeRequest": {"messages": {"array": {"minItems": 1}}},
    "MessagesRequest": {"n": _integer(1, 1)},
    "StructuredOutputs": {"regex": GRAMMAR, "grammar": GRAMMAR, "choice": CHOICES},
}
"""Fields of single components, by the name of the struct."""

NEEDED: Mapping[str, tuple[str, ...]] = {"ContentPart": ("text",)}
"""Fields that their types make optional, and the routes do not."""

ONE_OF: Mapping[str, tuple[str, str]] = {
    "TokenizeRequest": ("prompt", "messages"),
    "BranchesRequest": ("prompt", "messages"),
}
"""Bodies that take one of two fields and never both; null is as good as nothing."""

ALSO_REFUSED: Mapping[str, tuple[str, ...]] = {
    "CountRequest": ("mcp_servers",),
    "MessagesRequest": ("mcp_servers",),
    "ResponsesRequest": ("background", "conversation", "prompt"),
}
"""Fields of a body that are known only to be refused, beside those of all."""

TEXT: Schema = {"type": "string"}
QUERY: Mapping[str, Schema] = {
    "after": TEXT,
    "cache_salt": TEXT,
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "order": {"enum": ["asc", "desc"]},
    "previous_id": TEXT,
    "response_id": {"type": "string", "minLength": 1},
}
"""Parameters of a query, by name."""

STATUSES: Mapping[int, str] = {  # those of a connection, before any route, are not here
    400: "A header, a parameter or a field of the body is wrong; the error names it.",
    401: "The API key is missing or wrong.",
    403: "An admin key is needed.",
    404: "There is no such model, response or prompt.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "The queue is full.",
    431: "The header is too large.",
    500: "The server failed.",
    503: "The server starts, ends or is out of order, or the request's deadline passed.",
}
UNLOCKED = (400, 431, 500)
ALWAYS = (*UNLOCKED, 401)
READS = (404, 408, 413, 503)  # a body that may name a model
GENERATES = (*READS, 429)
RETRIED = frozenset({429, 503})  # tell when to come back


def narrow(schema: Schema, fields: Mapping[str, Keywords]) -> None:
    """Add these keywords to the properties of an object's schema, in place."""
    for name, keywords in fields.items():
        if name in schema["properties"]:
            kind = schema["properties"][name]
            for each in kind.get("anyOf", [kind]):
                each.update(keywords.get(each.get("type", ""), {}))


def demand(schema: Schema, names: tuple[str, ...]) -> None:
    """Make these properties needed and not null, in place."""
    schema["required"] = [*schema["required"], *names]
    for name in names:
        kinds = [each for each in schema["properties"][name]["anyOf"] if each["type"] != "null"]
        schema["properties"][name] = kinds[0]


def one_of(schema: Schema, names: tuple[str, str]) -> None:
    """Say in place that one of these is there and the other is not."""
    something, nothing = {"not": {"type": "null"}}, {"type": "null"}
    schema["oneOf"] = [
        {"required": [one], "properties": {one: something, other: nothing}}
        for one, other in (names, names[::-1])
    ]

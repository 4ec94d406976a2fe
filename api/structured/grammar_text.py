"""Texts of grammars: as written by callers, as cache keys, and for llguidance.

White space in JSON is always limited, so that a model cannot loop on blanks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llguidance import LLMatcher

from ...core.errors import InvalidRequest
from ..types.sampling_params import MAX_GRAMMAR_CHARS
from .gbnf import is_gbnf, lark_of
from .schemas.preparing import OPTIONS, with_options
from .schemas.walk import JSON_BLOCK

MAX_RULES = 4_000  # maximum number of Lark rules; errors in longer chains take minutes to report
JSON_FORM: dict[str, object] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
FREE_FORM = {
    **JSON_FORM,
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n {0,20}",  # matches at most once between two elements
    "item_separator": ",",
    "key_separator": ":",
}
"""Form of objects whose keys the model chooses: on one line or several, as the model would write
them. If forced onto one line, Qwen2.5-Coder begins six of ten objects with a key like "/name",
since its likely tokens after { are a blank and a line break (measured).
"""
_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_CHOICES = ("anyOf", "oneOf", "allOf")
NO_NUMBERS = {"json_allowed_escapes": 'nrbtf\\"'}
_CONTROL = re.compile(r"\\u00[01]|\x7f|\\u007f", re.IGNORECASE)
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_LARK_RULE = re.compile(r"^[ \t]*[!?]*\w+(?:\.\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)


def json_rule(schema: Mapping[str, object] | str) -> str:
    """Return the text that stands for JSON of a schema in a Lark ``grammar``.

    Raises `InvalidRequest` unless the schema is a JSON object or a boolean.
    """
    value = json.loads(_json_text("json_schema", schema))
    if not isinstance(value, dict):
        value = {"anyOf": [value]}
    if OPTIONS not in value:
        value = with_options(value, "exact", param="json_schema")
    return json_block({**value, "x-guidance": _white_space(value)})


def json_block(schema: Mapping[str, object]) -> str:
    """Return the text of a schema for use in a Lark ``grammar``.

    Raises ValueError, TypeError and RecursionError if it cannot be encoded.
    """
    return f"{JSON_BLOCK}{json.dumps(schema, allow_nan=False)}"


def json_form(schema: str) -> dict[str, object]:
    """Return options of the grammar library for the form of JSON: white space and escapes.

    ``schema``: the schema as text. Numeric escapes are allowed only if the schema contains a
    control character, which needs them; otherwise every character has only one spelling, so that
    equal keys are written equally.
    """
    form = _white_space(json.loads(schema))
    return form if _CONTROL.search(schema) else {**form, **NO_NUMBERS}


def _white_space(schema: object) -> dict[str, object]:
    """Return options of the grammar library for the white space in JSON of a schema.

    If the schema names all keys, there is exactly one blank after each comma and colon: most of
    the text is then forced and can be drafted.
    """
    left = [schema]
    while left:
        each = left.pop()
        if each is True or (isinstance(each, Mapping) and _leaves_keys_free(each)):
            return FREE_FORM
        if isinstance(each, Mapping):
            left += [each.get("items"), *_listed(each, "prefixItems", *_CHOICES)]
            left += [value for name in _SUBSCHEMAS for value in _values(each.get(name))]
            if isinstance(more := each.get("additionalProperties"), Mapping):
                left.append(more)
    return JSON_FORM


def _leaves_keys_free(schema: Mapping[str, object]) -> bool:
    """Whether a schema allows an object and names none of its keys."""
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    if any(name in schema for name in ("enum", "const", "$ref", *_CHOICES)):
        return False
    return not schema.get("properties") and schema.get("additionalProperties") is not False


def _values(found: object) -> list[object]:
    return [*found.values()] if isinstance(found, Mapping) else []


def _listed(schema: Mapping[str, object], *names: str) -> list[object]:
    found = (schema.get(name) for name in names)
    return [each for listed in found if isinstance(listed, list) for each in listed]


def lark_rules(grammar: str) -> str:
    """Return a ``grammar`` as Lark, converted from GBNF if necessary. Raises `InvalidRequest`."""
    try:
        return _lark(grammar)
    except ValueError as error:
        raise InvalidRequest(f"grammar: {error}", param="grammar") from None


def lark_text(text: str) -> str:
    """Return a text as a string literal of a Lark ``grammar``."""
    return json.dumps(text, ensure_ascii=False)


def source_text(field: str, value: object) -> str:
    """Return the cache key of a compiled grammar, which is its whole source as text.

    Raises `InvalidRequest` for a source that is too long or invalid.
    """
    if field == "json_schema":
        text = _json_text(field, value)
    elif field == "choice":
        text = json.dumps(value)
    else:
        text = str(value)
    if len(text) > MAX_GRAMMAR_CHARS:
        message = f"{field} must have at most {MAX_GRAMMAR_CHARS} characters"
        raise InvalidRequest(message, param=field)
    return text


def check_size(field: str, value: object) -> None:
    """Raise `InvalidRequest` if the JSON of a value would be too long, without encoding it."""
    if num_chars(value) > MAX_GRAMMAR_CHARS:
        message = f"{field} must have at most {MAX_GRAMMAR_CHARS} characters"
        raise InvalidRequest(message, param=field)


def num_chars(value: object) -> int:
    """Return a lower bound of the length of a value's JSON.

    Counting stops beyond `MAX_GRAMMAR_CHARS`.
    """
    total, left = 0, [value]
    while left and total <= MAX_GRAMMAR_CHARS:
        each = left.pop()
        total += len(each) + 2 if isinstance(each, str | list | tuple | Mapping) else 1
        if isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            left += each
    return total


def _json_text(field: str, schema: object) -> str:
    if not isinstance(schema, str):  # the length of a string was checked before
        check_size(field, schema)
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(dict(value) if isinstance(value, Mapping) else value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise InvalidRequest(
            f"{field} is not valid JSON, or nested too deeply", param=field
        ) from None
    if not isinstance(value, Mapping | bool):
        raise InvalidRequest(f"{field} must be a JSON object", param=field)
    return text


def guidance_text(field: str, source: str) -> str:
    """Return the source as a grammar of llguidance. Raises ValueError for an invalid source."""
    if field == "json_schema":
        return LLMatcher.grammar_from_json_schema(source, overrides=json_form(source))  # type: ignore[arg-type]
    if field == "regex":
        return LLMatcher.grammar_from_regex(_ESCAPE.sub(_ascii_digit, source))
    if field == "choice":
        texts = " | ".join(map(lark_text, json.loads(source)))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    text = _lark(source)
    if len(_LARK_RULE.findall(text)) > MAX_RULES:
        raise ValueError(f"the grammar has more than {MAX_RULES} rules")
    return LLMatcher.grammar_from_lark(text)


def _ascii_digit(escape: re.Match[str]) -> str:
    r"""Return an escape sequence, with ``\d`` and ``\D`` replaced by ASCII character sets.

    In Rust's syntax, ``\d`` also matches hundreds of other digits.
    """
    return {"\\d": "[0-9]", "\\D": "[^0-9]"}.get(escape[0], escape[0])


def _lark(source: str) -> str:
    if not is_gbnf(source):
        return source
    try:
        return lark_of(source)
    except ValueError as error:
        raise ValueError(f"invalid GBNF: {error}") from None

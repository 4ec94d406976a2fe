"""Texts of grammars: as callers write them, as cache keys, and as llguidance expects them.

JSON is written without free white space: a model can never loop on blanks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from ...core.errors import InvalidRequest
from ..types.sampling_params import MAX_GRAMMAR_CHARS

MAX_RULES = 4_000  # of a Lark text: what goes wrong in longer chains takes minutes to be told
JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_LARK_RULE = re.compile(r"^[ \t]*[!?]*\w+(?:\.\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def json_rule(schema: Mapping[str, object] | str) -> str:
    """The text that stands for JSON of this schema inside a Lark ``grammar``.

    Raises `InvalidRequest` unless it is a JSON object.
    """
    text = _json_text("json_schema", schema)
    value = json.loads(text)
    if not isinstance(value, dict):
        value = {"anyOf": [value]}
    return f"%json {json.dumps({**value, 'x-guidance': JSON_FORM})}"


def lark_rules(grammar: str) -> str:
    """A ``grammar`` as Lark, whichever way it was written. Raises `InvalidRequest`."""
    try:
        return _lark(grammar)
    except ValueError as error:
        raise InvalidRequest(f"grammar: {error}", param="grammar") from None


def lark_text(text: str) -> str:
    """A string literal of a Lark ``grammar``."""
    return json.dumps(text, ensure_ascii=False)


def source_text(field: str, value: object) -> str:
    """The key of a compiled grammar: a text of bounded length with all of its source."""
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
    """Raise `InvalidRequest` if the value is too long as JSON, without encoding it."""
    if num_chars(value) > MAX_GRAMMAR_CHARS:
        message = f"{field} must have at most {MAX_GRAMMAR_CHARS} characters"
        raise InvalidRequest(message, param=field)


def num_chars(value: object) -> int:
    """Lower bound of the characters of its JSON; counted up to the limit."""
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
    if not isinstance(schema, str):  # a text was measured already
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
    """The source as llguidance takes it. Raises ValueError."""
    if field == "json_schema":
        return LLMatcher.grammar_from_json_schema(source, overrides=JSON_FORM)  # type: ignore[arg-type]
    if field == "regex":
        return LLMatcher.grammar_from_regex(_ESCAPE.sub(_ascii_digit, source))
    if field == "choice":
        texts = " | ".join(map(lark_text, json.loads(source)))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    text = _lark(source)
    if len(_LARK_RULE.findall(text)) > MAX_RULES:
        raise ValueError(f"has more than {MAX_RULES} rules")
    return LLMatcher.grammar_from_lark(text)


def _ascii_digit(escape: re.Match[str]) -> str:
    """Digits are those of ASCII, as callers mean them; Rust's regexes know hundreds."""
    return {"\\d": "[0-9]", "\\D": "[^0-9]"}.get(escape[0], escape[0])


def _lark(source: str) -> str:
    if not _GBNF_RULE.search(source):
        return source
    try:
        return gbnf_to_lark(source)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:
        raise ValueError(f"invalid GBNF: {error}") from None

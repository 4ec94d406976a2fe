"""ResponseTemplate: how a checkpoint describes its answers, as fields between delimiters.

Source: the documentation of transformers, "Response Parsing". The template is the entry
``response_template`` of tokenizer_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import regex

from .contents import CONTENTS, Pattern, check_args, check_transform, compiled

MAX_FIELDS = 64
ANCHOR_SECONDS = 0.05  # time limit of the search for the anchor, which blocks the event loop
_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join",
    "optional", "transform", "transform_each",
}  # fmt: skip
_TEXTS = {"text", "int", "float", "bool"}


class UnusableTemplate(ValueError):  # noqa: N818 - the checkpoint is wrong, not the program
    """Raised for a response template that cannot be used; the message names the reason."""


class Kind(Enum):
    """The kinds of fields."""

    CONTENT = auto()
    REASONING = auto()
    CALLS = auto()


KINDS = {
    "content": Kind.CONTENT,
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking", "tool_plan"), Kind.REASONING),
    "tool_calls": Kind.CALLS,
}


@dataclass(frozen=True, slots=True, eq=False)
class Delimiter:
    """A text at which a field begins or ends.

    ``literals``: the texts; empty if the delimiter is a regular expression. ``can_grow``: whether
    one of the literals is the beginning of another.
    """

    pattern: Pattern
    literals: tuple[str, ...]

    @property
    def can_grow(self) -> bool:
        """Whether text after a match may lengthen it."""
        pairs = ((a, b) for a in self.literals for b in self.literals)
        return not self.literals or any(a != b and b.startswith(a) for a, b in pairs)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Field:
    """One part of an answer.

    A field without ``open`` receives all text outside other fields. ``content``: name of the
    parser of its text, with ``args``. ``transform``: how parsed text becomes calls.
    """

    name: str
    kind: Kind
    open: Delimiter | None
    close: Delimiter | None
    content: str
    args: Mapping[str, Any]
    join: str
    transform: Any
    transform_each: bool


@dataclass(frozen=True, slots=True, eq=False)
class ResponseTemplate:
    """The fields of an answer, and the text at which an answer begins in a prompt."""

    fields: tuple[Field, ...]
    anchor: Delimiter

    @property
    def implicit(self) -> Field | None:
        """The field of the text outside other fields."""
        return next((field for field in self.fields if field.open is None), None)

    def prefix(self, prompt_tail: str) -> str:
        """Return the end of a prompt that belongs to the answer; "" if the prompt has no anchor.

        "" is also returned if the search takes longer than `ANCHOR_SECONDS`.
        """
        try:
            found = self.anchor.pattern.finditer(prompt_tail, timeout=ANCHOR_SECONDS)
            ends = [each.end() for each in found]
        except TimeoutError:
            return ""
        return prompt_tail[ends[-1] :] if ends else ""


def load(spec: object) -> ResponseTemplate:
    """Return the response template of a tokenizer's config. Raises `UnusableTemplate`."""
    if not isinstance(spec, dict):
        raise UnusableTemplate("it is not an object")
    if spec.get("version", 1) != 1:
        raise UnusableTemplate(f"its version {spec['version']} is not known")
    _check_keys(spec, _TEMPLATE_KEYS, "it")
    raw = spec.get("fields")
    if not isinstance(raw, dict) or not 0 < len(raw) <= MAX_FIELDS:
        raise UnusableTemplate(f"fields must be an object of 1 to {MAX_FIELDS} fields")
    fields = tuple(_field(str(name), each) for name, each in raw.items())
    if sum(field.open is None for field in fields) > 1:
        raise UnusableTemplate("more than one field has no open")
    if not {Kind.CONTENT, Kind.CALLS} <= {field.kind for field in fields}:
        raise UnusableTemplate("the fields content and tool_calls are required")
    anchor = _delimiter(spec, "start_anchor", "it")
    if anchor is None:
        raise UnusableTemplate("start_anchor is missing")
    return ResponseTemplate(fields, anchor)


def _field(name: str, raw: object) -> Field:
    where = f"the field {name}"
    if not isinstance(raw, dict):
        raise UnusableTemplate(f"{where} is not an object")
    if name not in KINDS:
        raise UnusableTemplate(f"{where} is not known")
    _check_keys(raw, _FIELD_KEYS, where)
    kind, content, args = KINDS[name], raw.get("content", "text"), raw.get("content_args", {})
    join, transform, each = raw.get("join"), raw.get("transform"), raw.get("transform_each", False)
    if not isinstance(content, str) or content not in CONTENTS:
        raise UnusableTemplate(f"{where}: the content {content!r} is not known")
    if (content in _TEXTS) != (kind is not Kind.CALLS) or content in _TEXTS - {"text"}:
        raise UnusableTemplate(f"{where} cannot have the content {content}")
    if kind is not Kind.CALLS and (transform is not None or each):
        raise UnusableTemplate(f"{where} cannot have a transform")
    if join is not None and not isinstance(join, str):
        raise UnusableTemplate(f"{where}: join is not a text")
    if not isinstance(each, bool) or (each and transform is None):
        raise UnusableTemplate(f"{where}: transform_each needs a transform")
    if kind is Kind.CALLS and not raw.keys() & {"open", "open_pattern"}:
        raise UnusableTemplate(f"{where} has no open")
    try:
        check_args(content, args)
        check_transform(transform)
    except ValueError as error:
        raise UnusableTemplate(f"{where}: {error}") from None
    return Field(
        name=name,
        kind=kind,
        open=_delimiter(raw, "open", where),
        close=_delimiter(raw, "close", where),
        content=content,
        args=args,
        join="\n" if join is None else join,
        transform=transform,
        transform_each=each,
    )


def _check_keys(raw: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(map(str, raw.keys() - known)):
        raise UnusableTemplate(f"{where} has the unknown key {unknown[0]}")


def _delimiter(raw: Mapping[str, Any], key: str, where: str) -> Delimiter | None:
    """Return a delimiter given as a text, as a list of texts or as a pattern."""
    texts, written = raw.get(key), raw.get(f"{key}_pattern")
    if texts is None and written is None:
        return None
    if texts is not None and written is not None:
        raise UnusableTemplate(f"{where} has both {key} and {key}_pattern")
    if written is not None:
        return Delimiter(_pattern(written, f"{where}: {key}_pattern"), ())
    listed = [texts] if isinstance(texts, str) else texts
    if not isinstance(listed, list) or not all(isinstance(e, str) and e for e in listed):
        raise UnusableTemplate(f"{where}: {key} must be a text or a list of texts")
    literals = tuple(sorted(dict.fromkeys(listed), key=len, reverse=True))
    if not literals:
        raise UnusableTemplate(f"{where}: {key} is empty")
    return Delimiter(regex.compile("|".join(map(regex.escape, literals))), literals)


def _pattern(written: object, where: str) -> Pattern:
    """Return the compiled pattern of a delimiter. Raises `UnusableTemplate`."""
    try:
        found = compiled(written, where)
    except ValueError as error:
        raise UnusableTemplate(str(error)) from None
    if found.fullmatch(""):
        raise UnusableTemplate(f"{where} matches the empty text")
    return found

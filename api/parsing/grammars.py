"""Grammars for answers as Lark text in llguidance's flavour; blocks of keyword arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from ...core.errors import InvalidRequest
from ..structured.grammar_text import (
    JSON_FORM,
    check_size,
    json_block,
    json_rule,
    lark_rules,
    lark_text,
    num_chars,
)
from ..structured.schemas.preparing import Strictness, with_options
from ..types.sampling_params import MAX_GRAMMAR_CHARS
from .reading.offers import required_names

if TYPE_CHECKING:
    from ..types.results import Tool
    from ..types.sampling_params import SamplingParams

LOOSE_FORM = {**JSON_FORM, "coerce_one_of": True, "lenient": True}
LINE_BREAKS = r"/\n{0,2}/"  # bounded: a model can not loop on them
_WRITTEN = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", r"\d": "[0-9]", r"\D": "[^0-9]"}
_REGEX_PART = re.compile(r"\\.|[/\n]", re.DOTALL)


class Lark:
    """Rules under way. ``vocab``: marks that are tokens of it are asked for as tokens."""

    def __init__(self, vocab: Mapping[str, int]) -> None:
        self._vocab = vocab
        self._rules: dict[str, str] = {}
        self._num_chars = 0

    def rule(self, name: str, body: str, *, options: str = "") -> str:
        """Define it, again in the same words if need be; its name."""
        if name not in self._rules:
            self._num_chars += len(body)
        self._rules[name] = f"{name}{options}: {body}"
        return name

    def text(self, start: str) -> str:
        """Return the whole grammar."""
        return "\n".join([f"start: {start}", *self._rules.values(), ""])

    def mark(self, mark: str) -> str:
        """One mark: its token, or the tokens that spell it."""
        token_id = self._vocab.get(mark)
        return lark_text(mark) if token_id is None else f"<[{token_id}]>"

    def up_to(
        self, mark: str, name: str, *, through: Set[int] = frozenset(), marks: Sequence[str] = ()
    ) -> str:
        """Whatever text, and the mark where it comes first.

        ``through``: special tokens that may be in it, too; no others are text. ``marks``: others
        that it must not hold, where marks are tokens.
        """
        token_id = self._vocab.get(mark)
        if token_id is not None:
            text = self.without_any((mark, *marks), name)
            others = ",".join(map(str, sorted(through - {token_id})))
            before = f"({text} <[{others}]>)* {text}" if others else text
            return self.rule(name, f"{before} <[{token_id}]>")
        return self.rule(name, f"/(?s:.*){_quoted(mark)}/", options="[lazy]")

    def lazily(self, mark: str, name: str) -> str:
        """One mark, even where other text may begin with its characters."""
        return self.rule(name, self.mark(mark), options="" if mark in self._vocab else "[lazy]")

    def breaks(self) -> str:
        """Return the line breaks behind a thought."""
        return self.rule("BREAKS", LINE_BREAKS)

    def without(self, mark: str, name: str) -> str:
        """Whatever text does not hold the mark, not even spelt by other tokens."""
        return self.without_any((mark,), name)

    def without_any(self, marks: Iterable[str], name: str) -> str:
        """Whatever text holds none of the marks."""
        return self._all_but(name, f"(?s:.*)({'|'.join(map(_quoted, marks))})(?s:.*)")

    def not_beginning(self, marks: Iterable[str], name: str) -> str:
        """Whatever text does not begin with one of these, white space aside."""
        return self._all_but(name, rf"\s*({'|'.join(map(_quoted, marks))})(?s:.*)")

    def _all_but(self, name: str, pattern: str) -> str:
        return self.rule(f"{name.upper()}_TEXT", f"/(?s:.*)/ & ~/{pattern}/")

    def each(self, tools: Sequence[Tool], written: Callable[[Tool], str]) -> str:
        """Any of these; a rule for each, so that references inside a schema stay what they were."""
        rules = []
        for index, tool in enumerate(tools):
            rules.append(self.rule(f"tool_{index}", written(tool)))
            if self._num_chars > MAX_GRAMMAR_CHARS:
                raise InvalidRequest(f"tools: {_TOO_LONG}", param="tools")
        return self.rule("tool", " | ".join(rules))

    def structured_output(self, params: SamplingParams) -> str | None:
        """Return the structured output that ``params`` ask for, as a rule."""
        if params.json_schema is not None:
            return self.rule("form", json_rule(params.json_schema))
        if params.regex is not None:
            return self.rule("form", f"/{_regex(params.regex)}/")
        if params.choice is not None:
            self.rule("CHOICE", " | ".join(map(lark_text, params.choice)))
            return self.rule("form", "CHOICE")
        if params.grammar is not None:
            return self.rule("form", f"%lark {{\n{lark_rules(params.grammar)}\n}}")
        return None


def arguments(tool: Tool) -> str:
    """Return a tool's arguments; of a schema that need not be strict, what is not known is left
    out.

    A tool without parameters takes none.
    """
    if not tool.parameters:
        return '"{}"'
    return value({"type": "object", **tool.parameters}, strict=tool.strict, of=tool.name)


def takes_any(tool: Tool) -> bool:
    """Whether a tool may have arguments that its schema does not name."""
    schema = tool.parameters or {"additionalProperties": False}
    return schema.get("additionalProperties") is not False


def value(schema: Mapping[str, Any], *, strict: bool, of: str = "") -> str:
    """JSON of a schema, without free white space. Raises `InvalidRequest`.

    ``of``: the tool and the argument that it belongs to, for errors.
    """
    check_size("tools", schema)
    form = JSON_FORM if strict else LOOSE_FORM
    strictness: Strictness = "strict" if strict else "loose"
    try:
        known = with_options(schema, strictness, param="tools", name=of)
        return json_block({**known, "x-guidance": form})
    except (ValueError, TypeError, RecursionError):
        raise InvalidRequest(
            "tools: the parameters of a tool are not valid JSON", param="tools"
        ) from None


def _quoted(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _regex(pattern: str) -> str:
    """The same for between slashes, on one line; digits are those of ASCII."""

    def written(found: re.Match[str]) -> str:
        return _WRITTEN.get(found[0], found[0])

    return _REGEX_PART.sub(written, pattern)


# What says more of an object than which properties it has, and can not be followed here.
_TOO_LONG = f"the parameters are too long: their grammar has over {MAX_GRAMMAR_CHARS} characters"
_ABOUT_WHOLE = (
    "anyOf", "oneOf", "allOf", "not", "if", "$ref", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
)  # fmt: skip
_ABOUT_TEXT = ("pattern", "format", "minLength", "maxLength")
MAX_PROPERTIES = 4096  # of one tool; the text of more is too long in any case
_KEY = re.compile(r"\w+", re.ASCII)


def listed(lark: Lark, members: Sequence[tuple[str, bool]], name: str, *, comma: str = ", ") -> str:
    """All members in order, those that are not required perhaps, with commas between them.

    Two chains of rules: ``first`` where nothing was written yet, ``rest`` behind something.
    """
    first = rest = lark.rule(f"{name}_end", '""')
    for index in reversed(range(len(members))):
        written, is_required = members[index]
        member = lark.rule(f"{name}_{index}", written)
        skips = ("", "") if is_required else (f" | {first}", f" | {rest}")
        first = lark.rule(f"{name}_first_{index}", f"{member} {rest}{skips[0]}")
        rest = lark.rule(f"{name}_rest_{index}", f"{lark_text(comma)} {member} {rest}{skips[1]}")
    return first


def not_strict(tool: Tool, part: str) -> InvalidRequest:
    """Return the error for a strict tool whose schema this model's format cannot follow in full."""
    message = f"tools: {tool.name} cannot be strict: the model's format does not enforce {part}"
    return InvalidRequest(message, param="tools")


def _check_text(tool: Tool, schema: Mapping[str, Any]) -> None:
    if tool.strict and (found := [key for key in _ABOUT_TEXT if key in schema]):
        raise not_strict(tool, f"{found[0]} of a string")


def properties_of(tool: Tool) -> dict[str, Mapping[str, Any]]:
    """Schemas of the arguments, each that refers to something with what is defined."""
    schema = tool.parameters or {}
    if tool.strict and (found := [key for key in _ABOUT_WHOLE if key in schema]):
        raise not_strict(tool, f"{found[0]} at the top of its schema")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties: dict[str, Any] = {key: {} for key in required_of(tool)}
    properties |= dict(schema.get("properties", {}))
    if not all(map(_KEY.fullmatch, properties)):
        message = (
            f"tools: names of the arguments of {tool.name} must consist of letters, digits and _"
        )
        raise InvalidRequest(message, param="tools")
    given = {key: each if isinstance(each, Mapping) else {} for key, each in properties.items()}
    referring = {key for key, each in given.items() if shared and _refers(each)}
    if len(properties) > MAX_PROPERTIES or len(referring) * num_chars(shared) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"tools: {tool.name}: {_TOO_LONG}", param="tools")
    return {key: {**shared, **each} if key in referring else each for key, each in given.items()}


def _refers(schema: Mapping[str, Any]) -> bool:
    """Whether there is a reference in it."""
    left: list[object] = [schema]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            if "$ref" in each:
                return True
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
    return False


def required_of(tool: Tool) -> Sequence[str]:
    """Names of the arguments that must be there."""
    return required_names(tool.parameters)

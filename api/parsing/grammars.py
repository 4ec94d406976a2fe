"""Grammars for answers, in llguidance's dialect of Lark, and rules for tools' arguments."""

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
LINE_BREAKS = r"/\n{0,2}/"  # bounded, so that a model cannot repeat them forever
_WRITTEN = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", r"\d": "[0-9]", r"\D": "[^0-9]"}
_REGEX_PART = re.compile(r"\\.|[/\n]", re.DOTALL)


class Lark:
    """The rules of a grammar.

    ``vocab``: the ids of delimiters that are single tokens, which are then matched as tokens.
    ``parts``: tokens that may be a part of a delimiter.
    """

    def __init__(self, vocab: Mapping[str, int], parts: Iterable[str] = ()) -> None:
        self._vocab = vocab
        tokens = sorted((part for part in parts if part in vocab), key=len, reverse=True)
        self._parts = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
        self._rules: dict[str, str] = {}
        self._num_chars = 0

    def rule(self, name: str, body: str, *, options: str = "") -> str:
        """Define a rule and return its name; an earlier rule of that name is replaced."""
        if name not in self._rules:
            self._num_chars += len(body)
        self._rules[name] = f"{name}{options}: {body}"
        return name

    def text(self, start: str) -> str:
        """Return the whole grammar."""
        return "\n".join([f"start: {start}", *self._rules.values(), ""])

    def mark(self, mark: str) -> str:
        """Return the expression for one delimiter: its token, its text, or tokens and text."""
        token_id = self._vocab.get(mark)
        return self._spelt(mark) if token_id is None else f"<[{token_id}]>"

    def has_token(self, mark: str) -> bool:
        """Whether a delimiter is a single token."""
        return mark in self._vocab

    def _spelt(self, mark: str) -> str:
        before, rest = self._split(mark)
        return " ".join([lark_text(before)] * bool(before or not rest) + [rest])

    def _split(self, mark: str) -> tuple[str, str]:
        """Return the text before the first token in a delimiter, and the rest's expression."""
        found = self._parts.search(mark)
        if found is None:
            return mark, ""
        rest = mark[found.end() :]
        after = self._spelt(rest) if rest else ""
        return mark[: found.start()], f"<[{self._vocab[found[0]]}]> {after}"

    def up_to(
        self, mark: str, name: str, *, through: Set[int] = frozenset(), marks: Sequence[str] = ()
    ) -> str:
        """Return a rule for any text up to and including the first delimiter.

        If the delimiter is a single token, ``through`` are the only special tokens that the text
        may contain, and ``marks`` are further delimiters that it must not contain.
        """
        token_id = self._vocab.get(mark)
        if token_id is not None:
            text = self.without_any((mark, *marks), name)
            others = ",".join(map(str, sorted(through - {token_id})))
            before = f"({text} <[{others}]>)* {text}" if others else text
            return self.rule(name, f"{before} <[{token_id}]>")
        begin, rest = self._split(mark)
        if rest:
            part = mark[len(begin) :]
            found = self._parts.search(part)
            assert found is not None
            inside = self._all_but(name, f"(?s:.*){_quoted(found[0])}(?s:.*)")
            last = self.rule(
                f"{name.upper()}_LAST",
                f"/(?s:.*){_quoted(begin)}/ & ~/(?s:.*){_quoted(found[0])}(?s:.*)/",
            )
            others = ",".join(map(str, sorted(through - {self._vocab[found[0]]})))
            before = f"({inside} <[{others}]>)* {last}" if others else last
            return self.rule(name, f"{before} {rest}")
        return self.rule(name, f"/(?s:.*){_quoted(mark)}/", options="[lazy]")

    def matching(self, pattern: str, mark: str, name: str) -> str:
        """Return a rule for text that matches a pattern, up to and including the delimiter."""
        if mark in self._vocab:
            return f"{self.rule(name, f'/{_regex(pattern)}/')} {self.mark(mark)}"
        begin, rest = self._split(mark)
        if rest:
            return f"{self.rule(name, f'/(?:{_regex(pattern)}){_quoted(begin)}/')} {rest}"
        return self.rule(name, f"/(?:{_regex(pattern)}){_quoted(mark)}/", options="[lazy]")

    def lazily(self, mark: str, name: str) -> str:
        """Return a rule that matches a delimiter as soon as it is complete."""
        is_text = mark not in self._vocab and self._parts.search(mark) is None
        return self.rule(name, self.mark(mark), options="[lazy]" if is_text else "")

    def breaks(self) -> str:
        """Return the rule for the line breaks after a thought."""
        return self.rule("BREAKS", LINE_BREAKS)

    def without(self, mark: str, name: str) -> str:
        """Return a rule for text that does not contain the delimiter, however it is tokenized."""
        return self.without_any((mark,), name)

    def without_any(self, marks: Iterable[str], name: str) -> str:
        """Return a rule for text without any of the delimiters."""
        return self._all_but(name, f"(?s:.*)({'|'.join(map(_quoted, marks))})(?s:.*)")

    def not_beginning(self, marks: Iterable[str], name: str) -> str:
        """Return a rule for text that does not begin with a delimiter, even after white space."""
        return self._all_but(name, rf"\s*({'|'.join(map(_quoted, marks))})(?s:.*)")

    def _all_but(self, name: str, pattern: str) -> str:
        return self.rule(f"{name.upper()}_TEXT", f"/(?s:.*)/ & ~/{pattern}/")

    def each(self, tools: Sequence[Tool], written: Callable[[Tool], str]) -> str:
        """Return a rule for any of the tools.

        Each tool has its own rule, so that references inside its schema stay valid. Raises
        `InvalidRequest` for a grammar that is too long.
        """
        rules = []
        for index, tool in enumerate(tools):
            rules.append(self.rule(f"tool_{index}", written(tool)))
            if self._num_chars > MAX_GRAMMAR_CHARS:
                raise InvalidRequest(f"tools: {_TOO_LONG}", param="tools")
        return self.rule("tool", " | ".join(rules))

    def structured_output(self, params: SamplingParams) -> str | None:
        """Return a rule for the structured output of ``params``, or None without one."""
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
    """Return the rule for a tool's arguments as JSON.

    If the tool is not strict, unknown keywords of its schema are ignored. A tool without parameters
    takes no arguments.
    """
    if not tool.parameters:
        return '"{}"'
    if tool.input_pattern is not None:
        text = {"type": "string", "pattern": f"^(?:{tool.input_pattern})$"}
        return value({**tool.parameters, "properties": {"input": text}}, strict=True, of=tool.name)
    return value({"type": "object", **tool.parameters}, strict=tool.strict, of=tool.name)


def takes_any(tool: Tool) -> bool:
    """Whether a tool accepts arguments that its schema does not name."""
    schema = tool.parameters or {"additionalProperties": False}
    return schema.get("additionalProperties") is not False


def value(schema: Mapping[str, Any], *, strict: bool, of: str = "") -> str:
    """Return a rule for JSON that a schema allows. Raises `InvalidRequest`.

    ``of``: the tool and the argument that the schema belongs to, for error messages.
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
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _regex(pattern: str) -> str:
    """Return a pattern escaped for use between slashes on one line; ``\\d`` means ASCII digits."""

    def written(found: re.Match[str]) -> str:
        return _WRITTEN.get(found[0], found[0])

    return _REGEX_PART.sub(written, pattern)


_TOO_LONG = f"the parameters are too long: their grammar has over {MAX_GRAMMAR_CHARS} characters"
# Keywords about an object as a whole, which a format with separate arguments cannot enforce.
_ABOUT_WHOLE = (
    "anyOf", "oneOf", "allOf", "not", "if", "$ref", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
)  # fmt: skip
_ABOUT_TEXT = ("pattern", "format", "minLength", "maxLength")
MAX_PROPERTIES = 4096  # maximum per tool: a grammar for more would be too long in any case
_KEY = re.compile(r"\w+", re.ASCII)


def listed(lark: Lark, members: Sequence[tuple[str, bool]], name: str, *, comma: str = ", ") -> str:
    """Return a rule for members in order, separated by commas; optional ones may be left out.

    ``members``: pairs (rule, is required). The rules ``first`` apply until a member has been
    written, and the rules ``rest`` after it.
    """
    first = rest = lark.rule(f"{name}_end", '""')
    for index in reversed(range(len(members))):
        written, is_required = members[index]
        member = lark.rule(f"{name}_{index}", written)
        skips = ("", "") if is_required else (f" | {first}", f" | {rest}")
        first = lark.rule(f"{name}_first_{index}", f"{member} {rest}{skips[0]}")
        rest = lark.rule(f"{name}_rest_{index}", f"{lark_text(comma)} {member} {rest}{skips[1]}")
    return first


def not_strict(tool: Tool, reason: str) -> InvalidRequest:
    """Return the error for a strict tool whose schema cannot be enforced."""
    return InvalidRequest(f"tools: {tool.name} cannot be strict: {reason}", param="tools")


def _check_text(tool: Tool, schema: Mapping[str, Any]) -> None:
    if tool.strict and (found := [key for key in _ABOUT_TEXT if key in schema]):
        raise not_strict(tool, f"the model's format does not enforce {found[0]} of a string")


def properties_of(tool: Tool) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of a tool's arguments by name.

    If an argument's schema contains references, the definitions of the tool's schema are added to
    it. Raises `InvalidRequest`.
    """
    schema = tool.parameters or {}
    if tool.strict and (found := [key for key in _ABOUT_WHOLE if key in schema]):
        where = "at the top level of its schema"
        raise not_strict(tool, f"the model's format does not enforce {found[0]} {where}")
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
    """Whether a schema contains a reference."""
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
    """Return the names of a tool's required arguments."""
    return required_names(tool.parameters)

"""Writing grammars for answers: Lark text in llguidance's flavour."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from ...core.errors import InvalidRequest
from ..structured.grammar_text import JSON_FORM, check_size, json_rule, lark_rules, lark_text
from ..types.sampling_params import MAX_GRAMMAR_CHARS

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
        """The whole grammar."""
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
        """The line breaks behind a thought."""
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
                raise InvalidRequest("the parameters of the tools are too long", param="tools")
        return self.rule("tool", " | ".join(rules))

    def form(self, params: SamplingParams) -> str | None:
        """What ``params`` ask of the words, as a rule."""
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
    """A tool's arguments; of a schema that need not be strict, what is not known is left out."""
    schema = {"type": "object", **(tool.parameters or {})}
    return value(schema, strict=tool.strict)


def value(schema: Mapping[str, Any], *, strict: bool) -> str:
    """JSON of a schema, without free white space. Raises `InvalidRequest`."""
    check_size("tools", schema)
    if strict:
        return json_rule(schema)
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': LOOSE_FORM}, allow_nan=False)}"
    except (ValueError, TypeError, RecursionError):
        raise InvalidRequest("the parameters of a tool are not JSON", param="tools") from None


def _quoted(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _regex(pattern: str) -> str:
    """The same for between slashes, on one line; digits are those of ASCII."""

    def written(found: re.Match[str]) -> str:
        return _WRITTEN.get(found[0], found[0])

    return _REGEX_PART.sub(written, pattern)

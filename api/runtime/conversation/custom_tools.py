"""Custom tools: tools whose input is one text, which may have to follow a grammar.

The model sees a function with one argument, ``input``. Clients receive calls of a custom tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from llguidance import LLMatcher

from ....core.errors import InvalidRequest
from ...parsing.reading.json_text import INVALID
from ...structured.lark_regex import regex_of
from ...types.results import Tool

INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The arguments of a custom tool."""
SYNTAXES = ("lark", "regex")
MAX_DEFINITION = 20_000  # maximum length of a grammar in characters
NUM_KEPT = 64  # number of cached patterns: an agent sends the same grammars with each request
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_CHARS = re.compile(
    rf'(?:[^"\\]|\\["\\/bfnrt]|{_HIGH}{_LOW}|(?!{_HIGH}|{_LOW})\\u[0-9a-fA-F]{{4}})*'
)  # complete characters of a JSON string, escaped or not


def custom_tool(
    name: str,
    description: str | None,
    syntax: str | None = None,
    definition: str | None = None,
    *,
    param: str,
    is_loaded: bool = False,
) -> Tool:
    """Return a custom tool as the function that the model sees.

    ``syntax`` and ``definition``: the grammar of its input; None: any text. ``param``: the field of
    the grammar. Raises `InvalidRequest` for a grammar that is invalid or cannot be enforced.
    """
    pattern = None
    if definition:
        if syntax not in SYNTAXES:
            message = f"{param}: syntax must be one of {', '.join(SYNTAXES)}, not {syntax!r}"
            raise InvalidRequest(message, param=param)
        try:
            pattern = _pattern(syntax, definition)
        except ValueError as error:
            message = f"{param}: the {syntax} grammar of {name} cannot be enforced: {error}"
            raise InvalidRequest(message, param=param) from None
        told = f"The input follows this {syntax} grammar:\n{definition}"
        description = f"{description}\n\n{told}" if description else told
    return Tool(
        name=name,
        description=description,
        parameters=INPUT,
        strict=pattern is not None,
        input_pattern=pattern,
        is_loaded=is_loaded,
    )


@lru_cache(NUM_KEPT)
def _pattern(syntax: str, definition: str) -> str:
    """Return the pattern of a grammar's texts. Raises ValueError."""
    if len(definition) > MAX_DEFINITION:
        raise ValueError(f"the grammar has more than {MAX_DEFINITION} characters")
    is_lark = syntax == "lark"
    made = LLMatcher.grammar_from_lark if is_lark else LLMatcher.grammar_from_regex
    if problem := LLMatcher.validate_grammar(made(definition)):
        raise ValueError(" ".join(problem.split()))
    return regex_of(definition) if is_lark else re.sub(r"^\^|(?<!\\)\$$", "", definition)


def input_of(arguments: str) -> str:
    """Return the input of a call, or the whole text if the arguments have no input."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return arguments
    found = given.get("input", given.get(INVALID))
    return found if isinstance(found, str) else arguments


class InputReader:
    """Decodes the input of a call while the JSON text of its arguments arrives."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._held = ""  # JSON text of the input that was not decoded yet
        self._sent: list[str] = []
        self._is_open = False

    def add(self, text: str) -> str:
        """Return what ``text``, a part of the arguments, adds to the input."""
        self._arguments.append(text)
        self._held += text
        if not self._is_open:
            if (begin := _BEGIN.match(self._held)) is None:
                return ""
            self._is_open, self._held = True, self._held[begin.end() :]
        found = _CHARS.match(self._held)
        assert found is not None, "the pattern matches an empty text"
        self._held = self._held[found.end() :]
        read = str(json.loads(f'"{found[0]}"', strict=False))
        self._sent.append(read)
        return read

    def end(self) -> str:
        """Return the rest of the input; arguments without an input are returned as they are."""
        whole, sent = self.whole(), "".join(self._sent)
        return whole.removeprefix(sent) if whole.startswith(sent) else ""

    def whole(self) -> str:
        """Return the input decoded so far, or the text of arguments that have no input."""
        arguments = "".join(self._arguments)
        found = input_of(arguments)
        return "".join(self._sent) if self._is_open and found == arguments else found

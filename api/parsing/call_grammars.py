"""Grammars for tool calls, one per format; each accepts only text that its parser reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..structured.grammar_text import lark_text
from .grammars import Lark, arguments

if TYPE_CHECKING:
    from ..types.results import Tool

MAX_CALLS = 32
"""Greatest number of calls that a grammar allows in one answer.

Otherwise a small model that is forced to call, and may not write text after a call, goes on calling
until the context is full.
"""

# A function of (grammar, tools, parallel). It returns the rule for the text after the first
# delimiter of one call or several.
Block = Callable[[Lark, "Sequence[Tool]", bool], str]


class CallGrammar(Protocol):
    """Writes the grammar rules of a format; ``parallel`` allows more than one call."""

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the rule for calls without other text."""

    def mixed(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the rule for free text that may contain calls, which must be valid."""


@dataclass(frozen=True, slots=True)
class Marked:
    """Calls that begin with a delimiter, anywhere in the text."""

    mark: str
    block: Block
    repeats: bool = True  # each call has its own block; ``between`` separates them
    between: str = ""

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the rule for calls without other text."""
        one = lark.rule("call", f"{lark.mark(self.mark)} {self.block(lark, tools, parallel)}")
        parallel = parallel and self.repeats
        return lark.rule("calls", several(one, self.between, parallel=parallel))

    def mixed(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the rule for free text that may contain calls, which must be valid."""
        call = f"{lark.up_to(self.mark, 'words')} {self.block(lark, tools, parallel)}"
        rest = lark.without(self.mark, "rest")
        return lark.rule("mixed", f"({call})* {rest}" if parallel else f"{call} | {rest}")


@dataclass(frozen=True, slots=True)
class Bare:
    """Calls without delimiters: an answer that begins like a call consists of calls alone."""

    beginnings: tuple[str, ...]
    block: Block

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the rule for calls without other text."""
        return lark.rule("calls", self.block(lark, tools, parallel))

    def mixed(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the rule for either calls, or text that does not begin like a call."""
        words = lark.not_beginning(self.beginnings, "words")
        return lark.rule("mixed", f"{self.calls(lark, tools, parallel=parallel)} | {words}")


def several(one: str, between: str = "", *, parallel: bool) -> str:
    """Return the rule for one call or, if ``parallel``, for up to `MAX_CALLS` calls.

    ``one``: the rule for one call. ``between``: the text between two calls.
    """
    if not parallel:
        return one
    more = f"{lark_text(between)} {one}" if between else one
    return f"{one} ({more}){{0,{MAX_CALLS - 1}}}"


def between(before: str, after: str) -> Callable[[Tool], str]:
    """Return a function that writes a tool's rule: its arguments between two texts.

    ``%s`` in ``before`` stands for the tool's name.
    """

    def written(tool: Tool) -> str:
        begin = lark_text(before.replace("%s", tool.name))
        return f"{begin} {arguments(tool)} {lark_text(after)}"

    return written


def after_name(mark: str) -> Callable[[Tool], str]:
    """Return a function that writes a tool's rule: its name, a delimiter and its arguments."""
    return lambda tool: f"{lark_text(tool.name)} {mark} {arguments(tool)}"

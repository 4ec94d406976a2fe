"""Grammars for tool calls, by format. Each accepts exactly what the parser of its format reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..structured.grammar_text import lark_text
from .grammars import Lark, arguments

if TYPE_CHECKING:
    from ..types.results import Tool

MAX_CALLS = 32
"""Most calls that a grammar forces into one answer. A small model that must call, and may not write
words behind a call, otherwise goes on calling up to the end of its context."""

# What stands behind the first mark, for calls of these tools, one of them or (True) more.
Block = Callable[[Lark, "Sequence[Tool]", bool], str]


class CallGrammar(Protocol):
    """Writes rules; ``parallel``: more than one call may come."""

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Calls and nothing else."""

    def mixed(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Words as the model likes; where it begins a call, a valid one."""


@dataclass(frozen=True, slots=True)
class Marked:
    """Calls that begin with a delimiter, anywhere in the text."""

    mark: str
    block: Block
    repeats: bool = True  # several calls are several blocks, with ``between`` between them
    between: str = ""

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Calls and nothing else."""
        one = lark.rule("call", f"{lark.mark(self.mark)} {self.block(lark, tools, parallel)}")
        parallel = parallel and self.repeats
        return lark.rule("calls", several(one, self.between, parallel=parallel))

    def mixed(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Words as the model likes; where it begins a call, a valid one."""
        call = f"{lark.up_to(self.mark, 'words')} {self.block(lark, tools, parallel)}"
        rest = lark.without(self.mark, "rest")
        return lark.rule("mixed", f"({call})* {rest}" if parallel else f"{call} | {rest}")


@dataclass(frozen=True, slots=True)
class Bare:
    """Calls that are the whole answer, if it begins like a call."""

    beginnings: tuple[str, ...]
    block: Block

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Calls and nothing else."""
        return lark.rule("calls", self.block(lark, tools, parallel))

    def mixed(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Words that do not begin like calls, or calls."""
        words = lark.not_beginning(self.beginnings, "words")
        return lark.rule("mixed", f"{self.calls(lark, tools, parallel=parallel)} | {words}")


def several(one: str, between: str = "", *, parallel: bool) -> str:
    """One call, or up to `MAX_CALLS` with this text between them."""
    if not parallel:
        return one
    more = f"{lark_text(between)} {one}" if between else one
    return f"{one} ({more}){{0,{MAX_CALLS - 1}}}"


def between(before: str, after: str) -> Callable[[Tool], str]:
    """Arguments between two texts, with the tool's name for %s."""

    def written(tool: Tool) -> str:
        begin = lark_text(before.replace("%s", tool.name))
        return f"{begin} {arguments(tool)} {lark_text(after)}"

    return written


def behind_name(mark: str) -> Callable[[Tool], str]:
    """Return the name, a mark, the arguments."""
    return lambda tool: f"{lark_text(tool.name)} {mark} {arguments(tool)}"

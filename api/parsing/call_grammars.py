"""What a grammar for calls looks like, by format. Each accepts what its reader reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..structured.grammar_text import lark_text
from . import tool_call_formats as f
from .keyword_grammars import pythonic_block, qwen_coder_block
from .lark import Lark, arguments
from .pythonic import PYTHON_START

if TYPE_CHECKING:
    from ..types.results import Tool

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
    """Calls that a mark announces, anywhere in the words."""

    mark: str
    block: Block
    repeats: bool = True  # several calls are several blocks, with ``between`` between them
    between: str = ""

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Calls and nothing else."""
        one = lark.rule("call", f"{lark.mark(self.mark)} {self.block(lark, tools, parallel)}")
        more = f"{lark_text(self.between)} {one}" if self.between else one
        return lark.rule("calls", f"{one} ({more})*" if parallel and self.repeats else one)

    def mixed(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Words as the model likes; where it begins a call, a valid one."""
        call = f"{lark.up_to(self.mark, 'words')} {self.block(lark, tools, parallel)}"
        rest = lark.without(self.mark, "rest")
        return lark.rule("mixed", f"({call})* {rest}" if parallel else f"{call} | {rest}")


@dataclass(frozen=True, slots=True)
class Bare:
    """Calls that are the whole answer, if it begins like one."""

    beginnings: tuple[str, ...]
    block: Block

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Calls and nothing else."""
        return lark.rule("calls", self.block(lark, tools, parallel))

    def mixed(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Words that do not begin like calls, or calls."""
        words = lark.not_beginning(self.beginnings, "words")
        return lark.rule("mixed", f"{self.calls(lark, tools, parallel=parallel)} | {words}")


def _between(before: str, after: str) -> Callable[[Tool], str]:
    """Arguments between two texts, with the tool's name for %s."""

    def written(tool: Tool) -> str:
        begin = lark_text(before.replace("%s", tool.name))
        return f"{begin} {arguments(tool)} {lark_text(after)}"

    return written


def _behind_name(mark: str) -> Callable[[Tool], str]:
    """The name, a mark, the arguments."""
    return lambda tool: f"{lark_text(tool.name)} {mark} {arguments(tool)}"


def _hermes(lark: Lark, tools: Sequence[Tool], _: bool) -> str:
    one = lark.each(tools, _between('\n{"name": "%s", "arguments": ', "}\n"))
    return f"{one} {lark.mark(f.HERMES_END)}"


def _llama3(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    one = lark.each(tools, _between('{"name": "%s", "parameters": ', "}"))
    return f'{one} ("; " {one})*' if parallel else one


def _mistral_list(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    one = lark.each(tools, _between('{"name": "%s", "arguments": ', "}"))
    return f'" [" {one} (", " {one})* "]"' if parallel else f'" [" {one} "]"'


def _mistral_args(lark: Lark, tools: Sequence[Tool], _: bool) -> str:
    return lark.each(tools, _behind_name(lark.mark(f.MISTRAL_ARGS)))


def _deepseek(lark: Lark, one: str, between: str, parallel: bool) -> str:
    call = lark.rule("inner", f"{lark.mark(f.DEEPSEEK_BEGIN)} {one} {lark.mark(f.DEEPSEEK_END)}")
    more = f" ({between}{call})*" if parallel else ""
    return f"{call}{more} {lark.mark(f.DEEPSEEK_CALLS_END)}"


def _deepseek_v3(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    one = lark.each(tools, _between("%s\n```json\n", "\n```"))
    return _deepseek(lark, f'"function" {lark.mark(f.DEEPSEEK_SEP)} {one}', r'"\n" ', parallel)


def _deepseek_v31(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    one = lark.each(tools, _behind_name(lark.mark(f.DEEPSEEK_SEP)))
    return _deepseek(lark, one, "", parallel)


HERMES = Marked(f.HERMES_BEGIN, _hermes, between="\n")
LLAMA3 = Bare(("{", f.PYTHON_TAG), _llama3)
MISTRAL_LIST = Marked(f.MISTRAL_CALLS, _mistral_list, repeats=False)
MISTRAL_ARGS = Marked(f.MISTRAL_CALLS, _mistral_args)
DEEPSEEK_V3 = Marked(f.DEEPSEEK_CALLS_BEGIN, _deepseek_v3, repeats=False)
DEEPSEEK_V31 = Marked(f.DEEPSEEK_CALLS_BEGIN, _deepseek_v31, repeats=False)
PYTHONIC = Bare(("[", PYTHON_START), pythonic_block)
QWEN_CODER = Marked(f.HERMES_BEGIN, qwen_coder_block, between="\n")

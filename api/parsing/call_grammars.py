"""Grammars for tool calls, by format. Each accepts exactly what the parser of its format reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..structured.grammar_text import lark_text
from . import tool_call_formats as f
from .gemma import FUNCTION_GEMMA, GEMMA4, GemmaMarks, gemma_block
from .grammars import Lark, arguments, pythonic_block, tagged_block
from .pythonic import PYTHON_START
from .tagged import GLM, MINIMAX, QWEN_CODER, SEED, Tags

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
    """Calls that begin with a delimiter, anywhere in the text."""

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


def _kimi(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    def written(tool: Tool) -> str:
        name = lark_text(f"functions.{tool.name}:")
        return f"{name} INDEX {lark.mark(f.KIMI_ARGUMENTS)} {arguments(tool)}"

    lark.rule("INDEX", r"/[0-9]{1,3}/")
    one = f"{lark.mark(f.KIMI_CALL)} {lark.each(tools, written)} {lark.mark(f.KIMI_CALL_END)}"
    call = lark.rule("inner", one)
    return f"{call}{' ' + call + '*' if parallel else ''} {lark.mark(f.KIMI_SECTION_END)}"


def _json_list(begin: str, end: str, each: str = '{"name": "%s", "arguments": ') -> Marked:
    """A list of objects, ``each`` up to its arguments."""

    def block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        one = lark.each(tools, _between(each, "}"))
        written = f'"[" {one} (", " {one})* "]"' if parallel else f'"[" {one} "]"'
        return f"{written} {lark.mark(end)}" if end else written

    return Marked(begin, block, repeats=False)


def _marked_list(begin: str, end: str) -> Marked:
    """The calls of `PYTHONIC` between marks."""

    def block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        return f"{pythonic_block(lark, tools, parallel)} {lark.mark(end)}"

    return Marked(begin, block, repeats=False)


def _tagged(tags: Tags) -> Marked:
    def block(lark: Lark, tools: Sequence[Tool], _: bool) -> str:
        return tagged_block(lark, tools, tags)

    return Marked(tags.begin, block, between="\n")


def _gemma(marks: GemmaMarks) -> Marked:
    def block(lark: Lark, tools: Sequence[Tool], _: bool) -> str:
        return gemma_block(lark, tools, marks)

    return Marked(marks.begin, block)


TAGS = {"qwen3-coder": QWEN_CODER, "seed": SEED, "minimax": MINIMAX, "glm": GLM}
GEMMA_MARKS = {"gemma4": GEMMA4, "function-gemma": FUNCTION_GEMMA}
HERMES = Marked(f.HERMES_BEGIN, _hermes, between="\n")
LLAMA3 = Bare(("{", f.PYTHON_TAG), _llama3)
MISTRAL_LIST = Marked(f.MISTRAL_CALLS, _mistral_list, repeats=False)
MISTRAL_ARGS = Marked(f.MISTRAL_CALLS, _mistral_args)
DEEPSEEK_V3 = Marked(f.DEEPSEEK_CALLS_BEGIN, _deepseek_v3, repeats=False)
DEEPSEEK_V31 = Marked(f.DEEPSEEK_CALLS_BEGIN, _deepseek_v31, repeats=False)
PYTHONIC = Bare(("[", PYTHON_START), pythonic_block)
KIMI = Marked(f.KIMI_SECTION, _kimi, repeats=False)
GRANITE = _json_list(f.GRANITE_CALLS, "")
PHI4 = _json_list(f.GRANITE_CALLS, f.PHI_CALLS_END)
COHERE = _json_list(f.COHERE_CALLS, f.COHERE_CALLS_END, '{"tool_name": "%s", "parameters": ')
HUNYUAN = _json_list(f.HUNYUAN_CALLS, f.HUNYUAN_CALLS_END)
LFM2 = _marked_list(f.LFM2_CALLS, f.LFM2_CALLS_END)
OLMO3 = _marked_list(f.OLMO_CALLS, f.OLMO_CALLS_END)
TAGGED = {name: _tagged(tags) for name, tags in TAGS.items()}
GEMMA = {name: _gemma(marks) for name, marks in GEMMA_MARKS.items()}

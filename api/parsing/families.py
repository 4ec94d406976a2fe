"""The families of models that call tools: their marks, their readers, their grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from . import call_grammars as g
from . import tool_call_formats as f
from .generic import GENERIC
from .input_buffer import Reading, Source
from .pythonic import PYTHON_END, PYTHON_START, read_pythonic
from .qwen_coder import FUNCTION, read_qwen_coder

if TYPE_CHECKING:
    from ..types.results import Tool

Reader: TypeAlias = Callable[[Source], Reading[None]]


@dataclass(frozen=True, slots=True)
class Family:
    """One way to call tools.

    ``marks``: those that may be tokens of their own. ``clues``: its chat template holds each of
    these; no template tells of a family without any. ``grammar``: by the template and the
    vocabulary, where versions differ.
    """

    marks: tuple[str, ...]
    clues: tuple[str, ...]
    reader: Callable[[Sequence[Tool]], Reader]
    grammar: Callable[[str, Mapping[str, int]], g.CallGrammar]


def _always(reader: Reader) -> Callable[[Sequence[Tool]], Reader]:
    return lambda _: reader


def _names(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.name for tool in tools)


def _qwen_coder(tools: Sequence[Tool]) -> Reader:
    schemas = {tool.name: tool.parameters or {} for tool in tools}
    return partial(read_qwen_coder, schemas=schemas)


def _mistral_grammar(_: str, vocab: Mapping[str, int]) -> g.CallGrammar:
    return g.MISTRAL_ARGS if f.MISTRAL_ARGS in vocab else g.MISTRAL_LIST


def _deepseek_grammar(template: str, _: Mapping[str, int]) -> g.CallGrammar:
    return g.DEEPSEEK_V3 if f.FENCE_BEGIN in template else g.DEEPSEEK_V31


HERMES_MARKS = (f.HERMES_BEGIN, f.HERMES_END)
DEEPSEEK_MARKS = (
    f.DEEPSEEK_CALLS_BEGIN, f.DEEPSEEK_CALLS_END, f.DEEPSEEK_BEGIN, f.DEEPSEEK_END, f.DEEPSEEK_SEP,
)  # fmt: skip
FAMILIES = {  # in the order in which they are looked for: what is more special comes first
    "qwen3-coder": Family(
        HERMES_MARKS, (f.HERMES_BEGIN, FUNCTION), _qwen_coder, lambda *_: g.QWEN_CODER
    ),
    "hermes": Family(HERMES_MARKS, (f.HERMES_BEGIN,), _always(f.read_hermes), lambda *_: g.HERMES),
    "mistral": Family(
        (f.MISTRAL_CALLS, f.MISTRAL_ID, f.MISTRAL_ARGS),
        (f.MISTRAL_CALLS,),
        _always(f.read_mistral),
        _mistral_grammar,
    ),
    "deepseek": Family(
        DEEPSEEK_MARKS, (f.DEEPSEEK_CALLS_BEGIN,), _always(f.read_deepseek), _deepseek_grammar
    ),
    "pythonic": Family(
        (PYTHON_START, PYTHON_END),
        ("[func_name1(",),
        lambda tools: partial(read_pythonic, names=_names(tools)),
        lambda *_: g.PYTHONIC,
    ),
    "llama3": Family(
        (f.PYTHON_TAG,),
        ("<|start_header_id|>", '"parameters"'),
        lambda tools: partial(f.read_llama3, names=_names(tools)),
        lambda *_: g.LLAMA3,
    ),
    GENERIC: Family(HERMES_MARKS, (), _always(f.read_hermes), lambda *_: g.HERMES),
}


def family_of(template: str) -> str:
    """The name of the family whose template this is; "none" without a template.

    A template without tools, or with tools in a format that is not known, gets the generic one.
    """
    if "tools" in template:
        for name, family in FAMILIES.items():
            if family.clues and all(clue in template for clue in family.clues):
                return name
    return GENERIC if template else "none"

"""Tool call formats by model family: delimiters, parsers and grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from . import call_grammars as g
from . import tool_call_formats as f
from .gemma import GemmaMarks, read_gemma
from .generic import GENERIC
from .harmony import CHANNEL, HARMONY, read_harmony
from .harmony import MARKS as HARMONY_MARKS
from .output_parser import Reading, Source
from .pythonic import PYTHON_END, PYTHON_START, read_marked_pythonic, read_pythonic
from .tagged import Tags, read_tagged

if TYPE_CHECKING:
    from ..types.results import Tool

Reader: TypeAlias = Callable[[Source], Reading[None]]


@dataclass(frozen=True, slots=True)
class Family:
    """One format of tool calls.

    ``marks``: those that may be tokens of their own. ``clues``: its chat template holds each of
    these; no template tells of a family without any. ``grammar``: by the template and the
    vocabulary, where versions differ. ``reads_thoughts``: its reader tells them apart, too, whether
    there are tools or not.
    """

    marks: tuple[str, ...]
    clues: tuple[str, ...]
    reader: Callable[[Sequence[Tool]], Reader]
    grammar: Callable[[str, Mapping[str, int]], g.CallGrammar]
    reads_thoughts: bool = False


def _always(reader: Reader) -> Callable[[Sequence[Tool]], Reader]:
    return lambda _: reader


def _names(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.name for tool in tools)


def _tagged(name: str, *clues: str) -> Family:
    tags: Tags = g.TAGS[name]

    def reader(tools: Sequence[Tool]) -> Reader:
        schemas = {tool.name: tool.parameters or {} for tool in tools}
        return partial(read_tagged, tags=tags, schemas=schemas)

    inner = (tags.parameter, *tags.value, tags.value_end) if not tags.function else ()
    return Family((tags.begin, tags.end, *inner), clues, reader, lambda *_: g.TAGGED[name])


def _gemma(name: str) -> Family:
    marks: GemmaMarks = g.GEMMA_MARKS[name]
    reader = _always(partial(read_gemma, marks=marks))
    clues = (marks.begin, marks.quote)
    return Family((marks.begin, marks.end, marks.quote), clues, reader, lambda *_: g.GEMMA[name])


def _json_list(begin: str, end: str, grammar: g.CallGrammar, *clues: str) -> Family:
    marks = (begin, end) if end else (begin,)
    reader = _always(partial(f.read_json_list, begin=begin, end=end))
    return Family(marks, clues or (begin,), reader, lambda *_: grammar)


def _marked_pythonic(begin: str, end: str, grammar: g.CallGrammar) -> Family:
    reader = _always(partial(read_marked_pythonic, begin=begin, end=end))
    return Family((begin, end), (begin,), reader, lambda *_: grammar)


def _mistral_grammar(_: str, vocab: Mapping[str, int]) -> g.CallGrammar:
    return g.MISTRAL_ARGS if f.MISTRAL_ARGS in vocab else g.MISTRAL_LIST


def _deepseek_grammar(template: str, _: Mapping[str, int]) -> g.CallGrammar:
    return g.DEEPSEEK_V3 if f.FENCE_BEGIN in template else g.DEEPSEEK_V31


HERMES_MARKS = (f.HERMES_BEGIN, f.HERMES_END)
DEEPSEEK_MARKS = (
    f.DEEPSEEK_CALLS_BEGIN, f.DEEPSEEK_CALLS_END, f.DEEPSEEK_BEGIN, f.DEEPSEEK_END, f.DEEPSEEK_SEP,
)  # fmt: skip
KIMI_MARKS = (
    f.KIMI_SECTION, f.KIMI_SECTION_END, f.KIMI_CALL, f.KIMI_CALL_END, f.KIMI_ARGUMENTS,
)  # fmt: skip
FAMILIES = {  # in the order in which they are looked for: what is more special comes first
    "harmony": Family(
        HARMONY_MARKS,
        (CHANNEL, "analysis"),
        lambda tools: partial(read_harmony, has_tools=bool(tools)),
        lambda *_: HARMONY,
        reads_thoughts=True,
    ),
    "gemma4": _gemma("gemma4"),
    "function-gemma": _gemma("function-gemma"),
    "minimax": _tagged("minimax", "<invoke name="),
    "seed": _tagged("seed", "<seed:tool_call>"),
    "glm": _tagged("glm", "<arg_key>"),
    "qwen3-coder": _tagged("qwen3-coder", f.HERMES_BEGIN, "<function="),
    "kimi": Family(KIMI_MARKS, (f.KIMI_SECTION,), _always(f.read_kimi), lambda *_: g.KIMI),
    "cohere": _json_list(f.COHERE_CALLS, f.COHERE_CALLS_END, g.COHERE),
    "phi4": _json_list(f.GRANITE_CALLS, f.PHI_CALLS_END, g.PHI4, "<|/tool|>"),
    "granite": _json_list(f.GRANITE_CALLS, "", g.GRANITE),
    "hunyuan": _json_list(f.HUNYUAN_CALLS, f.HUNYUAN_CALLS_END, g.HUNYUAN),
    "lfm2": _marked_pythonic(f.LFM2_CALLS, f.LFM2_CALLS_END, g.LFM2),
    "olmo3": _marked_pythonic(f.OLMO_CALLS, f.OLMO_CALLS_END, g.OLMO3),
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
    """The family of a chat template; "none" without a template.

    A template without tools, or with an unknown format, gets the generic family.
    """
    if "tools" in template:
        for name, family in FAMILIES.items():
            if family.clues and all(clue in template for clue in family.clues):
                return name
    return GENERIC if template else "none"

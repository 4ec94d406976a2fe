"""Tool call formats by model family: delimiters, parsers and grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from . import call_grammars as g
from . import tool_call_formats as f
from .gemma import GemmaMarks, gemma_beginnings
from .generic import GENERIC
from .harmony import CHANNEL, HARMONY, read_harmony
from .harmony import MARKS as HARMONY_MARKS
from .output_parser import Reading, Source
from .pythonic import PYTHON_END, PYTHON_START, PYTHONIC, marked_pythonic
from .reading.answer import Beginning, Where, read_words
from .reading.offers import Offers
from .reading.plain_calls import plain_beginnings
from .tagged import MINIMAX, QWEN_CODER, Tags, function_beginnings, read_block, tagged_beginnings

if TYPE_CHECKING:
    from ..types.results import Tool

Reader: TypeAlias = Callable[[Source], Reading[None]]
WordsReader: TypeAlias = Callable[[Source, Sequence[Beginning], Offers], Reading[None]]


@dataclass(frozen=True, slots=True)
class Family:
    """One format of tool calls.

    ``marks``: those that may be tokens of their own. ``clues``: its chat template holds each of
    these; no template tells of a family without any. ``beginnings``: those of its calls.
    ``grammar``: by the template and the vocabulary, where versions differ. ``read``: reads an
    answer with such calls. ``reads_thoughts``: ``read`` tells thoughts apart, too, whether there
    are tools or not.
    """

    marks: tuple[str, ...]
    clues: tuple[str, ...]
    beginnings: Sequence[Beginning]
    grammar: Callable[[str, Mapping[str, int]], g.CallGrammar]
    read: WordsReader = read_words
    reads_thoughts: bool = False
    with_plain: Sequence[Beginning] = field(init=False)  # and those of calls without marks

    def __post_init__(self) -> None:
        object.__setattr__(self, "with_plain", _with_plain(self.beginnings))

    def reader(self, tools: Sequence[Tool], *, has_form: bool = False) -> Reader:
        """Return a reader of answers. ``has_form``: JSON without marks is content, not a call."""
        beginnings = self.beginnings if has_form else self.with_plain
        offers = Offers(tools)
        return lambda source: self.read(source, beginnings, offers)


def _with_plain(own: Sequence[Beginning]) -> list[Beginning]:
    """Return a format's own beginnings, and those of calls that models write in their place."""
    hermes = Beginning(
        mark=f.HERMES_BEGIN, read=read_block, ends=(f.HERMES_END,), where=Where.LINE,
        is_plain=True, is_sure=False,
    )  # fmt: skip
    functions = [*function_beginnings(QWEN_CODER), *function_beginnings(MINIMAX)]
    return [*own, *functions, *plain_beginnings(own), hermes]


def _tagged(name: str, *clues: str) -> Family:
    tags: Tags = g.TAGS[name]
    inner = (tags.parameter, *tags.value, tags.value_end) if not tags.function else ()
    marks = (tags.begin, tags.end, *inner)
    return Family(marks, clues, tagged_beginnings(tags), lambda *_: g.TAGGED[name])


def _gemma(name: str) -> Family:
    marks: GemmaMarks = g.GEMMA_MARKS[name]
    clues = (marks.begin, marks.quote)
    beginnings = gemma_beginnings(marks)
    all_marks = (marks.begin, marks.end, marks.quote)
    return Family(all_marks, clues, beginnings, lambda *_: g.GEMMA[name])


def _json_list(begin: str, end: str, grammar: g.CallGrammar, *clues: str) -> Family:
    marks = (begin, end) if end else (begin,)
    return Family(marks, clues or (begin,), f.json_list(begin, end), lambda *_: grammar)


def _marked_pythonic(begin: str, end: str, grammar: g.CallGrammar) -> Family:
    return Family((begin, end), (begin,), marked_pythonic(begin, end), lambda *_: grammar)


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
        (),
        lambda *_: HARMONY,
        read_harmony,
        reads_thoughts=True,
    ),
    "gemma4": _gemma("gemma4"),
    "function-gemma": _gemma("function-gemma"),
    "minimax": _tagged("minimax", "<invoke name="),
    "seed": _tagged("seed", "<seed:tool_call>"),
    "glm": _tagged("glm", "<arg_key>"),
    "qwen3-coder": _tagged("qwen3-coder", f.HERMES_BEGIN, "<function="),
    "kimi": Family(KIMI_MARKS, (f.KIMI_SECTION,), f.KIMI, lambda *_: g.KIMI),
    "cohere": _json_list(f.COHERE_CALLS, f.COHERE_CALLS_END, g.COHERE),
    "phi4": _json_list(f.GRANITE_CALLS, f.PHI_CALLS_END, g.PHI4, "<|/tool|>"),
    "granite": _json_list(f.GRANITE_CALLS, "", g.GRANITE),
    "hunyuan": _json_list(f.HUNYUAN_CALLS, f.HUNYUAN_CALLS_END, g.HUNYUAN),
    "lfm2": _marked_pythonic(f.LFM2_CALLS, f.LFM2_CALLS_END, g.LFM2),
    "olmo3": _marked_pythonic(f.OLMO_CALLS, f.OLMO_CALLS_END, g.OLMO3),
    "hermes": Family(HERMES_MARKS, (f.HERMES_BEGIN,), f.HERMES, lambda *_: g.HERMES),
    "mistral": Family(
        (f.MISTRAL_CALLS, f.MISTRAL_ID, f.MISTRAL_ARGS),
        (f.MISTRAL_CALLS,),
        f.MISTRAL,
        _mistral_grammar,
    ),
    "deepseek": Family(DEEPSEEK_MARKS, (f.DEEPSEEK_CALLS_BEGIN,), f.DEEPSEEK, _deepseek_grammar),
    "pythonic": Family(
        (PYTHON_START, PYTHON_END),
        ("[func_name1(",),
        PYTHONIC,
        lambda *_: g.PYTHONIC,
    ),
    "llama3": Family(
        (f.PYTHON_TAG,),
        ("<|start_header_id|>", '"parameters"'),
        f.LLAMA3,
        lambda *_: g.LLAMA3,
    ),
    GENERIC: Family(HERMES_MARKS, (), f.HERMES, lambda *_: g.HERMES),
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

"""The formats of tool calls by name; their files are in `formats/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from .family import Family
from .formats.apertus import APERTUS_FAMILY
from .formats.deepseek import DEEPSEEK_FAMILY
from .formats.dsml import DSML_FAMILY, GCML_FAMILY
from .formats.gemma import FUNCTION_GEMMA_FAMILY, GEMMA4_FAMILY
from .formats.generic import GENERIC, GENERIC_FAMILY
from .formats.gigachat import GIGACHAT31_FAMILY, GIGACHAT_FAMILY
from .formats.harmony import HARMONY_FAMILY
from .formats.hermes import HERMES_BEGIN, HERMES_END, HERMES_FAMILY
from .formats.json_list import COHERE_FAMILY, GRANITE_FAMILY, HUNYUAN_FAMILY, PHI4_FAMILY
from .formats.kimi import KIMI_FAMILY
from .formats.kimi_k3 import KIMI_K3_FAMILY
from .formats.llama3 import LLAMA3_FAMILY
from .formats.minimax_m3 import MINIMAX_M3_FAMILY
from .formats.mistral import MISTRAL_FAMILY
from .formats.muse import MUSE_FAMILY
from .formats.pythonic import LFM2_FAMILY, OLMO3_FAMILY, PYTHONIC_FAMILY
from .formats.tagged import (
    GLM_FAMILY,
    MINIMAX,
    MINIMAX_FAMILY,
    QWEN_CODER,
    QWEN_CODER_FAMILY,
    SEED_FAMILY,
    function_beginnings,
    read_block,
)
from .formats.xlam import XLAM_FAMILY
from .output_parser import Reading, Source
from .reading.answer import Beginning, Where
from .reading.offers import Offers
from .reading.plain_calls import plain_beginnings

if TYPE_CHECKING:
    from ..types.results import Tool

Reader: TypeAlias = Callable[[Source], Reading[None]]
# Sorted for the search: a format whose clues include another's comes first.
FAMILIES: dict[str, Family] = {
    "harmony": HARMONY_FAMILY,
    "gemma4": GEMMA4_FAMILY,
    "function-gemma": FUNCTION_GEMMA_FAMILY,
    "minimax-m3": MINIMAX_M3_FAMILY,
    "muse": MUSE_FAMILY,
    "deepseek-dsml": DSML_FAMILY,
    "gigachat-gcml": GCML_FAMILY,
    "gigachat3.1": GIGACHAT31_FAMILY,
    "gigachat": GIGACHAT_FAMILY,
    "kimi-k3": KIMI_K3_FAMILY,
    "apertus": APERTUS_FAMILY,
    "xlam": XLAM_FAMILY,
    "minimax": MINIMAX_FAMILY,
    "seed": SEED_FAMILY,
    "glm": GLM_FAMILY,
    "qwen3-coder": QWEN_CODER_FAMILY,
    "kimi": KIMI_FAMILY,
    "cohere": COHERE_FAMILY,
    "phi4": PHI4_FAMILY,
    "granite": GRANITE_FAMILY,
    "hunyuan": HUNYUAN_FAMILY,
    "lfm2": LFM2_FAMILY,
    "olmo3": OLMO3_FAMILY,
    "hermes": HERMES_FAMILY,
    "mistral": MISTRAL_FAMILY,
    "deepseek": DEEPSEEK_FAMILY,
    "pythonic": PYTHONIC_FAMILY,
    "llama3": LLAMA3_FAMILY,
    GENERIC: GENERIC_FAMILY,
}


def reader_of(
    family: Family, tools: Sequence[Tool], *, has_form: bool = False, prompt_tail: str = ""
) -> Reader:
    """Return a reader of a family's answers.

    ``has_form``: the answer is structured output in JSON, so that JSON without delimiters is
    content. ``prompt_tail``: the end of the prompt.
    """
    offers = Offers(tools)
    beginnings = family.beginnings if has_form else _with_plain(family)
    read = family.read if family.read_after is None else family.read_after(prompt_tail)
    return lambda source: read(source, beginnings, offers)


@cache
def _with_plain(family: Family) -> list[Beginning]:
    """Return the beginnings of a format's calls, and of calls that models often write instead."""
    own = family.beginnings
    hermes = Beginning(
        mark=HERMES_BEGIN, read=read_block, ends=(HERMES_END,), where=Where.LINE,
        is_plain=True, is_sure=False,
    )  # fmt: skip
    functions = [*function_beginnings(QWEN_CODER), *function_beginnings(MINIMAX)]
    return [*own, *functions, *plain_beginnings(own), hermes]


def family_of(template: str) -> str:
    """Return the family of a chat template; "none" without a template.

    A template without tools, or with an unknown format, gets the generic family.
    """
    if "tools" in template:
        for name, family in FAMILIES.items():
            if family.clues and all(clue in template for clue in family.clues):
                return name
    return GENERIC if template else "none"

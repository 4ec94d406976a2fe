"""DeepSeek V3.2 and V4, GigaChat 3.5: tags whose names begin with a token, and typed parameters.

``<｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>``; V3.2
encloses all calls in ``function_calls``, the others in ``tool_calls``. Sources: the chat templates
that llama.cpp publishes for these models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..call_grammars import CallGrammar, Marked, several
from ..family import Family
from ..grammars import Lark
from ..reading.offers import KINDS
from .tagged import NAME, Tags, tagged_arguments, tagged_beginnings

if TYPE_CHECKING:
    from ...types.results import Tool

DSML, GCML = "｜DSML｜", "｜GCML｜"
_TYPES = {**dict.fromkeys(sorted(KINDS), 'string="false"'), "string": 'string="true"'}


def _tags(token: str, block: str) -> Tags:
    """Return the tags with a token in their names; ``block`` is the tag around all calls."""
    return Tags(
        begin=f"<{token}{block}>", end=f"</{token}{block}>",
        function=f'<{token}invoke name="', named=">", quote='"',
        function_end=f"</{token}invoke>",
        parameter=f'<{token}parameter name="', value=(">",), value_end=f"</{token}parameter>",
        name=NAME, argument=NAME, types=_TYPES,
    )  # fmt: skip


V32_BLOCK, BLOCK = "function_calls", "tool_calls"
DSML_V32, DSML_V4, GCML_TAGS = _tags(DSML, V32_BLOCK), _tags(DSML, BLOCK), _tags(GCML, BLOCK)


def _grammar(tags: Tags) -> Marked:
    def block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        def written(tool: Tool) -> str:
            begin = lark.mark(f"{tags.function}{tool.name}{tags.quote}{tags.named}\n")
            inside = tagged_arguments(lark, tool, tools.index(tool), tags)
            return f"{begin} {inside} {lark.mark(tags.function_end)}"

        call = lark.rule("inner", lark.each(tools, written))
        calls = several(call, "\n", parallel=parallel)
        return f'"\\n" {calls} "\\n" {lark.mark(tags.end)}'

    return Marked(tags.begin, block, repeats=False)


V32_GRAMMAR, V4_GRAMMAR, GCML_GRAMMAR = map(_grammar, (DSML_V32, DSML_V4, GCML_TAGS))


def _dsml(template: str, _: Mapping[str, int]) -> CallGrammar:
    return V32_GRAMMAR if f"{V32_BLOCK}>" in template else V4_GRAMMAR


DSML_FAMILY = Family(
    (DSML,),
    (DSML,),
    (*tagged_beginnings(DSML_V4), tagged_beginnings(DSML_V32)[0]),
    _dsml,
)
GCML_FAMILY = Family(
    (GCML,),
    (GCML,),
    tagged_beginnings(GCML_TAGS),
    lambda *_: GCML_GRAMMAR,
)

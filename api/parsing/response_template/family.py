"""The format of tool calls that a checkpoint's response template describes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import regex

from ....core.errors import InvalidRequest
from ..call_grammars import CallGrammar, Marked, between, several
from ..family import Family
from ..grammars import Lark
from ..output_parser import Reading, Source
from ..reading.answer import Beginning
from ..reading.offers import Offers
from ..reasoning import Thinking
from .reader import TemplateReader
from .sinks import json_keys
from .spec import Field, Kind, ResponseTemplate, UnusableTemplate, load

if TYPE_CHECKING:
    from ...types.results import Tool

RESPONSE_TEMPLATE = "response-template"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """The format of calls of a response template, and the delimiters around a thought.

    ``thinking`` is None if the template has no thought, or if its delimiters are patterns.
    """

    family: Family
    thinking: Thinking | None


def template_format(
    spec: object, special: Collection[str], other: Family | None
) -> TemplateFormat | None:
    """Return the format of a checkpoint's response template; None, with a log line, if unusable.

    ``special``: the special tokens of the vocabulary. ``other``: the format that the chat template
    has; its grammar forces calls if the response template does not say how calls are written.
    """
    try:
        template = load(spec)
    except UnusableTemplate as error:
        logger.warning("not using the model's response_template: %s", error)
        return None
    marks = _marks(template, special)
    family = Family(
        marks,
        (),
        (),
        partial(_grammar, field=_field(template, Kind.CALLS), other=other),
        reads_thoughts=True,
        read_after=lambda tail: partial(_read, template=template, prefix=template.prefix(tail)),
    )
    return TemplateFormat(family, _thinking(template))


def _read(
    source: Source,
    beginnings: Sequence[Beginning],
    offers: Offers,
    *,
    template: ResponseTemplate,
    prefix: str,
) -> Reading[None]:
    return TemplateReader(template, beginnings, offers, prefix).read(source)


def _field(template: ResponseTemplate, kind: Kind) -> Field | None:
    return next((field for field in template.fields if field.kind is kind), None)


def _marks(template: ResponseTemplate, special: Collection[str]) -> tuple[str, ...]:
    """Return the special tokens in delimiters, and the literal delimiters."""
    texts = [
        _unescaped(delimiter.pattern.pattern)
        for field in template.fields
        for delimiter in (field.open, field.close)
        if delimiter is not None
    ]
    texts += [
        mark
        for field in template.fields
        for pair in field.args.get("string_delims", ())
        for mark in pair
    ]
    texts += [_unescaped(field.args.get("tag_pattern", "")) for field in template.fields]
    literals = [
        text
        for field in template.fields
        for delimiter in (field.open, field.close)
        for text in (() if delimiter is None else delimiter.literals)
    ]
    tokens = [token for token in special if any(token in text for text in texts)]
    return tuple(dict.fromkeys([*tokens, *literals]))


def _unescaped(pattern: str) -> str:
    return str(regex.sub(r"\\(\W)", r"\1", pattern))


def _thinking(template: ResponseTemplate) -> Thinking | None:
    field = _field(template, Kind.REASONING)
    if field is None or field.open is None or field.close is None:
        return None
    begin, end = field.open.literals, field.close.literals
    return Thinking(begin[0], end[0]) if begin and end else None


# -- grammars -------------------------------------------------------------------------------------


def _grammar(
    template: str, vocab: Mapping[str, int], *, field: Field | None, other: Family | None
) -> CallGrammar:
    """Return the grammar of the calls that ``field`` describes, otherwise ``other``'s grammar."""
    own = None if field is None else _of_field(field)
    if own is not None:
        return own
    return _NoGrammar() if other is None else other.grammar(template, vocab)


def _of_field(field: Field) -> CallGrammar | None:
    keys = json_keys(field)
    ends = () if field.close is None else field.close.literals
    if keys is None or field.content != "json" or field.args or field.open is None:
        return None
    if not field.open.literals or (field.close is not None and not ends):
        return None
    each, end = between(f'{{"{keys[0]}": "%s", "{keys[1]}": ', "}"), ends[0] if ends else ""

    def block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        one = lark.each(tools, each)
        if field.transform_each:
            one = f'"[" {several(one, ", ", parallel=parallel)} "]"'
        return f"{one} {lark.mark(end)}" if end else one

    return Marked(field.open.literals[0], block, repeats=bool(end) and not field.transform_each)


class _NoGrammar:
    """Grammar of calls in an unknown format: it raises `InvalidRequest`."""

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Raise `InvalidRequest`."""
        del lark, tools, parallel
        raise InvalidRequest(
            "tools: calls cannot be forced or strict, because the model's response_template does "
            "not say how they are written; name a format with --tool-parser",
            param="tools",
        )

    mixed: Any = calls

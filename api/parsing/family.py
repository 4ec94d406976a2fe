"""Family: one format of tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .call_grammars import CallGrammar
from .output_parser import Reading, Source
from .reading.answer import Beginning, read_words
from .reading.offers import Offers

WordsReader: TypeAlias = Callable[[Source, Sequence[Beginning], Offers], Reading[None]]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Prepare: TypeAlias = Callable[[Messages], Messages]


def as_they_are(messages: Messages) -> Messages:
    """Return the messages."""
    return messages


@dataclass(frozen=True, slots=True)
class Family:
    """One format of tool calls.

    ``marks``: those that may be tokens of their own. ``clues``: its chat template holds each of
    these; no template tells of a family without any. ``beginnings``: those of its calls.
    ``grammar``: by the template and the vocabulary, where versions differ. ``read``: reads an
    answer with such calls. ``reads_thoughts``: ``read`` tells thoughts apart, too, whether there
    are tools or not. ``prepare``: changes earlier messages, of which its chat template wants ids or
    thoughts in a form of its own.
    """

    marks: tuple[str, ...]
    clues: tuple[str, ...]
    beginnings: Sequence[Beginning]
    grammar: Callable[[str, Mapping[str, int]], CallGrammar]
    read: WordsReader = read_words
    reads_thoughts: bool = False
    prepare: Prepare = as_they_are

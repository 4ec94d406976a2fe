"""Family: one format of tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .call_grammars import CallGrammar
from .grammars import Lark
from .output_parser import Reading, Source
from .reading.answer import Beginning, read_content
from .reading.offers import Offers
from .reasoning import Thinking

ContentReader: TypeAlias = Callable[[Source, Sequence[Beginning], Offers], Reading[None]]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Prepare: TypeAlias = Callable[[Messages], Messages]


def as_they_are(messages: Messages) -> Messages:
    """Return the messages unchanged."""
    return messages


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One format of tool calls.

    ``marks``: delimiters that may be single tokens. ``clues``: texts that all occur in the format's
    chat templates; an empty tuple matches no template. ``beginnings``: the ways in which a call
    begins. ``grammar``: returns the grammar for a chat template and a vocabulary, because versions
    of a format differ. ``read``: reads an answer that may contain calls. ``reads_thoughts``:
    whether ``read`` also separates reasoning from other text, with or without tools. ``reads_all``:
    whether ``read`` also reads answers without tools, after a thought. ``thinking``: the delimiters
    around a thought, if the chat template does not show them. ``around``: returns the rule of
    structured output with what the format writes around content. ``read_after``: returns the
    reader, in place of ``read``, for a prompt that ends with a text. ``prepare``: changes the call
    ids or the reasoning of earlier messages as the chat template requires.
    """

    marks: tuple[str, ...]
    clues: tuple[str, ...]
    beginnings: Sequence[Beginning]
    grammar: Callable[[str, Mapping[str, int]], CallGrammar]
    read: ContentReader = read_content
    reads_thoughts: bool = False
    reads_all: bool = False
    thinking: Thinking | None = None
    around: Callable[[Lark, str], str] | None = None
    read_after: Callable[[str], ContentReader] | None = None
    prepare: Prepare = as_they_are

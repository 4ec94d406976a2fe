"""Versions of the weights that computed an answer."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from ....core.engine.rollouts.versions import VersionedUsage
from ...runtime.generation import EndedChoice


class TokenSpan(Struct, kw_only=True):
    """Tokens of a choice, from number ``start`` to the next span, and the version of the weights.

    Tokens of a later span may attend to KV of earlier versions.
    """

    start: int
    version: str


class ChoiceVersions(Struct, kw_only=True):
    """Versions of the weights that computed a choice, in order.

    A span without tokens means that its version computed a part of the prompt.
    """

    index: int
    spans: list[TokenSpan]


class AnswerVersions(Struct, kw_only=True):
    """Versions of an answer. ``weight_version``: the newest that computed a token of it."""

    weight_version: str
    weight_versions: list[ChoiceVersions]


def versions_of(choices: Iterable[EndedChoice]) -> AnswerVersions:
    """Return the versions of an answer that was read to its end."""
    found, newest, version = list[ChoiceVersions](), -1, ""
    for choice in choices:
        usage = choice.request.usage
        assert isinstance(usage, VersionedUsage), "the engine of this server makes them"
        spans = [
            TokenSpan(start=each.start, version=each.version) for each in usage.weight_versions
        ]
        num_updates = usage.num_updates
        while len(spans) > 1 and spans[-1].start >= usage.completion_tokens > 0:
            spans.pop()  # the answer ended before this version computed a token
            num_updates -= 1
        found.append(ChoiceVersions(index=choice.number, spans=spans))
        if num_updates > newest:
            newest, version = num_updates, spans[-1].version
    return AnswerVersions(weight_version=version, weight_versions=found)

"""Versions of the weights: the versions that computed the tokens of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...interface.request import Request, Usage

FIRST_VERSION = "0"  # version of the weights with which the engine starts


class VersionSpan(NamedTuple):
    """Tokens of an answer, from number ``start`` to the next span, and their ``version``."""

    start: int
    version: str


@dataclass(slots=True, kw_only=True)
class VersionedUsage(Usage):
    """Usage that lists the versions of the weights which computed the answer.

    In an answer with several spans, the tokens of a later span may attend to KV of earlier
    versions. A span without tokens means that its version computed a part of the prompt.
    """

    weight_versions: list[VersionSpan]
    num_updates: int  # number of updates before the version of the last span
    # Computed tokens, preemptions and output tokens of the request when the last span began.
    work: tuple[int, int, int] = (0, 0, 0)


def begin_spans(request: Request, version: str, num_updates: int) -> None:
    """Give a new request a usage that lists versions, and begin its first span."""
    spans = [VersionSpan(0, version)]
    request.usage = VersionedUsage(weight_versions=spans, num_updates=num_updates)


def begin_span(request: Request, version: str, num_updates: int) -> None:
    """Begin a span of ``version`` at the next token of a request that has not ended."""
    usage = request.usage
    assert isinstance(usage, VersionedUsage), "the engine made it when the request was submitted"
    work = (request.num_computed, request.num_preemptions, request.num_output)
    if usage.work == work:  # the last version computed nothing
        usage.weight_versions.pop()
    usage.weight_versions.append(VersionSpan(request.num_output, version))
    usage.num_updates, usage.work = num_updates, work

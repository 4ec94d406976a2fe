"""Tool calls of an answer, for APIs that send each call in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ...core.errors import ForetokenError
from ..runtime.segments import Change, Close
from ..types.results import ToolCall


class WholeCall(NamedTuple):
    """A tool call with parsed arguments."""

    id: str
    name: str
    arguments: dict[str, Any]


def closed_calls(changes: Iterable[Change]) -> Iterator[WholeCall]:
    """Yield the tool calls that a step has completed, given the changes of its segments."""
    closed = [each.segment for each in changes if isinstance(each, Close) and each.is_complete]
    return whole_calls([segment.call for segment in closed if segment.kind == "call"])


def whole_calls(calls: Iterable[ToolCall]) -> Iterator[WholeCall]:
    """Yield the calls with parsed arguments. A truncated call, whose arguments do not parse, is
    left out.
    """
    for call in calls:
        try:
            arguments = call.parsed()
        except ForetokenError:
            continue
        yield WholeCall(call.id, call.name, arguments)

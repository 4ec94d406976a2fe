"""Calls of an answer for APIs that send a call in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ...core.errors import ForetokenError
from ..runtime.segments import Change, Close
from ..types.results import ToolCall


class WholeCall(NamedTuple):
    """A call with its arguments as an object."""

    id: str
    name: str
    arguments: dict[str, Any]


def closed_calls(changes: Iterable[Change]) -> Iterator[WholeCall]:
    """Yield the calls that these changes complete."""
    closed = [each.segment for each in changes if isinstance(each, Close) and each.is_whole]
    return whole_calls([segment.call for segment in closed if segment.kind == "call"])


def whole_calls(calls: Iterable[ToolCall]) -> Iterator[WholeCall]:
    """Yield calls. One whose arguments are no object, because the answer was cut, is left out."""
    for call in calls:
        try:
            arguments = call.parsed()
        except ForetokenError:
            continue
        yield WholeCall(call.id, call.name, arguments)

"""WholeCalls: calls of an answer for APIs that send a call in one piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...core.errors import ForetokenError
from ..types.results import CallDelta, ToolCall


class WholeCall(NamedTuple):
    """A call with its arguments as an object."""

    id: str
    name: str
    arguments: dict[str, Any]


class WholeCalls:
    """Puts the deltas of calls together, of one choice."""

    def __init__(self) -> None:
        self._open: dict[int, ToolCall] = {}  # by index

    def take(self, deltas: Sequence[CallDelta]) -> Iterator[WholeCall]:
        """Yield the calls that these deltas complete."""
        for delta in deltas:
            new = ToolCall(id=delta.id, name=delta.name, arguments="")
            call = self._open.setdefault(delta.index, new)
            call.arguments += delta.arguments
            if delta.is_done:
                yield from whole_calls([self._open.pop(delta.index)])


def whole_calls(calls: Sequence[ToolCall]) -> Iterator[WholeCall]:
    """Yield calls. One whose arguments are no object, because the answer was cut, is left out."""
    for call in calls:
        try:
            arguments = call.parsed()
        except ForetokenError:
            continue
        yield WholeCall(call.id, call.name, arguments)

"""ReadyCalls: events that say that a call is complete while the answer goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from ...serving.sse import named_event
from ...types.results import Choice, TextDelta, ToolCall
from .answers import CallBody


class ReadyCall(Struct, tag="tool_call.ready", kw_only=True):
    """Event of a complete call in a stream, for clients that asked for it."""

    choice: int  # index of the choice
    tool_call: CallBody  # the whole call, with its index


class ReadyCalls:
    """The calls of a stream, and an event for each one as soon as its arguments are complete.

    ``write`` returns the body of a whole call.
    """

    def __init__(self, write: Callable[[ToolCall], CallBody]) -> None:
        self._write = write
        self._choices: dict[int, Choice] = {}

    def read(self, delta: TextDelta) -> Iterator[bytes]:
        """Yield the events of the calls that a delta completes."""
        if not delta.tool_calls:
            return
        choice = self._choices.setdefault(delta.index, Choice(index=delta.index))
        choice.add(TextDelta(index=delta.index, tool_calls=delta.tool_calls))
        for call in delta.tool_calls:
            if call.is_done:
                body = self._write(choice.tool_calls[call.index])
                body.index = call.index
                yield named_event(ReadyCall(choice=delta.index, tool_call=body))

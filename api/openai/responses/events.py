"""A response as events, numbered from 0."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

import msgspec

from ...runtime.chat import Turn
from ...serving.errors import ApiError, to_api_error
from ...types.results import Body
from .answer import ResponseWriter

logger = logging.getLogger(__name__)
CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # what clients know, but for the rest


class Numbered:
    """Encodes events one after the other."""

    def __init__(self) -> None:
        self._next = 0

    def encode(self, events: Iterable[Body]) -> bytes:
        """All of them for one write."""
        return b"".join([self._one(event) for event in events])

    def begin(self, response: Body) -> bytes:
        """How every stream begins."""
        kinds = ("response.created", "response.in_progress")
        return self.encode({"type": kind, "response": response} for kind in kinds)

    def end(self, response: Body) -> bytes:
        """How every stream ends."""
        return self.encode([{"type": f"response.{response['status']}", "response": response}])

    def _one(self, event: Body) -> bytes:
        number, self._next = self._next, self._next + 1
        data = msgspec.json.encode({**event, "sequence_number": number})
        return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), data)


def all_at_once(begun: Body, finished: Body) -> bytes:
    """A stream of a response without output."""
    numbered = Numbered()
    return numbered.begin(begun) + numbered.end(finished)


class ResponseEvents:
    """Writes one answer as a stream. ``finished`` is told of the response before its last event."""

    def __init__(self, writer: ResponseWriter, finished: Callable[[Body], None]) -> None:
        self._writer = writer
        self._finished = finished

    async def stream(self, turn: Turn) -> AsyncGenerator[bytes]:
        """Everything; what a step adds is sent at once.

        The stream begins before the prompt is read. An error after that is a response that
        failed: an event of its own would leave clients without an end.
        """
        numbered = Numbered()
        yield numbered.begin(self._writer.begun())
        try:
            async with aclosing(turn.deltas()) as deltas:
                async for delta in deltas:
                    events = self._writer.add(turn, delta)
                    if events:
                        yield numbered.encode(events)
            last = self._writer.finished(turn)
            self._finished(last)
        except Exception as error:
            last = self._writer.failed(turn, error_body(error))
        yield numbered.end(last)


def error_body(error: Exception) -> Body:
    """``error`` of a response; its code is one of a closed list."""
    answer: ApiError = to_api_error(error)
    if answer.status == 500:
        logger.error("a stream failed", exc_info=error)
    code = CODES.get(answer.status, "server_error")
    return {"code": code, "message": str(answer), "type": answer.kind, "param": answer.param}

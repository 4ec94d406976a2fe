"""A response as events, numbered from 0."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from ...runtime.chat import ChatAnswer
from ...serving.errors import ApiError, to_api_error
from ...serving.sse import ReadyReply, Reply, named_event
from .answers import (
    ENDINGS,
    Event,
    ResponseBody,
    ResponseCreated,
    ResponseError,
    ResponseInProgress,
)
from .writing import ResponseWriter

logger = logging.getLogger(__name__)
CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # what clients know, but for the rest


class Numbered:
    """Encodes events one after the other."""

    def __init__(self) -> None:
        self._next = 0

    def encode(self, events: Iterable[Event]) -> bytes:
        """All events as bytes for one write."""
        return b"".join([self._one(event) for event in events])

    def begin(self, response: ResponseBody) -> bytes:
        """The events that begin every stream."""
        kinds = (ResponseCreated, ResponseInProgress)
        return self.encode([kind(response=response) for kind in kinds])

    def end(self, response: ResponseBody) -> bytes:
        """The event that ends every stream."""
        return self.encode([ENDINGS[response.status](response=response)])

    def _one(self, event: Event) -> bytes:
        event.sequence_number, self._next = self._next, self._next + 1
        return named_event(event)


def ready_reply(writer: ResponseWriter, response: ResponseBody) -> Reply:
    """A response without output."""
    numbered = Numbered()
    return ReadyReply(response, [numbered.begin(writer.begun()) + numbered.end(response)])


class ResponseReply(Reply):
    """One answer. ``keep`` is called with the complete response before its last event."""

    def __init__(
        self, writer: ResponseWriter, answer: ChatAnswer, keep: Callable[[ResponseBody], None]
    ) -> None:
        self._writer, self._answer, self._keep = writer, answer, keep

    async def whole(self) -> object:
        """Write the answer as one body."""
        response = await self._writer.collect(self._answer)
        self._keep(response)
        return response

    async def events(self) -> AsyncGenerator[bytes]:
        """Write the answer as events; each step is sent at once.

        The stream begins before the prompt is read. An error after that is a response that
        failed: an event of its own would leave clients without an end.
        """
        numbered, answer = Numbered(), self._answer
        yield numbered.begin(self._writer.begun())
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    events = self._writer.add(answer, delta)
                    if events:
                        yield numbered.encode(events)
            last = self._writer.finished(answer)
            self._keep(last)
        except Exception as error:
            last = self._writer.failed(answer, response_error(error))
        yield numbered.end(last)

    def close(self) -> None:
        """Abort what still runs."""
        self._answer.close()


def response_error(error: Exception) -> ResponseError:
    """``error`` of a response; its code is one of a closed list."""
    answer: ApiError = to_api_error(error)
    if answer.status == 500:
        logger.error("a stream failed", exc_info=error)
    code = CODES.get(answer.status, "server_error")
    return ResponseError(code=code, message=str(answer), type=answer.kind, param=answer.param)

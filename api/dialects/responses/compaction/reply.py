"""Replies to requests that compact their conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing

from msgspec.structs import replace

from .....core.interface.request import Usage
from ....runtime.chat import ChatAnswer
from ....serving.answers import AnswerReply
from ....serving.caching.breakpoints import Breakpoints
from ....serving.prices import total_cost
from ....serving.serving_context import Service
from ....serving.sse import Reply
from ..answers import (
    Compacting,
    CompactionItem,
    Event,
    ItemAdded,
    ItemDone,
    OutputEvent,
    ResponseBody,
    ResponseStatus,
)
from ..writing import ResponseWriter, response_error
from .compactor import Compaction
from .sealed import new_id


class CompactingWriter(ResponseWriter):
    """Writes a response whose first output item is a compaction item."""

    _item = CompactionItem(id="")
    _compaction: Compaction | None = None

    def compacting(self, *, is_triggered: bool) -> bytes:
        """Return the events that begin the compaction item.

        ``is_triggered``: the input ends with a ``compaction_trigger``. Only such streams have the
        event that announces the summary, because clients may reject it in others.
        """
        self._item = CompactionItem(id=new_id())
        events: list[Event] = [ItemAdded(output_index=0, item=self._item)]
        if is_triggered:
            events.append(Compacting(output_index=0, item_id=self._item.id))
        return b"".join(super()._encoded(events))

    def compacted(self, compaction: Compaction) -> bytes:
        """Return the event that ends the compaction item."""
        self._compaction = compaction
        self._item = replace(compaction.item, id=self._item.id or compaction.item.id)
        return b"".join(super()._encoded([ItemDone(output_index=0, item=self._item)]))

    def pinned(self, breakpoints: Breakpoints | None) -> None:
        """Set the breakpoints of the shorter conversation, for its usage."""
        self._breakpoints = breakpoints

    def alone(self) -> ResponseBody:
        """Return the complete response, whose only output is the compaction item."""
        usage = Usage() if self._compaction is None else self._compaction.spent
        response = self._ended("completed", usage)
        self._keep(response, ())
        return response

    def _encoded(self, events: Iterable[Event]) -> Iterator[bytes]:
        moved = list(events)
        for event in moved:
            if isinstance(event, OutputEvent):
                event.output_index += 1
        return super()._encoded(moved)

    def _ended(self, status: ResponseStatus, usage: Usage) -> ResponseBody:
        response = super()._ended(status, usage)
        if self._compaction is None:
            return response
        if response.usage is not None:
            response.usage.compaction = self._compaction.usage
            if usage is not self._compaction.spent:
                summary = self._service.cost(self._compaction.spent)
                response.usage.cost = total_cost(response.usage.cost, summary)
        return replace(response, output=[self._item, *response.output])


class CompactingReply(Reply):
    """A reply that first compacts the conversation; the client may leave during the compaction.

    ``proceed`` submits the shorter conversation; if it is None, the compaction item is the only
    output.
    """

    def __init__(
        self,
        service: Service,
        writer: CompactingWriter,
        compact: Callable[[], Awaitable[Compaction]],
        proceed: Callable[[Compaction], Awaitable[ChatAnswer]] | None,
    ) -> None:
        self._service, self._writer = service, writer
        self._compact, self._proceed = compact, proceed
        self._answer: ChatAnswer | None = None

    @property
    def name(self) -> str:
        """The id of the response: its events have sequence numbers."""
        return self._writer.id

    async def whole(self) -> object:
        """Compact the conversation, read the answer and return the response."""
        compaction = await self._compact()
        self._writer.compacted(compaction)
        reply = await self._reply(compaction)
        return self._writer.alone() if reply is None else await reply.whole()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events. An error is sent as a failed response, as in other streams."""
        writer = self._writer
        yield writer.begun()
        yield writer.compacting(is_triggered=self._proceed is None)
        try:
            compaction = await self._compact()
            yield writer.compacted(compaction)
            reply = await self._reply(compaction)
            if reply is None:
                yield b"".join(writer.ended(writer.alone()))
                return
            async with aclosing(reply.events()) as events:
                async for each in events:
                    yield each
        except Exception as error:
            usage = Usage() if self._answer is None else self._answer.usage
            yield b"".join(writer.failed(usage, response_error(error)))

    def close(self) -> None:
        """Abort the answer if it still runs."""
        if self._answer is not None:
            self._answer.close()

    async def _reply(self, compaction: Compaction) -> AnswerReply[ChatAnswer] | None:
        if self._proceed is None:
            return None
        self._answer = await self._proceed(compaction)
        return AnswerReply(self._service, self._writer, self._answer)

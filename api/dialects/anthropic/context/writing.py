"""Answers to requests with context management, and replies that begin with a compaction."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec.structs import replace

from .....core.interface.request import Usage
from ....runtime.chat import ChatAnswer
from ....serving.prices import total_cost
from ....serving.sse import ReadyReply, Reply, named_event
from ..answers import (
    AppliedEdit,
    BlockDelta,
    BlockStart,
    BlockStop,
    CompactionAddition,
    CompactionContent,
    ContentBlock,
    ContextReport,
    Ending,
    Iteration,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    StreamEvent,
)
from ..blocks import Blocks
from ..writing import MessageWriter

PAUSED = Ending(stop_reason="compaction")


@dataclass(frozen=True, slots=True, kw_only=True)
class Managed:
    """The results of context management that an answer reports.

    ``edits``: edits in its field ``context_management``; None if it has no such field. ``block``:
    its compaction block, if there is one. ``spent``: usage of the request that wrote the summary.
    """

    edits: Sequence[AppliedEdit] | None = None
    block: CompactionContent | None = None
    spent: Usage = field(default_factory=Usage)


@dataclass(slots=True, kw_only=True)
class ManagedWriter(MessageWriter):
    """Writes an answer with its compaction block, if there is one, and with the edits."""

    managed: Managed

    def __post_init__(self) -> None:
        first = 0 if self.managed.block is None else 1
        self._blocks = Blocks(shows_thoughts=self.shows_thoughts, first=first)

    def begin(self, answer: ChatAnswer) -> Iterator[bytes]:
        """Yield the first event and the events of the compaction block."""
        yield from MessageWriter.begin(self, answer)
        yield from map(named_event, self._compaction())

    def alone(self) -> Reply:
        """Return an answer whose only content is the compaction block."""
        end, stop = self._ending(PAUSED, Usage())
        start = MessageStart(message=self._message(Usage()))
        events = [start, *self._compaction(), end, stop]
        return ReadyReply(self._ended(PAUSED, Usage(), []), map(named_event, events))

    def usage(self, usage: Usage, *, is_start: bool = False) -> MessageUsage:
        """Return ``usage``; its ``iterations`` and cost include the request for a summary."""
        found = MessageWriter.usage(self, usage, is_start=is_start)
        if self.managed.block is not None:
            spent = MessageWriter.usage(self, self.managed.spent, is_start=True)
            spent.output_tokens = self.managed.spent.completion_tokens
            spent.input_tokens += spent.cache_creation_input_tokens
            # The request for the summary has no breakpoints, so it counts no cache writes.
            spent.cache_creation_input_tokens = 0
            found.cost = total_cost(found.cost, self.service.cost(self.managed.spent, 0))
            found.iterations = [_iteration("compaction", spent)]
            if usage.prompt_tokens:
                found.iterations.append(_iteration("message", found))
        return found

    def _compaction(self) -> list[StreamEvent]:
        """Return the events of the compaction block."""
        block = self.managed.block
        if block is None:
            return []
        delta = CompactionAddition(content=block.content, encrypted_content=block.encrypted_content)
        return [
            BlockStart(index=0, content_block=CompactionContent(signature=block.signature)),
            BlockDelta(index=0, delta=delta),
            BlockStop(index=0),
        ]

    def _ending(self, end: Ending, usage: Usage) -> tuple[MessageDelta, MessageStop]:
        delta, stop = MessageWriter._ending(self, end, usage)
        if self.managed.edits is not None:
            delta.context_management = ContextReport(applied_edits=list(self.managed.edits))
        return delta, stop

    def _ended(self, end: Ending, usage: Usage, content: list[ContentBlock]) -> MessageAnswer:
        block, edits = self.managed.block, self.managed.edits
        blocks = content if block is None else [block, *content]
        message = MessageWriter._ended(self, end, usage, blocks)
        if edits is None:
            return message
        return replace(message, context_management=ContextReport(applied_edits=list(edits)))


def _iteration(kind: str, usage: MessageUsage) -> Iteration:
    return Iteration(
        type="compaction" if kind == "compaction" else "message",
        input_tokens=usage.input_tokens,
        cache_creation_input_tokens=usage.cache_creation_input_tokens,
        cache_read_input_tokens=usage.cache_read_input_tokens,
        output_tokens=usage.output_tokens,
    )


class DeferredReply(Reply):
    """A reply that ``begin`` returns once it is read; the client may leave before that."""

    def __init__(self, begin: Callable[[], Awaitable[Reply]]) -> None:
        self._begin = begin
        self._reply: Reply | None = None

    async def whole(self) -> object:
        """Return the answer as one JSON body."""
        self._reply = await self._begin()
        return await self._reply.whole()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the answer as server-sent events."""
        self._reply = await self._begin()
        async with aclosing(self._reply.events()) as events:
            async for each in events:
                yield each

    def close(self) -> None:
        """Abort the answer if it still runs."""
        if self._reply is not None:
            self._reply.close()

"""Answers in Anthropic's form, whole and as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace

from ....core.interface.request import Usage
from ...runtime.cache_diagnostics import anthropic_diagnostics
from ...runtime.chat import ChatAnswer
from ...serving.answers import Free, refuse_aborted, speculation_body
from ...serving.serving_context import Service
from ...serving.sse import ReadyReply, Reply, named_event
from ...types.request_context import random_id
from ...types.results import TextDelta
from .answers import (
    ContentBlock,
    Ending,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StreamEvent,
)
from .blocks import Blocks
from .breakpoints import TTL, Breakpoints

REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "max_tokens"}
WARMED = Ending(stop_reason="max_tokens")
CONTEXT_FULL = "model_context_window_exceeded"


PING = named_event(Ping())


def new_id() -> str:
    """Id of a new message, and of its request inside the engine."""
    return f"msg_{random_id()[:24]}"


@dataclass(slots=True, kw_only=True)
class MessageWriter:
    """Writes one answer.

    ``previous_id``: the message whose prompt this one is compared with. ``explains``: whether
    ``usage`` tells why the prompt missed the cache.
    """

    service: Service
    breakpoints: Breakpoints
    max_tokens: int
    shows_thoughts: bool = True
    previous_id: str | None = None
    explains: bool = False
    returns_ids: bool = False
    id: str = field(default_factory=new_id)

    # -- whole ----------------------------------------------------------------------------------

    async def whole(self, answer: ChatAnswer) -> MessageAnswer:
        """The answer in one body."""
        blocks, last = self._blocks(), TextDelta()
        async with aclosing(answer.deltas()) as deltas:
            async for last in deltas:
                self._take(answer, last, blocks)
        blocks.end()
        message = self._ended(self._end(answer, last), answer.usage, blocks.contents)
        message.token_ids = self._message_ids(last, blocks)
        if self.returns_ids:
            message.prompt_token_ids = list(answer.prompt_token_ids)
        return message

    def _message_ids(self, last: TextDelta, blocks: Blocks) -> list[int] | UnsetType:
        """The ids of the message; none where the client does not get all of it."""
        if not self.returns_ids or last.message_ids is None:
            return UNSET
        is_hidden = blocks.has_thoughts and not self.shows_thoughts
        return UNSET if is_hidden else last.message_ids

    # -- streamed -------------------------------------------------------------------------------

    async def events(self, answer: ChatAnswer) -> AsyncGenerator[bytes]:
        """The answer as events; the first waits for a step, since it reports cached tokens."""
        blocks, last = self._blocks(), TextDelta()
        is_first = True
        async with aclosing(answer.deltas()) as deltas:
            async for last in deltas:
                events = self._take(answer, last, blocks)
                if is_first:
                    is_first = False
                    start = self._message(answer.usage)
                    if self.returns_ids:
                        start.prompt_token_ids = list(answer.prompt_token_ids)
                    events = [MessageStart(message=start), *events]
                if events:
                    yield b"".join([named_event(each) for each in events])
        end, stop = self._ending(self._end(answer, last), answer.usage)
        end.token_ids = self._message_ids(last, blocks)
        yield b"".join([named_event(each) for each in [*blocks.end(), end, stop]])

    # -- of nothing -----------------------------------------------------------------------------

    def warmed(self, usage: Usage) -> Reply:
        """The answer without content, for a prompt that was only cached."""
        events = [MessageStart(message=self._message(usage)), *self._ending(WARMED, usage)]
        return ReadyReply(self._ended(WARMED, usage, []), map(named_event, events))

    # -- both -----------------------------------------------------------------------------------

    def _blocks(self) -> Blocks:
        return Blocks(shows_thoughts=self.shows_thoughts)

    def _take(self, answer: ChatAnswer, delta: TextDelta, blocks: Blocks) -> list[StreamEvent]:
        if delta.finish_reason is not None:
            refuse_aborted(self.service, delta.finish_reason, answer.num_tokens(delta.index))
        return [*blocks.take(delta)]

    def _ending(self, end: Ending, usage: Usage) -> tuple[MessageDelta, MessageStop]:
        return MessageDelta(delta=end, usage=self.usage(usage)), MessageStop()

    def _diagnosis(self) -> Free | None:
        """The reason for the cache miss; known once the first tokens are computed."""
        if self.previous_id is None:
            return None
        found = self.service.llm.explain(self.id, previous_id=self.previous_id)
        return anthropic_diagnostics(found)

    def _message(self, usage: Usage) -> MessageAnswer:
        """The message without content, as ``message_start`` carries it."""
        return MessageAnswer(
            id=self.id,
            model=self.service.model,
            diagnostics=self._diagnosis(),
            usage=self.usage(usage, is_start=True),
        )

    def _ended(self, end: Ending, usage: Usage, content: list[ContentBlock]) -> MessageAnswer:
        """The whole message."""
        return replace(
            self._message(usage), **asdict(end), content=content, usage=self.usage(usage)
        )

    def _end(self, answer: ChatAnswer, last: TextDelta) -> Ending:
        """Stop reason and stop sequence of a choice."""
        reason, sequence = last.finish_reason or "", None
        stopped = REASONS.get(reason, "tool_use")
        if reason == "stop" and isinstance(last.stop_reason, str):
            stopped, sequence = "stop_sequence", last.stop_reason
        elif reason == "length" and answer.num_tokens(0) < self.max_tokens:
            stopped = CONTEXT_FULL
        return Ending(stop_reason=stopped, stop_sequence=sequence)

    def usage(self, usage: Usage, *, is_start: bool = False) -> MessageUsage:
        """``usage``: prompt tokens read from the cache, written to it, and all others."""
        found = self.service.llm.explain(self.id) if self.explains and not is_start else None
        read, written = usage.cached_tokens, self.breakpoints.written(usage.cached_tokens)
        return MessageUsage(
            input_tokens=usage.prompt_tokens - read - written,
            cache_creation_input_tokens=written,
            cache_read_input_tokens=read,
            cache_creation={
                f"ephemeral_{name}_input_tokens": self.breakpoints.written(read, ttl)
                for name, ttl in TTL.items()
            },
            output_tokens=0 if is_start else usage.completion_tokens,
            closed_early=usage.closed_early,
            moves=usage.moves,
            image_tokens=usage.image_tokens or UNSET,
            evicted_tokens=usage.evicted_tokens or UNSET,
            spliced_tokens=usage.spliced_tokens,
            normalized=[*usage.normalized] or UNSET,
            speculation=speculation_body(usage),
            cache_explanation=UNSET if found is None else found.body(),
        )


class MessageReply(Reply):
    """The answer to one conversation."""

    def __init__(self, writer: MessageWriter, answer: ChatAnswer) -> None:
        self._writer, self._answer = writer, answer

    async def whole(self) -> object:
        """Write the answer as one body."""
        return await self._writer.whole(self._answer)

    def events(self) -> AsyncGenerator[bytes]:
        """Write the answer as events."""
        return self._writer.events(self._answer)

    def close(self) -> None:
        """Abort what still runs."""
        self._answer.close()

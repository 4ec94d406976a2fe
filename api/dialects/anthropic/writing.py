"""Answers in Anthropic's form, whole and as server-sent events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace

from ....core.interface.request import Usage
from ...runtime.cache_diagnostics import anthropic_diagnostics
from ...runtime.chat import ChatAnswer
from ...serving.answers import AnswerWriter, Free, speculation_body
from ...serving.caching.breakpoints import Breakpoints
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
from .breakpoints import TTL

REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "max_tokens"}
WARMED = Ending(stop_reason="max_tokens")
CONTEXT_FULL = "model_context_window_exceeded"


PING = named_event(Ping())


def new_id() -> str:
    """Return a new id for a message and its request in the engine."""
    return f"msg_{random_id()[:24]}"


@dataclass(slots=True, kw_only=True)
class MessageWriter(AnswerWriter[ChatAnswer]):
    """Writes one answer.

    ``previous_id``: an earlier message, with whose prompt ``diagnostics`` compares this prompt.
    ``explains``: explain cache misses in ``usage``.
    """

    service: Service
    breakpoints: Breakpoints
    max_tokens: int
    shows_thoughts: bool = True
    previous_id: str | None = None
    explains: bool = False
    returns_ids: bool = False
    id: str = field(default_factory=new_id)
    _blocks: Blocks = field(init=False)
    _last: TextDelta = field(init=False, default_factory=TextDelta)

    def __post_init__(self) -> None:
        self._blocks = Blocks(shows_thoughts=self.shows_thoughts)

    # -- whole ----------------------------------------------------------------------------------

    def take(self, delta: TextDelta) -> Sequence[StreamEvent]:
        """Add the output of one step and return its events."""
        self._last = delta
        return self._blocks.take(delta)

    def whole(self, answer: ChatAnswer) -> MessageAnswer:
        """Return the answer in one body."""
        self._blocks.end()
        message = self._ended(self._end(answer), answer.usage, self._blocks.contents)
        message.token_ids = self._message_ids
        if self.returns_ids:
            message.prompt_token_ids = list(answer.prompt_token_ids)
        return message

    @property
    def _message_ids(self) -> list[int] | UnsetType:
        """The token ids of the message; UNSET if the client does not receive the whole message."""
        ids = self._last.message_ids if self.returns_ids else None
        is_hidden = self._blocks.has_thoughts and not self.shows_thoughts
        return UNSET if ids is None or is_hidden else ids

    # -- streamed -------------------------------------------------------------------------------

    def begin(self, answer: ChatAnswer) -> Iterator[bytes]:
        """Yield the first event, which reports the cached tokens."""
        start = self._message(answer.usage)
        if self.returns_ids:
            start.prompt_token_ids = list(answer.prompt_token_ids)
        yield named_event(MessageStart(message=start))

    def write(self, delta: TextDelta) -> Iterator[bytes]:
        """Return the encoded events of one step."""
        return map(named_event, self.take(delta))

    def end(self, answer: ChatAnswer) -> Iterator[bytes]:
        """Yield the events that end the last block and the message."""
        end, stop = self._ending(self._end(answer), answer.usage)
        end.token_ids = self._message_ids
        return map(named_event, [*self._blocks.end(), end, stop])

    # -- prewarmed prompts -------------------------------------------------------------------------

    def warmed(self, usage: Usage) -> Reply:
        """Return the answer without content for a prompt that was only cached."""
        events = [MessageStart(message=self._message(usage)), *self._ending(WARMED, usage)]
        return ReadyReply(self._ended(WARMED, usage, []), map(named_event, events))

    # -- both -----------------------------------------------------------------------------------

    def _ending(self, end: Ending, usage: Usage) -> tuple[MessageDelta, MessageStop]:
        return MessageDelta(delta=end, usage=self.usage(usage)), MessageStop()

    def _diagnosis(self) -> Free | None:
        """Return ``diagnostics``: the cause of the cache miss, known from the first token on."""
        if self.previous_id is None:
            return None
        found = self.service.llm.explain(self.id, previous_id=self.previous_id)
        return anthropic_diagnostics(found)

    def _message(self, usage: Usage) -> MessageAnswer:
        """Return the message without content, for ``message_start``."""
        return MessageAnswer(
            id=self.id,
            model=self.service.model,
            diagnostics=self._diagnosis(),
            usage=self.usage(usage, is_start=True),
        )

    def _ended(self, end: Ending, usage: Usage, content: list[ContentBlock]) -> MessageAnswer:
        """Return the whole message."""
        return replace(
            self._message(usage), **asdict(end), content=content, usage=self.usage(usage)
        )

    def _end(self, answer: ChatAnswer) -> Ending:
        """Return the stop reason and the stop sequence."""
        last = self._last
        reason, sequence = last.finish_reason or "", None
        stopped = REASONS.get(reason, "tool_use")
        if reason == "stop" and isinstance(last.stop_reason, str):
            stopped, sequence = "stop_sequence", last.stop_reason
        elif reason == "length" and answer.num_tokens(0) < self.max_tokens:
            stopped = CONTEXT_FULL
        return Ending(stop_reason=stopped, stop_sequence=sequence)

    def usage(self, usage: Usage, *, is_start: bool = False) -> MessageUsage:
        """Return ``usage``. Prompt tokens are split into cache reads, cache writes and the rest."""
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
            cost=UNSET if is_start else self.service.cost(usage, written),
            cache_explanation=UNSET if found is None else found.body(),
        )

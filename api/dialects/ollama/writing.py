"""Encode answers as Ollama has them: lines of JSON, the last with counts and durations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Protocol

from msgspec import UNSET

from ....core.interface.request import Usage
from ...runtime.segments import Segments
from ...serving.answers import refuse_aborted
from ...serving.serving_context import Service
from ...serving.sse import ReadyReply, Reply, encode
from ...serving.whole_calls import closed_calls
from ...types.results import TextDelta
from .answers import (
    AnsweredCall,
    AnsweredFunction,
    AnswerMessage,
    AnswerPart,
    ChatPart,
    GeneratePart,
)

NANO = 1_000_000_000


class RunningAnswer(Protocol):
    """The answer to a conversation or to a plain prompt, as a writer reads it."""

    @property
    def usage(self) -> Usage:
        """The usage so far."""

    def deltas(self) -> AsyncGenerator[TextDelta]:
        """Read it, one delta a step."""


class AnswerWriter:
    """Makes the parts of one answer; ``is_chat``: of /api/chat, else of /api/generate."""

    def __init__(self, service: Service, *, is_chat: bool) -> None:
        self._service, self._is_chat = service, is_chat
        self._segments = Segments()

    def part(
        self, content: str = "", thinking: str = "", calls: list[AnsweredCall] | None = None
    ) -> AnswerPart:
        """Make the part with the additions of a step."""
        model, created_at = self._service.model, now()
        if not self._is_chat:
            return GeneratePart(
                model=model, created_at=created_at, response=content, thinking=thinking or UNSET
            )
        message = AnswerMessage(
            content=content, thinking=thinking or UNSET, tool_calls=calls or UNSET
        )
        return ChatPart(model=model, created_at=created_at, message=message)

    def loaded(self) -> Reply:
        """The answer to a body without a prompt, which asks only that the model is loaded."""
        part = self.part()
        part.done, part.done_reason = True, "load"
        return ReadyReply(part, [line(part)])

    def finish(self, part: AnswerPart, reason: str, usage: Usage) -> AnswerPart:
        """Make a part the last one."""
        first = usage.time_to_first_token
        part.done = True
        part.done_reason = "length" if reason in ("length", "abort") else "stop"
        part.total_duration = int(usage.total_time * NANO)
        part.load_duration = 0
        part.prompt_eval_count = usage.prompt_tokens
        part.prompt_eval_duration = int(max(0.0, first - usage.queue_time) * NANO)
        part.eval_count = usage.completion_tokens
        part.eval_duration = int(max(0.0, usage.total_time - first) * NANO)
        return part

    async def parts(self, answer: RunningAnswer) -> AsyncGenerator[AnswerPart]:
        """One part for each step that adds something, and the last one."""
        async with aclosing(answer.deltas()) as deltas:
            async for delta in deltas:
                calls = [
                    AnsweredCall(
                        function=AnsweredFunction(name=each.name, arguments=each.arguments)
                    )
                    for each in closed_calls(self._segments.take(delta))
                ]
                if delta.text or delta.reasoning or calls:
                    yield self.part(delta.text, delta.reasoning, calls)
                if (reason := delta.finish_reason) is not None:
                    usage = answer.usage
                    refuse_aborted(self._service, reason, usage.completion_tokens)
                    yield self.finish(self.part(), reason, usage)

    async def whole(self, answer: RunningAnswer) -> AnswerPart:
        """All parts in one."""
        content, thinking, calls = "", "", list[AnsweredCall]()
        async with aclosing(self.parts(answer)) as parts:
            async for part in parts:
                last = part
                if isinstance(part, ChatPart):
                    content += part.message.content
                    thinking += part.message.thinking or ""
                    calls += part.message.tool_calls or []
                elif isinstance(part, GeneratePart):
                    content += part.response
                    thinking += part.thinking or ""
        whole = self.part(content, thinking, calls)
        for name in AnswerPart.__struct_fields__:
            setattr(whole, name, getattr(last, name))
        return whole


class OllamaReply(Reply):
    """A running answer as parts."""

    def __init__(
        self, writer: AnswerWriter, answer: RunningAnswer, close: Callable[[], None]
    ) -> None:
        self._writer, self._answer, self._close = writer, answer, close

    async def whole(self) -> object:
        """The answer in one body."""
        return await self._writer.whole(self._answer)

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer line by line."""
        async with aclosing(self._writer.parts(self._answer)) as parts:
            async for part in parts:
                yield line(part)

    def close(self) -> None:
        """Abort what still runs; may be called twice."""
        self._close()


def line(part: object) -> bytes:
    """One line of a stream."""
    return encode(part) + b"\n"


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

"""Encode answers as Ollama's JSON lines, of which the last one has counts and durations."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from msgspec import UNSET

from ....core.interface.request import Usage
from ...runtime.segments import Segments
from ...serving.answers import AnswerWriter, RunningAnswer
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


class PartWriter(AnswerWriter[RunningAnswer]):
    """Writes one answer. ``is_chat``: for /api/chat, else for /api/generate."""

    def __init__(self, service: Service, *, is_chat: bool) -> None:
        self._service, self._is_chat = service, is_chat
        self._segments = Segments()
        self._calls: list[AnsweredCall] = []
        self._reason = ""

    def part(
        self, content: str = "", thinking: str = "", calls: list[AnsweredCall] | None = None
    ) -> AnswerPart:
        """Return an answer line with this content, reasoning and calls."""
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
        """Return the answer to a body without a prompt: the model is loaded."""
        part = self.part()
        part.done, part.done_reason = True, "load"
        return ReadyReply(part, [line(part)])

    def finish(self, part: AnswerPart, reason: str, usage: Usage) -> AnswerPart:
        """Add the finish reason, the counts and the durations to the last line, and return it."""
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

    def take(self, delta: TextDelta) -> list[AnsweredCall]:
        """Add the output of one step, and return the calls that it completes."""
        self._reason = delta.finish_reason or ""
        calls = [
            AnsweredCall(function=AnsweredFunction(name=each.name, arguments=each.arguments))
            for each in closed_calls(self._segments.take(delta))
        ]
        self._calls += calls
        return calls

    def write(self, delta: TextDelta) -> Iterator[bytes]:
        """Yield a line for a step that adds text, reasoning or calls."""
        calls = self.take(delta)
        if delta.text or delta.reasoning or calls:
            yield line(self.part(delta.text, delta.reasoning, calls))

    def end(self, answer: RunningAnswer) -> Iterator[bytes]:
        """Yield the last line."""
        yield line(self.finish(self.part(), self._reason, answer.usage))

    def whole(self, answer: RunningAnswer) -> AnswerPart:
        """Return the whole answer as one body."""
        content, thinking = self._segments.joined("text"), self._segments.joined("reasoning")
        whole = self.part(content, thinking, self._calls)
        return self.finish(whole, self._reason, answer.usage)


def line(part: object) -> bytes:
    """Encode one line of a stream."""
    return encode(part) + b"\n"


def now() -> str:
    """Return the time in Ollama's format."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

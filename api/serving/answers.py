"""Parts of answers that all APIs share: usage, prewarming, aborted answers, replies."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ...core.interface.request import Request, Usage
from ..runtime.conversation.chat_input import ChatInput
from ..runtime.preprocess import PromptTokens
from ..types.results import Completion, TextDelta
from .errors import ApiError, deadline_exceeded, unavailable
from .serving_context import SHUTTING_DOWN, Service
from .sse import Reply

Free = dict[str, Any]
"""An object whose fields are not fixed."""


class SpeculationUsage(Struct, kw_only=True):
    """``usage.speculation``: draft tokens proposed and accepted."""

    proposed_tokens: int
    accepted_tokens: int
    verify_steps: int
    tree_steps: int
    accepted_by_source: dict[str, int]
    proposed_by_source: dict[str, int]
    steps_by_accepted: dict[int, int]


def speculation_body(usage: Usage) -> SpeculationUsage:
    """Return ``usage.speculation``: draft tokens proposed and accepted, by source."""
    return SpeculationUsage(
        proposed_tokens=usage.proposed_tokens,
        accepted_tokens=usage.accepted_tokens,
        verify_steps=usage.verify_steps,
        tree_steps=usage.tree_steps,
        accepted_by_source=usage.accepted_by_source,
        proposed_by_source=usage.proposed_by_source,
        steps_by_accepted=dict(sorted(usage.steps_by_accepted.items())),
    )


async def prewarm(
    service: Service, chat: ChatInput, *, request_id: str, prompt: PromptTokens | None = None
) -> Usage:
    """Cache the prompt of a conversation without generating an answer; return its usage.

    Raises the errors of `ChatClient.open`, and `ApiError` if the request was aborted.
    """
    done = await service.chat.prewarm(chat, request_id=request_id, prompt=prompt)
    return warm_usage(service, done)


def warm_usage(service: Service, done: Completion) -> Usage:
    """Return the usage of a prewarmed prompt. Raises `ApiError` if the request was aborted."""
    refuse_aborted(service, done.choices[0].finish_reason, 0)
    return done.usage


def refuse_aborted(service: Service, reason: str, num_tokens: int) -> None:
    """Raise the error of `abort_error`, if there is one."""
    if (error := abort_error(service, reason, num_tokens)) is not None:
        raise error


def abort_error(service: Service, reason: str, num_tokens: int) -> ApiError | None:
    """Return the error of an answer aborted by a shutdown or before its first token, else None."""
    if reason != "abort":
        return None
    if service.draining:
        return unavailable(SHUTTING_DOWN)
    if num_tokens == 0:
        return deadline_exceeded("the request's deadline passed before its first token")
    return None


class RunningAnswer(Protocol):
    """The running answer to a conversation, or the running answers to one or more prompts."""

    @property
    def request(self) -> Request:
        """The engine's request for the first choice."""

    @property
    def usage(self) -> Usage:
        """The usage so far."""

    def num_tokens(self, index: int) -> int:
        """Return the number of tokens that one choice has so far."""

    def deltas(self) -> AsyncGenerator[TextDelta]:
        """Yield the answer, one delta per step and choice."""

    def close(self) -> None:
        """Abort the choices that still run. May be called twice."""


A = TypeVar("A", bound=RunningAnswer)


class AnswerWriter(Generic[A]):
    """Encodes one answer: as a stream, or through `take` and `whole` as a single body."""

    def begin(self, answer: A) -> Iterable[bytes]:  # noqa: ARG002
        """Return the events to send before the first step."""
        return ()

    def write(self, delta: TextDelta) -> Iterable[bytes]:
        """Return the events for one step."""
        raise NotImplementedError

    def end(self, answer: A) -> Iterable[bytes]:  # noqa: ARG002
        """Return the events to send after the last step."""
        return ()

    def take(self, delta: TextDelta) -> object:
        """Keep the parts of a step that `whole` needs."""
        raise NotImplementedError

    def whole(self, answer: A) -> object:
        """Return the body after the last step."""
        raise NotImplementedError


class AnswerReply(Reply, Generic[A]):
    """Sends a running answer to the client. Raises `ApiError` if the answer is aborted."""

    def __init__(self, service: Service, writer: AnswerWriter[A], answer: A) -> None:
        self._service, self._writer, self._answer = service, writer, answer

    @property
    def request(self) -> Request:
        """The engine's request for the first choice."""
        return self._answer.request

    async def whole(self) -> object:
        """Read the whole answer and return it as one body."""
        async with aclosing(self._answer.deltas()) as deltas:
            async for delta in deltas:
                if (refusal := self._refusal(delta)) is not None:
                    raise refusal
                self._writer.take(delta)
        return self._writer.whole(self._answer)

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of the answer as it is generated, beginning with its first step."""
        writer, has_begun = self._writer, False
        async with aclosing(self._answer.deltas()) as deltas:
            async for delta in deltas:
                refusal = self._refusal(delta)
                if refusal is not None:
                    if not (delta.text or delta.reasoning or delta.tool_calls):
                        raise refusal
                    # Text that was held back, because it might have become a call.
                    delta = replace(delta, finish_reason=None, stop_reason=None)
                first = () if has_begun else writer.begin(self._answer)
                has_begun = True
                if data := b"".join([*first, *writer.write(delta)]):
                    yield data
                if refusal is not None:
                    raise refusal
        if data := b"".join(writer.end(self._answer)):
            yield data

    def close(self) -> None:
        """Abort the choices that still run."""
        self._answer.close()

    def _refusal(self, delta: TextDelta) -> ApiError | None:
        reason = delta.finish_reason
        if reason is None:
            return None
        return abort_error(self._service, reason, self._answer.num_tokens(delta.index))

"""What the writers of OpenAI's two completion shapes have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ..core.request import Usage
from .errors import unavailable
from .schema import AnyRequest
from .service import SHUTTING_DOWN, Service
from .shapes import Body, Head, usage_body
from .sse import DONE, event


class Writer:
    """Writes the answer to one body; a subclass knows what stands in a choice."""

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, service: Service, head: Head, body: AnyRequest) -> None:
        self._service = service
        self._head = head
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._predicted = body.prediction is not None
        self._explains = bool(body.explain_cache)

    def refuse_aborted(self, reason: str, num_tokens: int) -> None:
        """An answer that was given up before it began, or because of a shutdown, is an error."""
        refuse_aborted(self._service, reason, num_tokens)

    def answer(self, choices: list[Body], usage: Usage) -> Body:
        """All choices in one body."""
        return {**self._head.body(self.whole_kind, choices), "usage": self._usage(usage)}

    def chunk(
        self,
        index: int,
        content: Body,
        *,
        logprobs: Body | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        """One chunk of one choice."""
        choice = {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        return self._event([choice], None)

    def end(self, usage: Usage) -> Iterator[bytes]:
        """What follows the last choice."""
        if self._include_usage:
            yield self._event([], self._usage(usage))
        yield DONE

    def _usage(self, usage: Usage) -> Body:
        spent = usage_body(usage, predicted=self._predicted)
        found = self._service.llm.explain(self._head.id) if self._explains else None
        return spent if found is None else {**spent, "cache_explanation": found.body()}

    def _event(self, choices: list[Body], usage: Body | None) -> bytes:
        chunk = self._head.body(self.chunk_kind, choices)
        if self._include_usage:
            chunk["usage"] = usage
        return event(chunk)


def refuse_aborted(service: Service, reason: str, num_tokens: int) -> None:
    """Raise `ApiError` for an answer given up before it began, or because of a shutdown."""
    if reason != "abort":
        return
    if service.draining:
        raise unavailable(SHUTTING_DOWN)
    if num_tokens == 0:
        raise unavailable("the request's deadline passed")

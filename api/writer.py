"""What the writers of OpenAI's two completion shapes have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from ..core.interface.request import Usage
from .errors import deadline_exceeded, unavailable
from .results import Completion
from .schema import AnyRequest, Sampling
from .service import SHUTTING_DOWN, Service
from .shapes import Body, Head, usage_body
from .sse import DONE, event
from .talk import Ask


class Writer:
    """Writes the answer to one body; a subclass knows what stands in a choice."""

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, service: Service, head: Head, body: AnyRequest) -> None:
        self._service = service
        self._head = head
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._explains = bool(body.explain_cache)
        self.prompt_ids: Sequence[str] = [head.id]  # under which its prompts are remembered

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
        """What was spent, and why the cache was missed; of several prompts a list of reasons."""
        spent = usage_body(usage)
        if len(self.prompt_ids) == 1:
            return spent | self.explanation(self.prompt_ids[0])
        told = [self.explanation(each).get("cache_explanation") for each in self.prompt_ids]
        return {**spent, "cache_explanations": told} if self._explains else spent

    def explanation(self, prompt_id: str) -> Body:
        """Why a prompt missed the cache, where that was asked for and is known."""
        found = self._service.llm.explain(prompt_id) if self._explains else None
        return {} if found is None else {"cache_explanation": found.body()}

    def _event(self, choices: list[Body], usage: Body | None) -> bytes:
        chunk = self._head.body(self.chunk_kind, choices)
        if self._include_usage:
            chunk["usage"] = usage
        return event(chunk)


def is_prewarm(body: Sampling) -> bool:
    """Whether the prompt is only to be put into the cache."""
    return body.prompt_cache_options is not None and bool(body.prompt_cache_options.prewarm)


async def prewarm(
    service: Service, ask: Ask, *, request_id: str, prompt_ids: Sequence[int] | None = None
) -> Usage:
    """Put a conversation into the cache and say nothing; raises as an answer would."""
    done = await service.turns.prewarm(ask, request_id=request_id, prompt_ids=prompt_ids)
    return warm_usage(service, done)


def warm_usage(service: Service, done: Completion) -> Usage:
    """What a prompt took that was put into the cache; raises `ApiError` for one given up."""
    refuse_aborted(service, done.choices[0].finish_reason, 0)
    return replace(done.usage, completion_tokens=0)


def refuse_aborted(service: Service, reason: str, num_tokens: int) -> None:
    """Raise `ApiError` for an answer given up before it began, or because of a shutdown."""
    if reason != "abort":
        return
    if service.draining:
        raise unavailable(SHUTTING_DOWN)
    if num_tokens == 0:
        raise deadline_exceeded("the request's deadline passed before its first token")

"""Encodes the answer to one request, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, cast

from ....core.interface.output import TokenLogprob
from ....core.interface.request import Usage
from ...runtime.cache_diagnostics import openai_diagnostics
from ...runtime.chat import Turn
from ...runtime.chat_types import TurnDelta
from ...serving.serving_context import Service
from ...types.results import Body
from ..shapes import chat_logprobs, refuse_aborted
from .body import CacheTold, ResponseHead
from .output import Output


class ResponseWriter:
    """One response, from its creation to its end."""

    def __init__(self, service: Service, head: ResponseHead) -> None:
        self._service = service
        self._head = head
        self._output = Output(self._spell)
        self._reason = ""
        self._stop_reason: int | str | None = None

    def begun(self) -> Body:
        """The response without output."""
        return self._head.response("in_progress", [])

    def add(self, turn: Turn, delta: TurnDelta) -> list[Body]:
        """The events of a step; raises `ApiError` for an answer that was given up."""
        reason = delta.finish_reason
        if reason is not None:
            refuse_aborted(self._service, reason, turn.num_tokens(delta.index))
        events = self._output.add(delta)
        if reason is not None:
            self._reason, self._stop_reason = reason, delta.stop_reason
            events += self._output.end(is_whole=self._is_whole)
        return events

    async def collect(self, turn: Turn) -> Body:
        """All of it at once; closes the turn."""
        try:
            async with aclosing(turn.deltas()) as deltas:
                async for delta in deltas:
                    self.add(turn, delta)
        finally:
            turn.close()
        return self.finished(turn)

    def finished(self, turn: Turn) -> Body:
        """The complete response."""
        return self._head.response(
            "completed" if self._is_whole else "incomplete",
            self._output.items,
            usage=turn.usage,
            num_reasoning_tokens=self._output.num_reasoning_tokens,
            stop_reason=self._stop_reason,
            cache=self._cache_told(),
        )

    def prewarmed(self, usage: Usage) -> Body:
        """The response to a prompt that was only cached."""
        return self._head.response("completed", [], usage=usage, cache=self._cache_told())

    def failed(self, turn: Turn, error: Body) -> Body:
        """The failed response."""
        self._output.end(is_whole=False)
        return self._head.response(
            "failed",
            self._output.items,
            usage=turn.usage,
            num_reasoning_tokens=self._output.num_reasoning_tokens,
            error=error,
        )

    def _cache_told(self) -> CacheTold:
        """The reasons for a cache miss, if requested."""
        head, llm = self._head, self._service.llm
        diagnostics, explanation = None, None
        if head.compare_with is not None:
            found = llm.explain(head.id, previous_id=head.compare_with)
            diagnostics = openai_diagnostics(found)
        if head.explains_cache:
            explained = llm.explain(head.id)
            explanation = None if explained is None else explained.body()
        return CacheTold(diagnostics, explanation)

    @property
    def _is_whole(self) -> bool:
        """Whether the model ended the answer, not a limit or the deadline."""
        return self._reason in {"stop", "tool_calls"}

    def _spell(self, logprobs: Sequence[TokenLogprob]) -> list[Body]:
        spelt: dict[str, Any] = chat_logprobs(self._service.llm.tokenizer, logprobs)
        return cast("list[Body]", spelt["content"])

"""Writes the answer to one request: the response object, and the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from time import time

from msgspec.structs import asdict, replace

from ....core.interface.output import TokenLogprob
from ....core.interface.request import Usage
from ...runtime.cache_diagnostics import openai_diagnostics
from ...runtime.chat import ChatAnswer
from ...serving.answers import refuse_aborted
from ...serving.serving_context import Service
from ...types.request_context import random_id
from ...types.results import TextDelta
from ...types.sampling_params import SamplingParams
from ..openai.answers import TokenInfo
from ..openai.writing import FINGERPRINT, token_infos, usage_body
from .answers import (
    Event,
    IncompleteDetails,
    OutputDetails,
    ReasoningSettings,
    ResponseBody,
    ResponseError,
    ResponseStatus,
    ResponseUsage,
)
from .bodies import ResponsesRequest, TextFormat, TextOptions
from .output import Output
from .tools import ServedTool, served_tools

PLAIN_TEXT = TextFormat(type="text")


class ResponseWriter:
    """One response, from its creation to its end."""

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        params: SamplingParams,
        served: Sequence[ServedTool] = (),
    ) -> None:
        options = body.prompt_cache_options
        self._service = service
        self._begun = new_response(body, params, service.model)
        self._compare_with = None if options is None else options.comparison_response_id
        self._explains = bool(body.explain_cache)
        self._output = Output(self._spell, {each.tool.name: each for each in served})
        self.answer_ids: Sequence[int] = ()  # of the whole answer, where they can stand for it
        self._reason = ""
        self._stop_reason: int | str | None = None

    @property
    def id(self) -> str:
        """Id of the response, and of the request inside the engine."""
        return self._begun.id

    def begun(self) -> ResponseBody:
        """The response without output."""
        return self._begun

    def add(self, answer: ChatAnswer, delta: TextDelta) -> list[Event]:
        """The events of a step; raises `ApiError` for an answer that was given up."""
        reason = delta.finish_reason
        if reason is not None:
            refuse_aborted(self._service, reason, answer.num_tokens(delta.index))
        events = self._output.add(delta)
        if reason is not None:
            self._reason, self._stop_reason = reason, delta.stop_reason
            self.answer_ids = delta.message_ids or ()
            events += self._output.end(is_whole=self._is_whole)
        return events

    async def collect(self, answer: ChatAnswer) -> ResponseBody:
        """All of it at once; closes the answer."""
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    self.add(answer, delta)
        finally:
            answer.close()
        return self.finished(answer)

    def finished(self, answer: ChatAnswer) -> ResponseBody:
        """The complete response."""
        response = self._ended("completed" if self._is_whole else "incomplete", answer.usage)
        if self._stop_reason is not None:
            response.stop_reason = self._stop_reason
        self._explain(response)
        return response

    def prewarmed(self, usage: Usage) -> ResponseBody:
        """The response to a prompt that was only cached."""
        response = self._ended("completed", usage)
        self._explain(response)
        return response

    def failed(self, answer: ChatAnswer, error: ResponseError) -> ResponseBody:
        """The failed response."""
        self._output.end(is_whole=False)
        return replace(self._ended("failed", answer.usage), error=error)

    def _ended(self, status: ResponseStatus, usage: Usage) -> ResponseBody:
        return replace(
            self._begun,
            status=status,
            completed_at=int(time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=self._output.items,
            usage=response_usage(usage, self._output.num_reasoning_tokens),
        )

    def _explain(self, response: ResponseBody) -> None:
        """Add the reasons for a cache miss, if requested."""
        explain = self._service.llm.explain
        if self._compare_with is not None:
            found = explain(self.id, previous_id=self._compare_with)
            response.prompt_cache_diagnostics = openai_diagnostics(found)
        if self._explains and response.usage is not None and (found := explain(self.id)):
            response.usage.cache_explanation = found.body()

    @property
    def _is_whole(self) -> bool:
        """Whether the model ended the answer, not a limit or the deadline."""
        return self._reason in {"stop", "tool_calls"}

    def _spell(self, logprobs: Sequence[TokenLogprob]) -> list[TokenInfo]:
        return token_infos(self._service.llm.tokenizer, logprobs)


def new_id() -> str:
    """Id of a new response, and of its request inside the engine."""
    return f"resp_{random_id()}"


def new_response(body: ResponsesRequest, params: SamplingParams, model: str) -> ResponseBody:
    """A response without output; ``params``: those in force, model's defaults included."""
    format = body.text.format if body.text else None
    return ResponseBody(
        id=new_id(),
        created_at=int(time()),
        model=model,
        system_fingerprint=FINGERPRINT,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        prompt_cache_retention=body.prompt_cache_retention,
        reasoning=ReasoningSettings(effort=body.reasoning.effort if body.reasoning else None),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        tool_choice=body.tool_choice or "auto",
        user=body.user,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=float(params.temperature),  # JSON's encoder refuses a `LeftOutFloat`
        text=TextOptions(format=format or PLAIN_TEXT),
        tools=served_tools(body),
        top_logprobs=params.logprobs or 0,
        top_p=float(params.top_p),
    )


def response_usage(usage: Usage, num_reasoning_tokens: int) -> ResponseUsage:
    """``usage`` of this API, with the extra fields of chat completions."""
    spent = usage_body(usage)
    details = asdict(spent.completion_tokens_details)
    return ResponseUsage(
        input_tokens=spent.prompt_tokens,
        input_tokens_details=spent.prompt_tokens_details,
        output_tokens=spent.completion_tokens,
        output_tokens_details=OutputDetails(**details, reasoning_tokens=num_reasoning_tokens),
        total_tokens=spent.total_tokens,
        closed_early=spent.closed_early,
        moves=spent.moves,
        evicted_tokens=spent.evicted_tokens,
        speculation=spent.speculation,
    )

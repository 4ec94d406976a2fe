"""ResponseWriter: the response object for one request and the events of its stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from time import time

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace

from ....core.interface.output import TokenLogprob
from ....core.interface.request import Usage
from ...runtime.cache_diagnostics import openai_diagnostics
from ...runtime.chat import ChatAnswer
from ...serving.answers import AnswerReply, AnswerWriter
from ...serving.caching.breakpoints import Breakpoints
from ...serving.caching.fields import PromptCacheOptions
from ...serving.errors import ApiError, to_api_error
from ...serving.serving_context import Service
from ...serving.sse import ReadyReply, Reply, named_event
from ...types.request_context import random_id
from ...types.results import TextDelta
from ...types.sampling_params import SamplingParams
from ..openai.answers import TokenInfo
from ..openai.writing import FINGERPRINT, token_infos, usage_body
from .answers import (
    ENDINGS,
    AppliedCacheOptions,
    Event,
    IncompleteDetails,
    OutputDetails,
    ReasoningSettings,
    ResponseBody,
    ResponseCreated,
    ResponseError,
    ResponseInProgress,
    ResponseStatus,
    ResponseUsage,
)
from .bodies import ResponsesRequest, TextFormat, TextOptions
from .output import Output
from .tools import ServedTool, served_tools

logger = logging.getLogger(__name__)
# statuses with codes that clients know; others are "server_error"
CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
PLAIN_TEXT = TextFormat(type="text")


class ResponseWriter(AnswerWriter[ChatAnswer]):
    """One response, from its creation to its end.

    ``keep`` is called before the last event, with the complete response and the answer's token ids.
    The ids are empty if they cannot replace the answer's text in a later prompt.
    """

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        params: SamplingParams,
        served: Sequence[ServedTool],
        keep: Callable[[ResponseBody, Sequence[int]], None],
        breakpoints: Breakpoints | None = None,
    ) -> None:
        options = body.prompt_cache_options
        self._service = service
        self._begun = new_response(body, params, service.model)
        self._compare_with = None if options is None else options.comparison_response_id
        self._explains = bool(body.explain_cache)
        self._output = Output(self._spell, {each.tool.name: each for each in served})
        self._keep = keep
        self._breakpoints = breakpoints
        self._last = TextDelta()
        self._num_events = 0

    @property
    def id(self) -> str:
        """The id of the response, which is also the id of its request in the engine."""
        return self._begun.id

    def begun(self) -> bytes:
        """Return the events that begin every stream, sent before the prompt is computed."""
        kinds = (ResponseCreated, ResponseInProgress)
        return b"".join(self._encoded([kind(response=self._begun) for kind in kinds]))

    def take(self, delta: TextDelta) -> list[Event]:
        """Add the output of one step and return its events."""
        self._last = delta
        events = self._output.add(delta)
        if delta.finish_reason is not None:
            events += self._output.end(is_complete=self._is_complete)
        return events

    def write(self, delta: TextDelta) -> Iterator[bytes]:
        """Yield the encoded events of one step."""
        return self._encoded(self.take(delta))

    def end(self, answer: ChatAnswer) -> Iterator[bytes]:
        """Yield the event that ends the stream."""
        return self.ended(self.whole(answer))

    def whole(self, answer: ChatAnswer) -> ResponseBody:
        """Return the complete response."""
        response = self._ended("completed" if self._is_complete else "incomplete", answer.usage)
        if self._last.stop_reason is not None:
            response.stop_reason = self._last.stop_reason
        self._explain(response)
        self._keep(response, self._last.message_ids or ())
        return response

    def prewarmed(self, usage: Usage) -> Reply:
        """Return the response to a prompt that was only cached."""
        response = self._ended("completed", usage)
        self._explain(response)
        self._keep(response, ())
        return ReadyReply(response, [self.begun(), *self.ended(response)])

    def failed(self, usage: Usage, error: ResponseError) -> Iterator[bytes]:
        """Yield the event that ends the stream of a failed response."""
        self._output.end(is_complete=False)
        return self.ended(replace(self._ended("failed", usage), error=error))

    def ended(self, response: ResponseBody) -> Iterator[bytes]:
        """Yield the event that ends a stream with this response."""
        return self._encoded([ENDINGS[response.status](response=response)])

    def _encoded(self, events: Iterable[Event]) -> Iterator[bytes]:
        for event in events:
            event.sequence_number, self._num_events = self._num_events, self._num_events + 1
            yield named_event(event)

    def _ended(self, status: ResponseStatus, usage: Usage) -> ResponseBody:
        return replace(
            self._begun,
            status=status,
            completed_at=int(time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=self._output.items,
            usage=response_usage(
                usage,
                self._output.num_reasoning_tokens,
                self._breakpoints,
                self._service.cost(usage),
            ),
        )

    def _explain(self, response: ResponseBody) -> None:
        """Add the explanations of cache misses that the request asked for."""
        explain = self._service.llm.explain
        if self._compare_with is not None:
            found = explain(self.id, previous_id=self._compare_with)
            response.prompt_cache_diagnostics = openai_diagnostics(found)
        if self._explains and response.usage is not None and (found := explain(self.id)):
            response.usage.cache_explanation = found.body()

    @property
    def _is_complete(self) -> bool:
        """Whether the model ended the answer, rather than a limit or the deadline."""
        return self._last.finish_reason in {"stop", "tool_calls"}

    def _spell(self, logprobs: Sequence[TokenLogprob]) -> list[TokenInfo]:
        return token_infos(self._service.llm.tokenizer, logprobs)


class ResponseReply(AnswerReply[ChatAnswer]):
    """The answer to one request."""

    _writer: ResponseWriter

    @property
    def name(self) -> str:
        """The id of the response: its events have sequence numbers."""
        return self._writer.id

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the answer as events.

        The stream begins before the prompt is computed. A later error is sent as a failed response:
        after a plain error event, clients would wait for the end of the response.
        """
        yield self._writer.begun()
        try:
            async with aclosing(super().events()) as events:
                async for each in events:
                    yield each
        except Exception as error:
            last = self._writer.failed(self._answer.usage, response_error(error))
            yield b"".join(last)


def new_id() -> str:
    """Return a new id for a response and its request in the engine."""
    return f"resp_{random_id()}"


def new_response(body: ResponsesRequest, params: SamplingParams, model: str) -> ResponseBody:
    """Return a response without output. ``params``: the effective sampling parameters."""
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
        prompt_cache_options=_applied(body.prompt_cache_options),
        prompt_cache_retention=body.prompt_cache_retention,
        reasoning=ReasoningSettings(effort=body.reasoning.effort if body.reasoning else None),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        tool_choice=body.tool_choice or "auto",
        user=body.user,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=float(params.temperature),  # msgspec does not encode a `LeftOutFloat`
        text=TextOptions(format=format or PLAIN_TEXT),
        tools=served_tools(body),
        top_logprobs=params.logprobs or 0,
        top_p=float(params.top_p),
    )


def _applied(options: PromptCacheOptions | None) -> AppliedCacheOptions | UnsetType:
    if options is None:
        return UNSET
    return AppliedCacheOptions(
        mode=options.mode or "implicit",
        ttl=options.ttl or "30m",
        comparison_response_id=options.comparison_response_id,
    )


def response_usage(
    usage: Usage,
    num_reasoning_tokens: int,
    breakpoints: Breakpoints | None = None,
    cost: float | UnsetType = UNSET,
) -> ResponseUsage:
    """Return ``usage`` in this API's form, with the extra fields of chat completions."""
    spent = usage_body(usage, breakpoints, cost)
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
        cost=cost,
    )


def response_error(error: Exception) -> ResponseError:
    """Return the ``error`` of a response, with one of OpenAI's error codes."""
    answer: ApiError = to_api_error(error)
    if answer.status == 500:
        logger.error("a stream failed", exc_info=error)
    code = CODES.get(answer.status, "server_error")
    return ResponseError(code=code, message=str(answer), type=answer.kind, param=answer.param)

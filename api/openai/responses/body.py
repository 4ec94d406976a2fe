"""The response object."""

from __future__ import annotations

from time import time
from typing import NamedTuple
from uuid import uuid4

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict

from ....core.interface.request import Usage
from ...types.results import Body
from ...types.sampling_params import SamplingParams
from ..shapes import FINGERPRINT, usage_body
from ..wire import UsageBody
from ..wire_dialects import OutputDetails, ResponseUsage
from .ask import served_tools
from .schema import ResponsesRequest

PLAIN_TEXT: Body = {"type": "text"}


class CacheTold(NamedTuple):
    """Reports on the cache: ``prompt_cache_diagnostics`` and ``usage.cache_explanation``."""

    diagnostics: Body | None = None
    explanation: Body | None = None


NOTHING_TOLD = CacheTold()


class ResponseHead:
    """The fields that are the same in all events of a response."""

    def __init__(self, body: ResponsesRequest, params: SamplingParams, model: str) -> None:
        self.id = f"resp_{uuid4().hex}"
        options = body.prompt_cache_options
        self.compare_with = None if options is None else options.comparison_response_id
        self.explains_cache = bool(body.explain_cache)
        self._fields: Body = {
            "id": self.id,
            "object": "response",
            "created_at": int(time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
            "background": False,
            **_wishes(body),
            **_settings(body, params),
        }

    def response(
        self,
        status: str,
        output: list[Body],
        *,
        usage: Usage | None = None,
        num_reasoning_tokens: int = 0,
        stop_reason: int | str | None = None,
        error: Body | None = None,
        cache: CacheTold = NOTHING_TOLD,
    ) -> Body:
        """The response object with its present output."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response: Body = {
            **self._fields,
            "status": status,
            "completed_at": int(time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": cut,
            "output": output,
            "usage": None,
        }
        if usage is not None:
            response["usage"] = _usage(usage_body(usage), num_reasoning_tokens, cache.explanation)
        if stop_reason is not None:
            response["stop_reason"] = stop_reason
        if cache.diagnostics is not None:
            response["prompt_cache_diagnostics"] = cache.diagnostics
        return response


def _wishes(body: ResponsesRequest) -> Body:
    """Fields of the request that the response repeats."""
    choice = body.tool_choice
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "store": body.store is not False,
        "tool_choice": "auto" if choice is None else msgspec.to_builtins(choice),
        "user": body.user,
    }


def _settings(body: ResponsesRequest, params: SamplingParams) -> Body:
    """Settings in force, which may differ from the requested ones."""
    format = body.text.format if body.text else None
    return {
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "service_tier": "default",
        "temperature": float(params.temperature),  # JSON's encoder refuses a `LeftOutFloat`
        "text": {"format": msgspec.to_builtins(format) if format else PLAIN_TEXT},
        "tools": msgspec.to_builtins(served_tools(body)),
        "top_logprobs": params.logprobs or 0,
        "top_p": float(params.top_p),
        "truncation": "disabled",  # "auto" would drop what does not fit: here that is an error
    }


def _usage(spent: UsageBody, num_reasoning_tokens: int, told: Body | None) -> ResponseUsage:
    """``usage`` of this API, with the extra fields of chat completions."""
    inputs, outputs = spent.prompt_tokens_details, spent.completion_tokens_details
    return ResponseUsage(
        input_tokens=spent.prompt_tokens,
        input_tokens_details=inputs,
        output_tokens=spent.completion_tokens,
        output_tokens_details=OutputDetails(
            **asdict(outputs), reasoning_tokens=num_reasoning_tokens
        ),
        total_tokens=spent.total_tokens,
        closed_early=spent.closed_early,
        speculation=spent.speculation,
        cache_explanation=UNSET if told is None else told,
    )

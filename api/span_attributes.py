"""What spans say of a request: names as OpenTelemetry's conventions for generative AI have them.

Numbers and ids only: no text of anybody's.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.interface.request import Delta, Request
from ..core.interface.sampling_params import TokenSamplingParams
from .sampling_params import SamplingParams
from .visits import Visit

Value = str | bool | int | float | list[str]
_COMPLETIONS = "/v1/completions"


def operation_of(visit: Visit | None) -> str:
    """What is done, in a word."""
    is_text = visit is None or visit.route == _COMPLETIONS
    return "text_completion" if is_text else "chat"


def asked_of(request: Request) -> dict[str, Value]:
    """What it was asked for, as far as it is numbers."""
    params = request.sampling.params
    asked: dict[str, Value | None] = {
        "gen_ai.provider.name": "foretoken",
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": _fitting(params),
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _fitting(params: TokenSamplingParams) -> int | None:
    """The caller's own seed, if OTLP can hold it: it has 64 bits with a sign."""
    seed = params.seed if isinstance(params, SamplingParams) else None
    return seed if seed is not None and seed < 2**63 else None


def cost_of(request: Request, delta: Delta) -> dict[str, Value]:
    """What it cost and how it ended."""
    usage = request.usage
    cost: dict[str, Value] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
        "foretoken.num_preemptions": request.num_preemptions,
    }
    if usage.completion_tokens:
        cost["gen_ai.response.time_to_first_chunk"] = usage.time_to_first_token
    if delta.finish_reason is not None:
        cost["gen_ai.response.finish_reasons"] = [delta.finish_reason.value]
    if delta.error is not None:
        cost["error.type"] = type(delta.error).__name__
    return cost


def decoding_of(request: Request, seconds: Mapping[str, float]) -> dict[str, Value]:
    """All steps of its decoding in one; their parts were shared with those who ran beside it."""
    usage = request.usage
    told: dict[str, Value] = {
        "foretoken.decode.steps": usage.verify_steps,
        "foretoken.decode.proposed_tokens": usage.proposed_tokens,
        "foretoken.decode.accepted_tokens": usage.accepted_tokens,
    }
    for part, part_seconds in seconds.items():
        told[f"foretoken.decode.{part}_seconds"] = part_seconds
    return told

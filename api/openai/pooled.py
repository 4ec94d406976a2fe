"""Parts of the routes whose answer is no text: parameters and usage."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.interface.request import CacheOptions
from ..runtime.conversation.tools import read_cache
from ..runtime.pooled.pooled_prompts import Pooled, pool_params
from ..types.results import batch_usage
from ..types.sampling_params import SamplingParams
from .protocol import PooledPromptDetails, PooledUsage
from .schema import PooledRequest


def params_of(body: PooledRequest) -> SamplingParams:
    """Parameters of each prompt of a body; raises `InvalidRequest`."""
    seconds = None if body.deadline_ms is None else body.deadline_ms / 1000
    return pool_params(cache_salt=body.cache_salt, priority=body.priority, deadline=seconds)


def cache_of(body: PooledRequest) -> CacheOptions:
    """The use of the prefix cache that a body asks for."""
    return read_cache(body.cache, None, None)


def usage_body(pooled: Sequence[Pooled]) -> PooledUsage:
    """``usage`` of all prompts."""
    usage = batch_usage([each.usage for each in pooled])
    return PooledUsage(
        prompt_tokens=usage.prompt_tokens,
        total_tokens=usage.prompt_tokens,
        prompt_tokens_details=PooledPromptDetails(cached_tokens=usage.cached_tokens),
    )

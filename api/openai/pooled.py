"""Parts of the routes whose answer is no text: parameters, usage, replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from ...core.interface.request import CacheOptions
from ..runtime.conversation.tools import read_cache
from ..runtime.pooled.pooled_prompts import Pooled, PooledPrompts, pool_params
from ..serving.serve import Dialect
from ..serving.sse import Reply
from ..types.results import batch_usage
from ..types.sampling_params import SamplingParams
from .protocol import PooledPromptDetails, PooledUsage
from .schema import PooledRequest, refuse_unsupported_pooled

B = TypeVar("B", bound=PooledRequest)
Encode = Callable[[Sequence[Pooled]], object]
"""Makes the body of an answer."""


class PooledRoute(Dialect[B]):
    """A route whose answer is no text."""

    can_stream = False

    def check(self, body: B) -> None:
        """Raise `ApiError` 404 and `InvalidRequest` before anything is computed."""
        super().check(body)
        refuse_unsupported_pooled(body)


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


class PooledReply(Reply):
    """The numbers of all prompts as JSON of the body that ``encode`` makes, written in a thread."""

    def __init__(self, prompts: PooledPrompts, encode: Encode) -> None:
        self._prompts, self._encode = prompts, encode

    async def whole(self) -> bytes:
        """Compute and encode them; raises what `PooledPrompts.read` raises.

        No queue of other work refuses what is computed: the thread is one of asyncio's own.
        """
        pooled = await self._prompts.read()
        return await asyncio.to_thread(lambda: msgspec.json.encode(self._encode(pooled)))

    def close(self) -> None:
        """Abort what still runs."""
        self._prompts.close()

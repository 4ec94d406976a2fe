"""Parts of the routes whose answer is no text: parameters, usage, replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..runtime.pooled_prompts import Pooled, PooledPrompts, pool_params
from ..serving.serving_context import Service
from ..serving.sse import Reply
from ..types.results import batch_usage
from ..types.sampling_params import SamplingParams
from .protocol import PooledPromptDetails, PooledUsage
from .schema import PooledRequest

Encode = Callable[[Sequence[Pooled]], object]
"""Makes the body of an answer."""


def params_of(body: PooledRequest) -> SamplingParams:
    """Parameters of each prompt of a body; raises `InvalidRequest`."""
    seconds = None if body.deadline_ms is None else body.deadline_ms / 1000
    return pool_params(cache_salt=body.cache_salt, priority=body.priority, deadline=seconds)


def usage_body(pooled: Sequence[Pooled]) -> PooledUsage:
    """``usage`` of all prompts."""
    usage = batch_usage([each.usage for each in pooled])
    return PooledUsage(
        prompt_tokens=usage.prompt_tokens,
        total_tokens=usage.prompt_tokens,
        prompt_tokens_details=PooledPromptDetails(cached_tokens=usage.cached_tokens),
    )


class PooledReply(Reply):
    """The numbers of all prompts, as ``encode`` writes them, in a thread if to many bytes."""

    def __init__(
        self, service: Service, prompts: PooledPrompts, encode: Encode, *, num_bytes: int = 0
    ) -> None:
        self._service, self._prompts = service, prompts
        self._encode, self._num_bytes = encode, num_bytes

    async def whole(self) -> object:
        """Compute them and encode them; raises what `PooledPrompts.read` raises."""
        pooled = await self._prompts.read()
        return await self._service.llm.tokenizer.apart(
            self._num_bytes, lambda: self._encode(pooled)
        )

    def close(self) -> None:
        """Abort what still runs."""
        self._prompts.close()

"""PooledReply: the answer of a route that returns vectors or scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from ..runtime.pooled.pooled_prompts import Pooled, PooledPrompts
from .sse import Reply

Encode = Callable[[Sequence[Pooled]], object]
"""A function that builds the body from the results."""


class PooledReply(Reply):
    """A reply with the vectors or scores of all prompts, encoded as JSON in a thread."""

    def __init__(self, prompts: PooledPrompts, encode: Encode) -> None:
        self._prompts, self._encode = prompts, encode

    async def whole(self) -> bytes:
        """Compute the prompts and return the encoded body. Raises the errors of
        `PooledPrompts.read`.

        The body is encoded in asyncio's own thread pool. Its queue has no limit, so no
        computed result is lost.
        """
        pooled = await self._prompts.read()
        return await asyncio.to_thread(lambda: msgspec.json.encode(self._encode(pooled)))

    def close(self) -> None:
        """Abort the prompts that still run."""
        self._prompts.close()

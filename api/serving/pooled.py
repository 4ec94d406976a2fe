"""PooledReply: the answer of a route whose prompts get numbers in place of text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from ..runtime.pooled.pooled_prompts import Pooled, PooledPrompts
from .sse import Reply

Encode = Callable[[Sequence[Pooled]], object]
"""Makes the body of an answer."""


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

"""TokenStream: a one-slot mailbox between the engine and one reader."""

from __future__ import annotations

import asyncio

from .request import Delta, Request


class TokenStream:
    """Async iterator over the `Delta`s of one request.

    The engine never waits for a reader: deltas that were not read yet are merged into one, so a
    slow reader costs one slot, whatever it misses. The last delta has a finish reason; a failed
    request raises its error instead.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._slot: Delta | None = None
        self._ended = False  # the terminal delta was pushed; nothing may follow
        self._arrived = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether the engine is done with this request, read or not."""
        return self._ended

    def push(self, delta: Delta) -> None:
        """Called by the engine, on the event loop."""
        if self._ended:
            return
        if self._slot is None:
            self._slot = delta
        else:
            self._slot.merge(delta)
        self._ended = delta.terminal
        self._arrived.set()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Delta:
        while self._slot is None:
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        delta, self._slot = self._slot, None
        if delta.error is None:
            return delta
        if delta.token_ids:  # a slow reader is told as much as a fast one
            self._slot = Delta(error=delta.error)
            delta.error = None
            return delta
        raise delta.error.with_traceback(None)  # streams may share it: it would grow with each

"""Tables of faults: the common requests, served together, and what must hold for them.

Each fault strikes one request, "bad", or nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from foretoken.core.engine.engine import Engine
from foretoken.core.engine.inbox import TokenStream
from foretoken.core.errors import ForetokenError
from foretoken.core.interface.request import Delta, Request

BAD = "bad"
NAMES = ["one", "two", BAD, "three", "four"]
PROMPTS = {name: [1 + i, 2, 3, 1 + i, *([4, 5] * 3)] for i, name in enumerate(NAMES)}
NUM_TOKENS = 8
Told = list[Delta | ForetokenError]


class Reader:
    """Reads a stream to its end and counts the ends that the engine pushed into it."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.tokens: list[int] = []
        self.end: Delta | ForetokenError | None = None
        self.num_ends = 0
        push = stream.push

        def counted(delta: Delta) -> None:
            self.num_ends += delta.terminal
            push(delta)

        stream.push = counted  # type: ignore[method-assign]

    async def read(self) -> Reader:
        try:
            async for delta in self.stream:
                self.tokens += delta.token_ids
                self.end = delta
        except ForetokenError as error:
            self.end = error
        return self


Act = Callable[[Engine, Reader], None]


async def live(engine: Engine, requests: dict[str, Request], act: Act) -> dict[str, Reader]:
    """Serve these together, do something to the bad one, and audit what is left."""
    await engine.start()
    readers = {name: Reader(engine.submit(request)) for name, request in requests.items()}
    if BAD in readers:
        act(engine, readers[BAD])
    async with asyncio.timeout(60):
        await asyncio.gather(*(reader.read() for reader in readers.values()))
        assert engine.alive
        assert (await engine.audit())["ok"]
    assert engine.scheduler.num_requests == 0
    assert [reader.num_ends for reader in readers.values()] == [1] * len(readers)
    return readers


def no_act(engine: Engine, reader: Reader) -> None: ...

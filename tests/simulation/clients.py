"""Clients: each asks, reads in its own way, and leaves when it likes. All they hear is watched."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foretoken.core.engine.engine import Engine
from foretoken.core.engine.inbox import TokenStream
from foretoken.core.errors import (
    EngineDead,
    ForetokenError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
)
from foretoken.core.interface.request import Delta, Request

from .asks import Ask

if TYPE_CHECKING:
    from .world import World

MAX_BEHIND = 3  # what was committed, what the step under way yields, the end
STYLES = ("fast", "fast", "fast", "slow", "late", "leaves", "again", "cancelled")


@dataclass(eq=False)
class Told:
    """Everything that the engine pushed into one stream, and what its reader saw of it."""

    ask: Ask
    request: Request
    arrived: float
    tokens: list[int] = field(default_factory=list)
    echoed: list[int] = field(default_factory=list)  # tokens whose log-probabilities were told
    last: Delta | None = None
    ended: float | None = None
    is_aborted: bool = False  # by its client, before it had ended
    num_read: int = 0  # tokens
    num_behind: int = 0  # pushes since it was aborted

    @property
    def end(self) -> str:
        """stop, length, abort, error or nothing."""
        if self.last is None:
            return "nothing"
        return "error" if self.last.error is not None else str(self.last.finish_reason)

    def watch(
        self, stream: TokenStream, now: Callable[[], float], violation: Callable[[str], None]
    ) -> None:
        """See every push: one terminal, and nothing behind it."""
        push, name = stream.push, self.request.request_id

        def watched(delta: Delta) -> None:
            if self.last is not None:
                violation(f"{name} is told something after its end: {delta}")
            self.tokens += delta.token_ids
            self.echoed += [each.token_id for each in delta.prompt_logprobs]
            self.num_behind += self.is_aborted
            if self.num_behind > MAX_BEHIND:
                violation(f"{name} goes on after its abort")
            if delta.terminal:
                copy = Delta(finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
                copy.error, self.last, self.ended = delta.error, copy, now()
            push(delta)

        stream.push = watched  # type: ignore[method-assign]


class Client:
    """Asks a few times; ``style`` by lot each time."""

    def __init__(self, world: World, name: str, rng: random.Random) -> None:
        self._world, self._name, self._rng = world, name, rng

    @property
    def _engine(self) -> Engine:
        return self._world.engine

    async def run(self, num_asks: int, pause: float) -> None:
        """One request after another."""
        for number in range(num_asks):
            await asyncio.sleep(self._rng.expovariate(1.0) * pause)
            style = self._rng.choice(STYLES)
            ask = self._world.asks.one(is_plain=style == "again")
            await getattr(self, style)(ask, f"{self._name}.{number}")

    # -- ways to read ---------------------------------------------------------------------------

    async def fast(self, ask: Ask, request_id: str) -> None:
        if stream := await self._submit(ask, request_id):
            await self.read(*stream)

    async def slow(self, ask: Ask, request_id: str) -> None:
        if stream := await self._submit(ask, request_id):
            await self.read(*stream, pause=0.5)

    async def late(self, ask: Ask, request_id: str) -> None:
        """Reads nothing until all is over."""
        if stream := await self._submit(ask, request_id):
            await asyncio.sleep(self._rng.expovariate(0.1))
            await self.read(*stream)

    async def leaves(self, ask: Ask, request_id: str) -> None:
        """After some deltas, maybe none, maybe at once."""
        if stream := await self._submit(ask, request_id):
            if self._rng.random() < 0.5:
                await asyncio.sleep(self._rng.expovariate(20.0))
            await self.read(*stream, most=self._rng.randrange(3))
            self._abort(stream[0])
            if self._rng.random() < 0.3:
                await self.read(*stream)

    async def cancelled(self, ask: Ask, request_id: str) -> None:
        """Ask in a task of its own, and cancel that wherever it stands."""
        task = asyncio.create_task(self.guarded(ask, request_id))
        await asyncio.sleep(self._rng.expovariate(10.0))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def guarded(self, ask: Ask, request_id: str) -> None:
        if stream := await self._submit(ask, request_id):
            try:
                await self.read(*stream)
            finally:
                self._abort(stream[0])

    async def again(self, ask: Ask, request_id: str) -> None:
        """Leaves and asks under the same id at once, or as soon as the first has ended."""
        first = await self._submit(ask, request_id)
        if first is None:
            return
        await self.read(*first, most=self._rng.randrange(2))
        self._abort(first[0])
        try:
            second = self._world.submit(ask, request_id)
        except InvalidRequest:
            if first[1].ended:
                self._world.violation(f"{request_id} has ended and its id is still in use")
            await self.read(*first)
            second = await self._submit(ask, request_id)
        except (EngineDead, QueueFull):
            return
        if second is not None:
            await self.read(*second)

    # -- what they are made of ------------------------------------------------------------------

    async def _submit(self, ask: Ask, request_id: str) -> tuple[Told, TokenStream] | None:
        """None where it is refused for good reason."""
        for _ in range(4):
            try:
                return self._world.submit(ask, request_id)
            except QueueFull as full:
                if not 1.0 <= full.retry_after <= 60.0:
                    self._world.violation(f"come back in {full.retry_after} s")
                await asyncio.sleep(full.retry_after)
            except PromptTooLong:
                if len(ask.prompt) < self._engine.scheduler.capacity:
                    self._world.violation("a prompt that fits is refused")
                return None
            except EngineDead:
                if self._engine.alive and not self._engine.draining:
                    self._world.violation("a living engine refuses as if it were dead")
                return None
        return None

    def _abort(self, told: Told) -> None:
        if told.last is None:
            told.is_aborted = True
        self._engine.abort(told.request.request_id)

    async def read(
        self, told: Told, stream: TokenStream, *, pause: float = 0.0, most: int | None = None
    ) -> None:
        """Up to the end, or ``most`` deltas; what is read is what was told, in order."""
        num_deltas = 0
        try:
            while num_deltas != most:
                delta = await anext(stream)
                num_deltas += 1
                self._took(told, delta)
                if pause:
                    await asyncio.sleep(self._rng.expovariate(1.0) * pause)
        except StopAsyncIteration:
            pass
        except ForetokenError as error:
            if told.last is None or told.last.error is not error:
                self._world.violation(f"a reader of {told.request.request_id} is told {error!r}")
        else:
            return
        if told.last is None or told.num_read != len(told.tokens):
            self._world.violation(f"a reader of {told.request.request_id} missed something")

    def _took(self, told: Told, delta: Delta) -> None:
        start, told.num_read = told.num_read, told.num_read + len(delta.token_ids)
        if delta.token_ids != told.tokens[start : told.num_read]:
            self._world.violation(f"a reader of {told.request.request_id} is told other tokens")

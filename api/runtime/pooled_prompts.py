"""PooledPrompts: the prompts of one call, each for the numbers of its last row, not for text."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...core.errors import InvalidRequest, QueueFull
from ...core.interface.request import Usage
from ...core.interface.sampling import Pooling
from ..types.request_context import random_id
from ..types.sampling_params import SamplingParams
from .engine_client import EngineClient
from .generation import Answer
from .preprocess import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """The numbers of one prompt, and what they cost."""

    token_ids: Sequence[int]
    numbers: array[float]
    usage: Usage


def pool_params(
    *, cache_salt: str | None = None, priority: int | None = None, deadline: float | None = None
) -> SamplingParams:
    """Parameters of a request that generates nothing; ``deadline`` in seconds."""
    return SamplingParams(cache_salt=cache_salt, priority=priority or 0, deadline=deadline)


def entry_names(param: str, count: int) -> Callable[[int], str]:
    """Names of the entries of a field, for errors; a single one has the field's own."""
    return lambda index: param if count == 1 else f"{param}[{index}]"


class PooledPrompts:
    """Prompts that were checked; `read` computes them, some at a time. `close` it in a ``finally``.

    A call gives the engine no more of its prompts than may run at once, so the queue is left to
    others. The first one is refused where the queue is full; later ones wait for their turn.
    """

    def __init__(
        self,
        llm: EngineClient,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        pooling: Pooling,
    ) -> None:
        self._llm, self._prompts = llm, prompts
        self._params, self._pooling = params, pooling
        self._id = f"pool-{random_id()}"
        self._open: dict[int, Answer] = {}
        self._has_room = asyncio.Event()  # one of its prompts is done

    @classmethod
    async def checked(
        cls,
        llm: EngineClient,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        pooling: Pooling,
        *,
        name: Callable[[int], str],
    ) -> PooledPrompts:
        """Tokenise and check all prompts; nothing is submitted.

        ``name``: the field of each, for errors. Raises `InvalidRequest` and `EngineDead`.
        """
        checked = []
        for index, prompt in enumerate(prompts):
            try:
                checked.append(await llm.check(prompt, params, pooling=pooling))
            except InvalidRequest as error:
                if error.param == "prompt":
                    error.param = name(index)
                raise
        return cls(llm, checked, params, pooling)

    async def read(self) -> list[Pooled]:
        """The numbers of all prompts, in order; the first failure ends the rest.

        Raises `QueueFull`, `DeadlineExceeded`, `EngineDead` and what the engine raises.
        """
        places = asyncio.Semaphore(self._llm.engine.limits.max_running)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._compute(index, places))
                    for index in range(len(self._prompts))
                ]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self.close()
        return [task.result() for task in tasks]

    def close(self) -> None:
        """Abort prompts that have not ended; may be called twice."""
        for index in list(self._open):
            self._forget(index)

    async def _compute(self, index: int, places: asyncio.Semaphore) -> Pooled:
        async with places:
            answer = await self._submitted(index)
            try:
                numbers = await answer.generations[0].pooled()
            finally:
                self._forget(index)
            return Pooled(token_ids=self._prompts[index], numbers=numbers, usage=answer.usage)

    async def _submitted(self, index: int) -> Answer:
        """Submit a prompt; where the queue is full, when another one of the call is done."""
        while True:
            self._has_room.clear()
            try:
                answer = await self._llm.open(
                    self._prompts[index],
                    self._params,
                    request_id=f"{self._id}-{index}",
                    pooling=self._pooling,
                )
            except QueueFull:
                if not self._open:
                    raise
                await self._has_room.wait()
            else:
                self._open[index] = answer
                return answer

    def _forget(self, index: int) -> None:
        if (answer := self._open.pop(index, None)) is not None:
            self._llm.forget(answer)
            self._has_room.set()

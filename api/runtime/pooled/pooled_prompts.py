"""PooledPrompts: the prompts of one call that returns vectors or scores."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ....core.errors import ForetokenError, QueueFull
from ....core.interface.request import DEFAULT_CACHE, CacheOptions, Usage
from ....core.interface.sampling import Pooling
from ...types.request_context import EndedAnswer, note_answer, random_id
from ...types.sampling_params import SamplingParams
from ..engine_client import EngineClient
from ..generation import Answer

PromptOf = Callable[[int], Awaitable[Sequence[int]]]
"""Returns the checked token ids of an entry. Raises `InvalidRequest`, which names the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """The vector or scores of one prompt, its usage, and its token ids if they are kept."""

    numbers: array[float]
    usage: Usage
    token_ids: Sequence[int] = ()


def pool_params(
    *,
    cache_salt: str | None = None,
    lora: str | None = None,
    priority: int | None = None,
    deadline: float | None = None,
) -> SamplingParams:
    """Return the parameters of a request that generates nothing. ``deadline`` is in seconds."""
    return SamplingParams(
        cache_salt=cache_salt, lora=lora, priority=priority or 0, deadline=deadline
    )


def entry_names(param: str, count: int) -> Callable[[int], str]:
    """Return a function that returns the name of a field's entry from its index, for errors.

    The name has no index if the field has a single entry.
    """
    return lambda index: param if count == 1 else f"{param}[{index}]"


class PooledPrompts:
    """A call of ``count`` prompts, computed by `read`. Its owner must `close` it in a ``finally``.

    ``prompt_of`` and ``pooling_of`` return the token ids of a prompt and what to read, from its
    index.

    Prompts are prepared and submitted only while fewer prompts of the call run than may run at
    once, so that the queue stays available to other callers and memory does not grow with
    ``count``. A call whose first prompt finds the queue full is refused; later prompts wait for
    room.
    """

    def __init__(
        self,
        llm: EngineClient,
        count: int,
        prompt_of: PromptOf,
        params: SamplingParams,
        pooling_of: Callable[[int], Pooling],
        *,
        cache: CacheOptions = DEFAULT_CACHE,
        keeps_ids: bool = False,
    ) -> None:
        self._llm, self._count, self._prompt_of = llm, count, prompt_of
        self._params, self._pooling_of, self._cache = params, pooling_of, cache
        self._keeps_ids = keeps_ids
        self._id = f"pool-{random_id()}"
        self._open: dict[int, Answer] = {}
        self._submitting = asyncio.Lock()  # only one prompt at a time retries a full queue
        self._is_accepted = False  # whether a prompt of the call was accepted

    async def read(self) -> list[Pooled]:
        """Return the results of all prompts, in order. If a prompt fails, the others are aborted.

        Raises `InvalidRequest`, `QueueFull`, `DeadlineExceeded`, `EngineDead` and the engine's
        errors.
        """
        found: dict[int, Pooled] = {}
        waiting = iter(range(self._count))

        async def compute_some() -> None:
            for index in waiting:
                found[index] = await self._compute(index)

        try:
            with self._llm.call():
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self._count, self._num_places)):
                        group.create_task(compute_some())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self.close()
        return [found[index] for index in range(self._count)]

    @property
    def _num_places(self) -> int:
        return max(1, self._llm.engine.limits.max_running)

    def close(self) -> None:
        """Abort the prompts that still run. May be called twice."""
        for index in list(self._open):
            self._forget(index)

    async def _compute(self, index: int) -> Pooled:
        token_ids = array("i", await self._prompt_of(index))
        answer = await self._submitted(index, token_ids)
        try:
            numbers = await answer.generations[0].pooled()
        finally:
            self._forget(index)
        if not np.isfinite(np.frombuffer(numbers, np.float32)).all():
            raise ForetokenError("the model computed a value that is not finite")
        return Pooled(
            numbers=numbers, usage=answer.usage, token_ids=token_ids if self._keeps_ids else ()
        )

    async def _submitted(self, index: int, token_ids: Sequence[int]) -> Answer:
        """Submit a prompt and return its answer.

        If the queue is full, wait for room, or raise `QueueFull` if no prompt of the call has been
        accepted yet.
        """
        async with self._submitting:
            while True:
                try:
                    answer = await self._llm.open(
                        token_ids,
                        self._params,
                        request_id=f"{self._id}-{index}",
                        cache=self._cache,
                        pooling=self._pooling_of(index),
                    )
                except QueueFull as full:
                    if not self._is_accepted:
                        raise
                    await self._llm.wait_for_room(full.retry_after)
                else:
                    self._is_accepted = True
                    self._open[index] = answer
                    return answer

    def _forget(self, index: int) -> None:
        if (answer := self._open.pop(index, None)) is not None:
            self._llm.forget(answer)
            ends = tuple(answer.finish_reasons)
            note_answer(EndedAnswer(answer.request_id, answer.usage, ends))

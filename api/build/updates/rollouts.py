"""Rollouts: pause, resume and weight updates of an engine in this process."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from ....core.engine.rollouts.updatable_engine import PauseMode, UpdatableEngine
from ....core.errors import EngineDead
from .new_weights import NewWeights
from .refusal import UpdateConflict, WeightsRefused

T = TypeVar("T")
logger = logging.getLogger(__name__)
MAX_VERSION_LEN = 256  # characters
DRAFT_DELAY = 2.0  # seconds for the first steps of a new version, which rounding would slow down
DRAFT = "draft."  # prefix of the names of the self-draft's tensors


class Exchange(Protocol):
    """The served weights; `WeightExchange` describes the methods, which block."""

    @property
    def max_bytes(self) -> int:
        """Size in bytes that one file of new weights cannot exceed."""

    def prepare(self, weights: NewWeights) -> Callable[[], None]:
        """Check and load new weights; return the function that copies them."""

    def prepare_draft(self) -> Callable[[], None] | None:
        """Round the served weights for the self-draft; return the function that copies them."""

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each tensor in memory, by its name."""

    def differences(self, weights: NewWeights) -> list[str]:
        """Return the names of served tensors that differ from a load of ``weights``."""


class WeightChecksums(NamedTuple):
    """SHA-256 of the weights in memory, in hexadecimal, and their version.

    ``tensors``: digests by the names of packed tensors. Two engines with the same digests have the
    same weights; other kernels or other options pack the same weights in another way. ``target``:
    digest of all of them except the self-draft's.
    """

    weight_version: str
    target: str
    tensors: dict[str, str]


class Rollouts:
    """Control of an engine whose weights a trainer replaces. Belongs to one event loop."""

    def __init__(self, engine: UpdatableEngine, exchange: Exchange) -> None:
        self._engine, self._exchange = engine, exchange
        self._is_updating = False
        self._weights = asyncio.Lock()  # held while the served weights are written or compared
        self._tasks: set[asyncio.Task[Any]] = set()
        self._drafting: asyncio.Task[None] | None = None  # rounds the last version
        self._is_awaited = asyncio.Event()  # set if a caller waits for the self-draft

    @property
    def weight_version(self) -> str:
        """Version of the present weights: "0" at the start."""
        return self._engine.weight_version

    @property
    def max_bytes(self) -> int:
        """Size in bytes that one file of new weights cannot exceed."""
        return self._exchange.max_bytes

    @property
    def num_aborts(self) -> int:
        """Number of pauses that ended the accepted requests."""
        return self._engine.num_aborts

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._engine.is_paused

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Pause as `UpdatableEngine.pause` does."""
        await self._engine.pause(mode)

    def resume(self) -> None:
        """End a pause."""
        self._engine.resume()

    async def update(self, weights: NewWeights, *, version: str | None = None) -> str:
        """Replace the weights by new ones; return the new version's name.

        The new weights are checked and loaded while requests run with the old ones, and are copied
        over these between two steps. ``version``: name of the new version, by default the number of
        updates. A caller that goes away does not end the update. Raises `WeightsRefused`; nothing
        has changed then.
        """
        if version is not None and not 0 < len(version) <= MAX_VERSION_LEN:
            message = f"weight_version must have 1 to {MAX_VERSION_LEN} characters"
            raise WeightsRefused(message, param="weight_version")
        if self._is_updating:
            raise UpdateConflict("another update of the weights is under way")
        self._is_updating = True
        return await self._to_the_end(self._update(weights, version))

    async def checksums(self) -> WeightChecksums:
        """Return the checksums of the weights in memory."""
        return await self._to_the_end(self._checksums())

    async def differences(self, weights: NewWeights) -> list[str]:
        """Return the names of packed tensors that differ from a load of ``weights``.

        Raises `WeightsRefused`, also for weights that an update would refuse.
        """
        return await self._to_the_end(self._differences(weights))

    async def settle(self) -> None:
        """Wait until the self-draft follows the present weights."""
        if self._drafting is not None:
            self._is_awaited.set()
            await asyncio.shield(self._drafting)

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, which goes on if the caller is cancelled.

        Its thread cannot be stopped, and must not meet the next one.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _update(self, weights: NewWeights, version: str | None) -> str:
        try:
            await self.settle()  # at most one more copy of the weights is in memory
            copy = await asyncio.to_thread(self._exchange.prepare, weights)
            async with self._weights:
                name = await self._engine.swap_weights(copy, version)
            self._is_awaited.clear()
            self._drafting = asyncio.create_task(self._follow())
            return name
        finally:
            self._is_updating = False

    async def _follow(self) -> None:
        """Let the self-draft follow the weights, while the engine serves them."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_awaited.wait(), DRAFT_DELAY)
        try:
            async with self._weights:
                copy = await asyncio.to_thread(self._exchange.prepare_draft)
                if copy is not None:
                    await self._engine.between_steps(copy)
        except EngineDead:
            logger.debug("the engine ended before the self-draft followed the weights")
        except Exception:  # else each later update would raise it
            logger.exception("the self-draft keeps the weights of an earlier version")

    async def _checksums(self) -> WeightChecksums:
        await self.settle()
        async with self._weights:
            version = self.weight_version
            tensors = await asyncio.to_thread(self._exchange.checksums)
        whole = hashlib.sha256()
        for name, digest in sorted(tensors.items()):
            if not name.startswith(DRAFT):
                whole.update(f"{name} {digest}\n".encode())
        return WeightChecksums(version, whole.hexdigest(), tensors)

    async def _differences(self, weights: NewWeights) -> list[str]:
        async with self._weights:
            return await asyncio.to_thread(self._exchange.differences, weights)

"""Rollouts: pause, resume and weight updates of an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ....core.engine.rollouts.updatable_engine import PauseMode, UpdatableEngine
from .new_weights import NewWeights
from .refusal import UpdateConflict, WeightsRefused

MAX_VERSION_LEN = 256  # characters


class Prepare(Protocol):
    """Checks and loads new weights; returns the function that copies them."""

    def __call__(self, weights: NewWeights) -> Callable[[], None]:
        """Block until the weights are loaded. Raises `WeightsRefused`."""


class Rollouts:
    """Control of an engine whose weights a trainer replaces. Belongs to one event loop.

    ``max_bytes``: size that one file of new weights cannot exceed.
    """

    def __init__(self, engine: UpdatableEngine, prepare: Prepare, max_bytes: int) -> None:
        self._engine, self._prepare, self.max_bytes = engine, prepare, max_bytes
        self._is_updating = False

    @property
    def weight_version(self) -> str:
        """Version of the present weights: "0" at the start."""
        return self._engine.weight_version

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
        updates. Raises `WeightsRefused`; nothing has changed then.
        """
        if version is not None and not 0 < len(version) <= MAX_VERSION_LEN:
            message = f"weight_version must have 1 to {MAX_VERSION_LEN} characters"
            raise WeightsRefused(message, param="weight_version")
        if self._is_updating:
            raise UpdateConflict("another update of the weights is under way")
        self._is_updating = True
        try:
            copy = await asyncio.to_thread(self._prepare, weights)
            return await self._engine.swap_weights(copy, version)
        finally:
            self._is_updating = False

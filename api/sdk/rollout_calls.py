"""RolloutCalls: the methods of `LLM` for a trainer that replaces the weights."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ...core.engine.rollouts.updatable_engine import PauseMode
    from ..build.updates.rollouts import WeightChecksums
    from .async_llm import AsyncLLM

T = TypeVar("T")


class RolloutCalls:
    """Pause, resume and weight updates; they need the option ``allow_weight_updates``."""

    _llm: AsyncLLM

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the LLM, and return its result."""
        raise NotImplementedError

    def pause(self, mode: PauseMode = "abort") -> None:
        """Run no step until `resume`, like `AsyncLLM.pause`."""
        self._run(self._llm.pause(mode))

    def resume(self) -> None:
        """End a pause; without a pause nothing happens."""
        self._run(self._llm.resume())

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._llm.is_paused

    @property
    def weight_version(self) -> str:
        """Version of the present weights. Raises `InvalidRequest` without the option."""
        return self._llm.weight_version

    def update_weights(
        self,
        path: str | os.PathLike[str],
        *,
        sha256: Mapping[str, str] | None = None,
        weight_version: str | None = None,
    ) -> str:
        """Replace the weights by those in a folder of safetensors, like `AsyncLLM.update_weights`.

        Returns the new version's name. Raises `WeightsRefused`; then nothing has changed.
        """
        update = self._llm.update_weights
        return self._run(update(path, sha256=sha256, weight_version=weight_version))

    def update_weights_from_shared_memory(
        self, name: str, size: int, *, sha256: str | None = None, weight_version: str | None = None
    ) -> str:
        """Replace the weights, like `AsyncLLM.update_weights_from_shared_memory`.

        Returns the new version's name. Raises `WeightsRefused`; then nothing has changed.
        """
        update = self._llm.update_weights_from_shared_memory
        return self._run(update(name, size, sha256=sha256, weight_version=weight_version))

    def weight_checksums(self) -> WeightChecksums:
        """Return the SHA-256 of the weights in memory, like `AsyncLLM.weight_checksums`."""
        return self._run(self._llm.weight_checksums())

    def weight_differences(self, path: str | os.PathLike[str]) -> list[str]:
        """Return packed tensors that differ from a folder's, like `AsyncLLM.weight_differences`."""
        return self._run(self._llm.weight_differences(path))

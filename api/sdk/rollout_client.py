"""RolloutClient: the methods of `AsyncLLM` for a trainer that replaces the weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from ...core.errors import InvalidRequest
from ..build.updates.new_weights import SharedWeights, WeightFolder
from ..runtime.engine_client import EngineClient

if TYPE_CHECKING:
    from ...core.engine.rollouts.updatable_engine import PauseMode
    from ..build.updates.rollouts import Rollouts, WeightChecksums

FLAG = "allow_weight_updates"


class RolloutClient(EngineClient):
    """Pause, resume and weight updates; they need the option ``allow_weight_updates``.

    The usage of an answer with one choice then has ``weight_versions``: for each version that
    computed a part of the answer, the number of its first token and its name.
    """

    @override
    async def close(self, *, drain_seconds: float = 0.0) -> None:
        if self._built is not None and self._built.rollouts is not None:
            self._built.rollouts.resume()  # else nothing would end within ``drain_seconds``
        await super().close(drain_seconds=drain_seconds)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Run no step until `resume`; return when none runs.

        Running requests end with the finish reason "abort" (abort), all accepted requests run to
        their end first (wait), or running requests stop where they are and go on after `resume`
        (keep). Later requests wait in the queue. Raises `InvalidRequest` and `EngineDead`.
        """
        await (await self._rollouts()).pause(mode)

    async def resume(self) -> None:
        """End a pause; without a pause nothing happens."""
        (await self._rollouts()).resume()

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused. False before `start`."""
        rollouts = None if self._built is None else self._built.rollouts
        return rollouts is not None and rollouts.is_paused

    @property
    def weight_version(self) -> str:
        """Version of the present weights: "0" at the start, then the number of updates or the
        name that an update gave.

        Raises `InvalidRequest` without the option.
        """
        return _required(self.built.rollouts).weight_version

    async def update_weights(
        self,
        path: str | os.PathLike[str],
        *,
        sha256: Mapping[str, str] | None = None,
        weight_version: str | None = None,
    ) -> str:
        """Replace the weights by those in a folder of safetensors; return the new version's name.

        The tensors must have the names, shapes and dtypes of the served model's files, and finite
        values. They are loaded while requests run with the old weights. Requests that run on keep
        their KV of the old weights. ``sha256``: digests of files by file name. Raises
        `WeightsRefused`, an `InvalidRequest` that names tensors; then nothing has changed.
        """
        rollouts = await self._rollouts()
        version = await rollouts.update(
            WeightFolder(Path(path), sha256 or {}), version=weight_version
        )
        self.prompts.flush()  # cache misses are not explained by prompts of other weights
        return version

    async def update_weights_from_shared_memory(
        self, name: str, size: int, *, sha256: str | None = None, weight_version: str | None = None
    ) -> str:
        """Replace the weights by the bytes of a safetensors file in POSIX shared memory.

        Linux only. ``name`` and ``size`` (bytes) are the block's, which must not change until the
        call returns. Everything else is as in `update_weights`.
        """
        rollouts = await self._rollouts()
        weights = SharedWeights(name, size, sha256)
        version = await rollouts.update(weights, version=weight_version)
        self.prompts.flush()
        return version

    async def weight_checksums(self) -> WeightChecksums:
        """Return the SHA-256 of the weights in memory: of each packed tensor, and of all.

        Engines with the same options and kernels have the same digests if and only if they have the
        same weights. Raises `InvalidRequest` and `EngineDead`.
        """
        return await (await self._rollouts()).checksums()

    async def weight_differences(self, path: str | os.PathLike[str]) -> list[str]:
        """Return the names of packed tensors in memory that differ from a load of a folder.

        The list is empty if the engine serves exactly the folder's weights. Raises `WeightsRefused`
        for a folder that an update would refuse.
        """
        return await (await self._rollouts()).differences(WeightFolder(Path(path)))

    async def _rollouts(self) -> Rollouts:
        await self.start()
        return _required(self.built.rollouts)


def _required(rollouts: Rollouts | None) -> Rollouts:
    if rollouts is None:
        raise InvalidRequest(f"weight updates need the option {FLAG}", param=FLAG)
    return rollouts

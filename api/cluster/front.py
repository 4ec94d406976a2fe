"""FrontClient: the model of a server whose engines are replicas in other processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from ..build.built import Built
from ..build.model_files import find_model
from ..runtime.engine_client import EngineClient
from ..runtime.serving_engine import ServingEngine
from ..serving.settings import FrontOptions
from ..text.tokenizer import Tokenizer
from ..types.results import Body
from .replicas import Replicas
from .routing import Route
from .wire import built_of

DEFAULT_REPLICAS, DEFAULT_FAILOVER_SECONDS = 1, 30.0


class FrontClient(EngineClient):
    """Serves by the replicas that dial in at ``front.front``; nothing is computed here.

    ``model`` has the tokenizer and the chat template. `start` waits for the first replica, which
    says what is served. Raises `InvalidRequest` for an address that is none, or is open to other
    machines without a key.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None,
        front: FrontOptions,
        **options: Any,  # noqa: ANN401 - EngineConfig checks them
    ) -> None:
        from .transport import check_address, cluster_key  # needs an extra

        super().__init__(model, **options)
        assert front.front is not None
        self._address, self._key = front.front, cluster_key()
        check_address(self._address, self._key)
        self._front = front
        self._replicas: Replicas | None = None

    def replicas(self) -> list[Body]:
        """The replicas that are there."""
        return [] if self._replicas is None else self._replicas.describe()

    async def when_complete(self) -> None:
        """Wait until all wanted replicas are there."""
        if self._replicas is not None:
            await self._replicas.complete()

    async def _build(self) -> Built[ServingEngine]:
        """Wait for the first replica. Raises `InvalidRequest` if it has another tokenizer."""
        path, tokenizer = await asyncio.to_thread(_find, self._model)
        front, dumps = self._front, self.config.dump_dir
        replicas = self._replicas = Replicas(
            self._address,
            key=self._key,
            tokenizer=tokenizer,
            wanted=front.replicas or DEFAULT_REPLICAS,
            route=Route(front.route or Route.KV),
            failover_seconds=(
                DEFAULT_FAILOVER_SECONDS
                if front.failover_seconds is None
                else front.failover_seconds
            ),
            dump_dir=None if dumps is None else Path(dumps),
        )
        try:
            await replicas.start()
            return built_of(await replicas.first(), replicas, path)
        except BaseException:
            await replicas.close()
            raise


def _find(model: str | os.PathLike[str] | None) -> tuple[Path, str]:
    """The files of a model and the hash of its tokenizer; blocking. Raises `ModelLoadError`."""
    path = find_model(model).path
    tokenizer = Tokenizer.load(path, max_model_len=1)
    try:
        return path, tokenizer.fingerprint()
    finally:
        tokenizer.close()

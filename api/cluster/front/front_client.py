"""FrontClient: the model of a server whose engines are replicas in other processes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ....core.errors import ForetokenError
from ...build.built import Built
from ...build.model_files import find_model
from ...runtime.engine_client import EngineClient
from ...runtime.serving_engine import ServingEngine
from ...serving.settings import FrontOptions
from ...text.tokenizer import Tokenizer
from ...types.results import Body
from ..wire.greeting import built_of
from ..wire.messages import Hello
from .replicas import Replicas
from .routing import Route

logger = logging.getLogger(__name__)
DEFAULT_FAILOVER_SECONDS = 30.0
ANY_PORT = "tcp://127.0.0.1:0"
CHECK_SECONDS = 2.0  # between looks at what starts replicas


class Launcher(Protocol):
    """Starts replicas, and changes how many there are and what they are."""

    @property
    def update(self) -> Body | None:
        """The last update of all replicas: its ``state``, and the ``reason`` if it was undone."""

    async def start(self, address: str, num_joined: Callable[[], int]) -> None:
        """Ask for replicas that dial in at an address. Raises `ForetokenError`.

        ``num_joined`` returns how many have ever joined there.
        """

    async def failure(self) -> str | None:
        """Why replicas cannot be started; None if all is well."""

    async def change(
        self, bounds: tuple[int, int] | None, options: Mapping[str, Any] | None
    ) -> None:
        """Change the fewest and most; with options replace all, one after the other.

        ``options``: of the engine, beside those that they have. Returns when it is asked for;
        `update` has the outcome. Raises `InvalidRequest` and `ForetokenError`.
        """

    async def close(self) -> None:
        """Stop them."""


class FrontClient(EngineClient):
    """Serves by the replicas that dial in at ``front.front``; nothing is computed here.

    ``model`` has the tokenizer and the chat template. `start` waits for the first replica, which
    says what is served. Raises `InvalidRequest` for an address that is none, or is open to other
    machines without a key. ``launcher`` starts the replicas; without one they come by themselves.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None,
        front: FrontOptions,
        launcher: Launcher | None = None,
        **options: Any,  # noqa: ANN401 - EngineConfig checks them
    ) -> None:
        from ..wire.transport import check_address, cluster_key  # needs an extra

        super().__init__(model, **options)
        self._address, self._key = front.front or ANY_PORT, cluster_key()
        check_address(self._address, self._key)
        self._front, self._launcher = front, launcher
        self._watch: asyncio.Task[None] | None = None
        self._replicas: Replicas | None = None

    def replicas(self) -> Body:
        """The replicas that are there, and how the last update of all of them goes on."""
        rows = [] if self._replicas is None else self._replicas.describe()
        return {"replicas": rows, "update": self._launcher and self._launcher.update}

    async def change_replicas(
        self, bounds: tuple[int, int] | None, options: Mapping[str, Any] | None
    ) -> None:
        """Change the fewest and most replicas, or replace them by some with other engine options.

        Raises `InvalidRequest` where they come by themselves, and what the launcher raises.
        """
        if self._launcher is None:
            await super().change_replicas(bounds, options)
        else:
            await self._launcher.change(bounds, options)

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
            wanted=front.replicas or front.bounds[0],
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
            first = asyncio.ensure_future(replicas.first())
            if self._launcher is not None:
                await self._launcher.start(replicas.address, lambda: replicas.num_joined)
                await self._while_launching(self._launcher, first)
                self._watch = asyncio.create_task(self._watch_launcher(self._launcher, replicas))
            return replace(built_of(await first, replicas, path), adapters=replicas.adapters)
        except BaseException:
            await replicas.close()
            if self._launcher is not None:
                await self._launcher.close()
            raise

    async def _while_launching(self, launcher: Launcher, first: asyncio.Future[Hello]) -> None:
        """Wait for the first replica. Raises `ForetokenError` if none can come."""
        while not (await asyncio.wait((first,), timeout=CHECK_SECONDS))[0]:
            if (reason := await launcher.failure()) is not None:
                raise ForetokenError(f"the replicas did not start: {reason}")

    async def _watch_launcher(self, launcher: Launcher, replicas: Replicas) -> None:
        """Log once when nothing starts replicas any longer, and once when it does again."""
        known: str | None = None
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            reason = await launcher.failure()
            if reason is not None and reason != known:
                logger.warning("%s", reason)
            elif reason is None and known is not None:
                logger.info("replicas are started again")
            known = reason
            replicas.metrics.not_replaced.set(known is not None)

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for a time, stop the replicas."""
        if self._watch is not None:
            self._watch.cancel()
        await super().close(drain_seconds=drain_seconds)
        if self._launcher is not None:
            await self._launcher.close()


def _find(model: str | os.PathLike[str] | None) -> tuple[Path, str]:
    """The files of a model and the hash of its tokenizer; blocking. Raises `ModelLoadError`."""
    path = find_model(model).path
    tokenizer = Tokenizer.load(path, max_model_len=1)
    try:
        return path, tokenizer.fingerprint()
    finally:
        tokenizer.close()

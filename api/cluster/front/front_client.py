"""FrontClient: the model of a server whose engines are replicas in other processes."""

from __future__ import annotations

import asyncio
import logging
import os
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from ....core.errors import ForetokenError, Unavailable
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
CHECK_SECONDS = 2.0  # interval between checks of the launcher


class Launcher(Protocol):
    """Starts replicas, and changes their number."""

    async def start(self, address: str) -> None:
        """Begin to start replicas, which connect to ``address``. Raises `ForetokenError`."""

    async def failure(self) -> str | None:
        """Return why replicas cannot be started, or None."""

    async def change(self, least: int, most: int) -> None:
        """Request between ``least`` and ``most`` replicas. Raises `ForetokenError`."""

    async def close(self) -> None:
        """Stop the replicas."""


class FrontClient(EngineClient):
    """An `EngineClient` whose engines are replicas that connect to ``front.front``.

    ``model``: source of the tokenizer and the chat template. `prepare` listens for replicas, and
    `start` waits for the first one, whose greeting describes the model. ``launcher`` starts the
    replicas; if it is None, they are started by other means. Raises `InvalidRequest` for an invalid
    address, or for one that other machines can reach while no cluster key is set.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None,
        front: FrontOptions,
        launcher: Launcher | None = None,
        **options: Any,  # noqa: ANN401 - EngineConfig checks them
    ) -> None:
        from ..wire.transport import check_address, cluster_key  # imports zmq, which is optional

        super().__init__(model, **options)
        self._address, self._key = front.front or ANY_PORT, cluster_key()
        check_address(self._address, self._key)
        self._front, self._launcher = front, launcher
        self._watch: asyncio.Task[None] | None = None
        self._path = Path()  # path of the model, which `prepare` finds
        self._replicas: Replicas | None = None

    def replicas(self) -> Body:
        """Return the connected replicas."""
        return {"replicas": [] if self._replicas is None else self._replicas.describe()}

    async def change_replicas(self, least: int, most: int) -> None:
        """Change the least and the greatest number of replicas.

        Raises `InvalidRequest` without a launcher, and the launcher's errors.
        """
        if self._launcher is None:
            await super().change_replicas(least, most)
        else:
            await self._launcher.change(least, most)

    async def when_complete(self) -> None:
        """Wait until all wanted replicas have connected."""
        if self._replicas is not None:
            await self._replicas.complete()

    async def prepare(self) -> None:
        """Listen for replicas; until `start` is done, a server refuses requests.

        Raises `EngineDead` after `close`, and the errors of `find_model` and `Replicas.start`.
        """
        self._check_open()
        if self._replicas is None:
            self._path, tokenizer = await asyncio.to_thread(_find, self._model)
            self._replicas = self._listening(tokenizer)
        await self._replicas.start()

    def _listening(self, tokenizer: str) -> Replicas:
        front, dumps = self._front, self.config.dump_dir
        return Replicas(
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

    @cached_property
    def engine(self) -> ServingEngine:
        """All present and future replicas; available after `prepare`."""
        if self._replicas is None:
            raise self._absence
        return self._replicas

    @property
    def _absence(self) -> ForetokenError:
        reason = None if self._replicas is None else self._replicas.readiness
        return Unavailable(reason or "the server is starting")

    async def _build(self) -> Built[ServingEngine]:
        """Wait for the first replica and return its model.

        Raises `InvalidRequest` if the replica has another tokenizer.
        """
        await self.prepare()
        replicas, launcher = self._replicas, self._launcher
        assert replicas is not None  # `prepare` made them
        first = asyncio.ensure_future(replicas.first())
        try:
            if launcher is not None:
                await launcher.start(replicas.address)
                await self._while_launching(launcher, first)
                self._watch = asyncio.create_task(self._watch_launcher(launcher, replicas))
            built = built_of(await first, replicas, self._path)
            return replace(built, adapters=replicas.adapters)
        except BaseException:
            first.cancel()
            await replicas.close()
            if launcher is not None:
                await launcher.close()
            raise

    def _end_tokens(self, built: Built[ServingEngine], tokenizer: Tokenizer) -> frozenset[int]:  # noqa: ARG002 - as the base's
        """Return the end tokens that the replicas use, since replicas decide where answers end."""
        return built.eos_token_ids

    async def _while_launching(self, launcher: Launcher, first: asyncio.Future[Hello]) -> None:
        """Wait for the first replica. Raises `ForetokenError` if the launcher fails."""
        while not (await asyncio.wait((first,), timeout=CHECK_SECONDS))[0]:
            if (reason := await launcher.failure()) is not None:
                raise ForetokenError(f"the replicas did not start: {reason}")

    async def _watch_launcher(self, launcher: Launcher, replicas: Replicas) -> None:
        """Log once when the launcher fails, and once when it works again."""
        known: str | None = None
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            reason = await launcher.failure()
            if reason is not None and reason != known:
                logger.warning("%s", reason)
            elif reason is None and known is not None:
                logger.info("lost replicas are being replaced again")
            known = reason
            replicas.metrics.not_replaced.set(known is not None)

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for ``drain_seconds``, stop the replicas."""
        if self._watch is not None:
            self._watch.cancel()
        if self._replicas is not None and self._built is None:
            await self._replicas.close()  # ends a `start` that waits for replicas
        await super().close(drain_seconds=drain_seconds)
        if self._launcher is not None:
            await self._launcher.close()


def _find(model: str | os.PathLike[str] | None) -> tuple[Path, str]:
    """Return the path of a model and the hash of its tokenizer. Blocking.

    Raises `ModelLoadError`.
    """
    path = find_model(model).path
    tokenizer = Tokenizer.load(path, max_model_len=1)
    try:
        return path, tokenizer.fingerprint()
    finally:
        tokenizer.close()

"""EngineHost: a replica. It joins a front, and joins it again whenever the connection ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ....core.config import EngineConfig
from ....core.errors import ForetokenError
from ...build.built import Built
from ...structured.compiler import Grammars
from ...text.tokenizer import Tokenizer
from ..wire.messages import Load
from .front_session import Ended, Ending, FrontLink, FrontSession
from .hosted_engine import HostedEngine, LocalEngine
from .page_log import PageLog

logger = logging.getLogger(__name__)
REDIAL_SECONDS = 1.0  # until a front is dialled that was lost before it said a word
STOPPED = "the replica stops"


class RefusedError(ForetokenError):
    """The front does not want this replica."""


class EngineHost:
    """Serves the requests of one front. Belongs to one event loop.

    ``dial`` opens a connection to the front at ``address``, which it names in the log.
    """

    def __init__(
        self,
        built: Built[LocalEngine],
        tokenizer: Tokenizer,
        dial: Callable[[], FrontLink],
        *,
        address: str,
        config: EngineConfig,
    ) -> None:
        self.config = config
        self.draining = False
        self._dial, self._address = dial, address
        self._hosted = HostedEngine(
            built=built,
            tokenizer=tokenizer,
            grammars=Grammars(tokenizer, built.vocab_size, built.eos_token_ids),
            pages=PageLog(built.keys),
        )
        self._session: FrontSession | None = None
        self._stopped = asyncio.Event()
        self._num_joined = 0
        self._has_warned = False  # that the front takes no replica

    @property
    def engine(self) -> LocalEngine:
        """The engine."""
        return self._hosted.engine

    @property
    def load(self) -> Load:
        """The engine's work now."""
        return self._hosted.load

    async def start(self) -> None:
        """Start the engine."""
        await self.engine.start()

    async def run(self) -> None:
        """Serve until `stop`, or until the front shuts down. Raises `RefusedError`."""
        while not self._stopped.is_set():
            ended = await self._talk()
            if ended.ending is Ending.REFUSED:
                raise RefusedError(
                    f"the front at {self._address} refused this replica: {ended.reason}"
                )
            if ended.ending is Ending.SHUT_DOWN:
                logger.info("the front at %s ends: %s", self._address, ended.reason)
            if ended.ending is not Ending.LOST:
                return

    def stop(self) -> None:
        """Leave the front, and have `run` return."""
        self._stopped.set()
        self._leave()

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Leave the front, which moves its requests; then write pages to tiers, for a time."""
        self.draining = True
        self.stop()
        await self.engine.close(drain_seconds=drain_seconds)
        if self._hosted.built.events is not None:
            await asyncio.to_thread(self._hosted.built.events.close)
        self._hosted.grammars.close()
        self._hosted.tokenizer.close()

    def _leave(self) -> None:
        if self._session is not None:
            failure = self.engine.failure
            reason = STOPPED if failure is None else "the engine died"
            self._session.leave("a step never returned" if self.engine.hung else reason)

    async def _talk(self) -> Ended:
        """One connection, from dialling to its end."""
        session = self._session = FrontSession(self._hosted, self._dial())
        saying = asyncio.create_task(self._say_joined(session))
        try:
            ended = await session.run()
        finally:
            saying.cancel()
            self._session = None
        if ended.ending is Ending.LOST and session.is_joined.is_set():
            logger.warning("the front at %s is lost: %s; dialling", self._address, ended.reason)
        elif ended.ending is Ending.LOST:
            self._warn_unheard(ended.reason)
            await self._pause()
        return ended

    async def _say_joined(self, session: FrontSession) -> None:
        await session.is_joined.wait()
        news = "is back" if self._num_joined else "has this replica"
        self._num_joined, self._has_warned = self._num_joined + 1, False
        logger.info("the front at %s %s", self._address, news)

    def _warn_unheard(self, reason: str) -> None:
        """Name once what keeps a front from taking a replica."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the front at %s does not take this replica: %s; does it run, with the same "
                "FORETOKEN_CLUSTER_KEY? dialling", self._address, reason,
            )  # fmt: skip

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(REDIAL_SECONDS):
                await self._stopped.wait()
        except TimeoutError:
            pass

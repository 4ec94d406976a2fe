"""EngineHost: a replica; when it loses its front, it joins the next front at that address."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from msgspec.structs import replace

from ....core.config import EngineConfig
from ....core.errors import ForetokenError
from ...build.built import Built
from ...runtime.end_tokens import end_token_ids
from ...structured.compiler import Grammars
from ...text.chat_template import template_of
from ...text.openings import find_openings
from ...text.tokenizer import Tokenizer
from ..wire.messages import Load
from .front_session import Ended, Ending, FrontLink, FrontSession
from .hosted_engine import HostedEngine, LocalEngine
from .page_log import PageLog

logger = logging.getLogger(__name__)
REDIAL_SECONDS = 1.0  # delay before connecting again to a front that sent no message
REFUSED_SECONDS = 15.0  # delay before connecting again to a later front that refused the replica
STOPPED, FAILED = "the replica is stopping", "the engine failed"


class RefusedError(ForetokenError):
    """Raised if the front refuses this replica."""


class EngineHost:
    """Serves the requests of one front. Belongs to one event loop.

    ``dial`` opens a connection to the front at ``address``, which log lines show. Raises
    `InvalidRequest` for an unreadable chat template.
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
        self.joined = asyncio.Event()  # set once a front has accepted the replica
        self._dial, self._address = dial, address
        tokenizer.use_template(*template_of(config))  # the template that the front uses, too
        ends = end_token_ids(tokenizer, built.eos_token_ids)
        if ends != built.eos_token_ids:
            built = replace(built, eos_token_ids=ends)
        self._hosted = HostedEngine(
            built=built,
            tokenizer=tokenizer,
            grammars=Grammars(tokenizer, built.vocab_size, built.eos_token_ids),
            pages=PageLog(built.keys),
        )
        self._session: FrontSession | None = None
        self._stopped = asyncio.Event()
        self._refusal: str | None = None  # last logged refusal by a later front
        self._has_warned = False  # whether `_warn_unheard` has logged

    @property
    def engine(self) -> LocalEngine:
        """The replica's engine."""
        return self._hosted.engine

    @property
    def load(self) -> Load:
        """The engine's current load."""
        return self._hosted.load

    async def start(self) -> None:
        """Start the engine."""
        if (set_openings := self._hosted.built.set_openings) is not None:
            set_openings(await find_openings(self._hosted.tokenizer))
        await self.engine.start()

    async def run(self) -> None:
        """Serve until `stop` is called. If the connection to the front is lost, connect again.

        Raises `RefusedError` if the first front refuses this replica, or if a front refuses it
        after accepting it. If a later front refuses it at once, the replica keeps its model and
        cache and tries again: the refusal may be a mistake.
        """
        while not self._stopped.is_set():
            joined_before = self.joined.is_set()
            ended, was_taken = await self._talk()
            if was_taken:
                self.joined.set()
            if ended.ending is Ending.LEFT:
                return
            if ended.ending is Ending.REFUSED and (was_taken or not joined_before):
                raise RefusedError(self._refused_by(ended.reason))
            if ended.ending is Ending.REFUSED:
                self._log_refusal(ended.reason)
                await self._pause(REFUSED_SECONDS)
            elif was_taken:
                logger.warning(
                    "lost the front at %s: %s; reconnecting", self._address, ended.reason
                )
            else:
                self._warn_unheard(ended.reason)
                await self._pause(REDIAL_SECONDS)

    def _refused_by(self, reason: str) -> str:
        return f"the front at {self._address} refused this replica: {reason}"

    def _log_refusal(self, reason: str) -> None:
        """Log a refusal, but not its repetitions."""
        if reason != self._refusal:
            self._refusal = reason
            logger.warning("%s; retrying", self._refused_by(reason))

    def stop(self) -> None:
        """Leave the front and let `run` return."""
        self._stopped.set()
        self._leave()

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Leave the front, which moves its requests, and close the engine.

        Pages are written to tiers for at most ``drain_seconds``.
        """
        self.draining = True
        self.stop()
        await self.engine.close(drain_seconds=drain_seconds)
        if self._hosted.built.events is not None:
            await asyncio.to_thread(self._hosted.built.events.close)
        self._hosted.grammars.close()
        self._hosted.tokenizer.close()

    def _leave(self) -> None:
        if self._session is not None:
            has_failed = self.engine.hung or self.engine.failure is not None
            self._session.leave(FAILED if has_failed else STOPPED, has_failed=has_failed)

    async def _talk(self) -> tuple[Ended, bool]:
        """Serve one connection; return its end and whether the front accepted this replica."""
        session = self._session = FrontSession(self._hosted, self._dial())
        saying = asyncio.create_task(self._say_joined(session))
        try:
            return await session.run(), session.is_joined.is_set()
        finally:
            saying.cancel()
            self._session = None

    async def _say_joined(self, session: FrontSession) -> None:
        await session.is_joined.wait()
        news = "is connected again" if self.joined.is_set() else "accepted this replica"
        self.joined.set()
        self._refusal, self._has_warned = None, False
        logger.info("the front at %s %s", self._address, news)

    def _warn_unheard(self, reason: str) -> None:
        """Log once why no front has accepted this replica yet."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the front at %s does not answer this replica: %s; check that it is running with "
                "the same FORETOKEN_CLUSTER_KEY; retrying", self._address, reason,
            )  # fmt: skip

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)

"""Keeper: ends a server on a signal, when its engine is dead, or when its event loop hangs."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn

from ...core.engine.watchdog import BEAT_SECONDS, LoopGuard
from ..runtime.engine_client import EngineClient

logger = logging.getLogger(__name__)
DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT)
DUMP_SIGNAL = signal.SIGUSR1
DEAD, STUCK = 1, 70  # exit codes: the engine stopped; something never came back
LAST_SECONDS = 5.0  # for what a process does last: its exit, or its dump where it stands still


class Keeper:
    """Drains on the first signal and exits on the second; exits when the engine is dead.

    A thread watches the event loop itself: while that is stuck no other code runs.
    """

    def __init__(self, llm: EngineClient, *, drain_seconds: float) -> None:
        self._llm = llm
        self._server: uvicorn.Server | None = None
        self._drain_seconds = drain_seconds
        self._died = False
        self._tasks: list[asyncio.Task[None]] = []
        seconds = llm.config.step_timeout
        self._guard = LoopGuard(max(seconds, LAST_SECONDS), self._leave) if seconds else None

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 0 after a signal."""
        engine = self._llm.engine
        if engine.hung:
            return STUCK
        return DEAD if self._died or engine.failure is not None else 0

    @contextlib.contextmanager
    def watching(self, server: uvicorn.Server) -> Iterator[None]:
        """Handle signals, and watch the engine and the loop, inside the block."""
        self._server = server
        loop = asyncio.get_running_loop()
        for number in DRAIN_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(DUMP_SIGNAL, self._dump, DUMP_SIGNAL.name)
        if self._guard is not None:
            self._guard.start()
        self._spawn(self._watch())
        try:
            yield
        finally:
            for number in (*DRAIN_SIGNALS, DUMP_SIGNAL):
                loop.remove_signal_handler(number)

    async def end(self) -> None:
        """Stop watching the engine; a drain that runs is finished.

        From now on no heartbeat is expected of the loop, but an exit must not hang either.
        """
        watch, *drains = self._tasks
        watch.cancel()
        await asyncio.gather(watch, *drains, return_exceptions=True)

    def close(self) -> None:
        """The loop is closed: watch no longer."""
        if self._guard is not None:
            self._guard.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _on_signal(self, number: int) -> None:
        if self._llm.draining:
            logger.warning("second signal: exiting at once")
            os._exit(128 + number)
        logger.info(
            "waiting up to %s s for running requests (--drain-seconds)", self._drain_seconds
        )
        self._spawn(self._drain())

    async def _drain(self) -> None:
        """Keep listening meanwhile, so that /ready and new requests get a 503."""
        try:
            await self._llm.close(drain_seconds=self._drain_seconds)
        finally:
            self._stop()

    async def _watch(self) -> None:
        """End a server whose engine is dead, so that its supervisor restarts it."""
        while True:
            if not (self._llm.engine.alive or self._llm.draining or self._died):
                logger.critical("the engine is dead: exiting")
                self._died = True
                self._stop()
            if self._guard is not None:
                self._guard.beat()
            await asyncio.sleep(BEAT_SECONDS)

    def _stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True

    def _dump(self, reason: str) -> None:
        engine = self._llm.engine
        engine.dump(engine.report(reason))

    def _leave(self) -> None:
        """Called by the guard's thread. To log may block for ever: an alarm ends that as well."""
        alarm = threading.Timer(LAST_SECONDS, os._exit, (STUCK,))
        alarm.daemon = True
        alarm.start()
        faulthandler.dump_traceback()
        self._dump("the event loop did not run for --step-timeout seconds")
        os._exit(STUCK)

"""Supervisor: stops a server on a signal, after an engine failure, or if its event loop hangs.

A `LoopGuard` detects a hanging loop from a separate thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

from ...core.config import EngineConfig
from ..runtime.serving_engine import ServingEngine

logger = logging.getLogger(__name__)
DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT)
DUMP_SIGNAL = signal.SIGUSR1
DEAD, STUCK = 1, 70  # exit status: the engine failed; the engine or the event loop hangs
BEAT_SECONDS = 1.0  # interval of the event loop's heartbeat
LAST_SECONDS = 5.0  # time limit for the final dump and the exit


class Serving(Protocol):
    """An engine and the client that serves its requests."""

    config: EngineConfig

    @property
    def engine(self) -> ServingEngine:
        """The engine."""

    @property
    def draining(self) -> bool:
        """Whether `close` was called."""

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, give running ones some time to finish, and close the engine."""


class Supervisor:
    """Drains on the first signal, exits on the second, and exits if the engine fails.

    A thread watches the event loop, since no other code runs while the loop is stuck. ``on_drain``:
    the log line at the first signal.
    """

    def __init__(self, llm: Serving, *, drain_seconds: float, on_drain: str) -> None:
        self._llm = llm
        self._stop: Callable[[], None] = _nothing
        self._drain_seconds = drain_seconds
        self._on_drain = on_drain
        self._died = False
        self._tasks: list[asyncio.Task[None]] = []
        seconds = llm.config.step_timeout
        self._guard = LoopGuard(max(seconds, LAST_SECONDS), self._leave) if seconds else None

    @property
    def exit_code(self) -> int:
        """Exit status of the process; 0 after a signal."""
        engine = self._llm.engine
        if engine.hung:
            return STUCK
        return DEAD if self._died or engine.failure is not None else 0

    @contextlib.contextmanager
    def watching(self, stop: Callable[[], None]) -> Iterator[None]:
        """Handle signals and watch the engine and the event loop inside the block.

        ``stop`` is called to end the server, after the engine was closed or has failed.
        """
        self._stop = stop
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
        """Stop watching the engine, and wait for a drain in progress.

        From now on, no heartbeats of the event loop are needed; the exit still has a time limit.
        """
        watch, *drains = self._tasks
        watch.cancel()
        await asyncio.gather(watch, *drains, return_exceptions=True)

    def close(self) -> None:
        """Stop watching the event loop, which has ended."""
        if self._guard is not None:
            self._guard.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _on_signal(self, number: int) -> None:
        if self._llm.draining:
            logger.warning("second signal: exiting at once")
            os._exit(128 + number)
        logger.info("%s", self._on_drain)
        self._spawn(self._drain())

    async def _drain(self) -> None:
        """Close the engine. The server keeps listening, so that /ready and new requests get a
        503.
        """
        try:
            await self._llm.close(drain_seconds=self._drain_seconds)
        finally:
            self._stop()

    async def _watch(self) -> None:
        """Stop a server whose engine has failed, so that a process manager restarts it."""
        while True:
            if not (self._llm.engine.alive or self._llm.draining or self._died):
                logger.critical("the engine has failed: exiting")
                self._died = True
                self._stop()
            if self._guard is not None:
                self._guard.beat()
            await asyncio.sleep(BEAT_SECONDS)

    def _dump(self, reason: str) -> None:
        engine = self._llm.engine
        engine.dump(engine.report(reason))

    def _leave(self) -> None:
        """Dump the state and end the process. Called in the thread of the `LoopGuard`.

        If the dump takes too long, a timer ends the process.
        """
        alarm = threading.Timer(LAST_SECONDS, os._exit, (STUCK,))
        alarm.daemon = True
        alarm.start()
        faulthandler.dump_traceback()
        self._dump("the event loop did not run for --step-timeout seconds")
        os._exit(STUCK)


def _nothing() -> None:
    pass


class LoopGuard:
    """A thread that calls ``on_stuck`` once if `beat` was not called for ``seconds``.

    The event loop calls `beat` while it runs. ``on_stuck`` runs in this thread, as a stuck loop
    cannot run it. The thread counts ticks and reads no clock, so a clock change or a suspended
    machine counts as at most one tick.
    """

    def __init__(
        self, seconds: float, on_stuck: Callable[[], None], *, tick: float = BEAT_SECONDS
    ) -> None:
        self._on_stuck = on_stuck
        self._tick = tick
        self._most = max(1, round(seconds / tick))  # maximum number of ticks without a heartbeat
        self._has_beaten = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="foretoken-guard", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def beat(self) -> None:
        """Report that the loop runs. Cheap; may be called from any thread."""
        self._has_beaten = True

    def close(self) -> None:
        """Stop the thread."""
        self._ended.set()

    def _watch(self) -> None:
        num_missed = 0
        while num_missed < self._most:
            if self._ended.wait(self._tick):
                return
            num_missed = 0 if self._has_beaten else num_missed + 1
            self._has_beaten = False
        self._on_stuck()

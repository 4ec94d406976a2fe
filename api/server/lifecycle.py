"""Supervisor: ends a server on a signal, when its engine is dead, or when its event loop hangs.

A `LoopGuard` is the thread that notices the last.
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
DEAD, STUCK = 1, 70  # exit codes: the engine stopped; something never came back
BEAT_SECONDS = 1.0  # of the event loop
LAST_SECONDS = 5.0  # for what a process does last: its exit, or its dump where it stands still


class Serving(Protocol):
    """An engine and what serves its requests."""

    config: EngineConfig

    @property
    def engine(self) -> ServingEngine:
        """The engine."""

    @property
    def draining(self) -> bool:
        """Whether `close` was called."""

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for a time, and close the engine."""


class Supervisor:
    """Drains on the first signal and exits on the second; exits when the engine is dead.

    A thread watches the event loop itself: while that is stuck no other code runs. ``on_drain``:
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
        """Exit code of the process: 0 after a signal."""
        engine = self._llm.engine
        if engine.hung:
            return STUCK
        return DEAD if self._died or engine.failure is not None else 0

    @contextlib.contextmanager
    def watching(self, stop: Callable[[], None]) -> Iterator[None]:
        """Handle signals, and watch the engine and the loop, inside the block.

        ``stop`` is called when the server shall end: the engine is closed, or dead.
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
        logger.info("%s", self._on_drain)
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


def _nothing() -> None:
    pass


class LoopGuard:
    """A thread that calls ``on_stuck`` once if `beat` was not called for ``seconds``.

    The event loop calls `beat` while it runs. ``on_stuck`` runs in this thread: a stuck loop
    cannot run it. Beats are counted: a clock that leaps, or a suspended machine, costs one.
    """

    def __init__(
        self, seconds: float, on_stuck: Callable[[], None], *, tick: float = BEAT_SECONDS
    ) -> None:
        self._on_stuck = on_stuck
        self._tick = tick
        self._most = max(1, round(seconds / tick))  # ticks without a beat
        self._has_beaten = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="foretoken-guard", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def beat(self) -> None:
        """Report that the loop runs. Cheap; from any thread."""
        self._has_beaten = True

    def close(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def _watch(self) -> None:
        num_missed = 0
        while num_missed < self._most:
            if self._ended.wait(self._tick):
                return
            num_missed = 0 if self._has_beaten else num_missed + 1
            self._has_beaten = False
        self._on_stuck()

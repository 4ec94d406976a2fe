"""Watchdogs: for a step that does not return, and for an event loop that is stuck.

The first also records the last runs of the model thread. Both count beats instead of subtracting
times: a clock that leaps, or a suspended machine, costs one beat and ends no engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..interface.step import StepPlan
from .model_thread import Job

MAX_RECORDS = 64  # runs of the model thread that are kept
BEATS = 8  # after which a step is given up
BEAT_SECONDS = 1.0  # of an event loop
STEP_SECONDS, READY_SECONDS = 120.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How long a step may take, and what is left behind when an engine dies.

    ``step_timeout``: seconds after which a step is given up and the engine with it; 0 is never.
    ``ready_step_seconds``: a longer step makes the engine unready meanwhile. ``dump_dir``: where
    crash dumps go, None for none; ``about`` is put into them.
    """

    step_timeout: float = STEP_SECONDS
    ready_step_seconds: float = READY_SECONDS
    dump_dir: Path | None = None
    about: Mapping[str, object] = field(default_factory=dict)


class StepHung(Exception):  # noqa: N818 - nothing was raised: that is the trouble
    """The model thread did not return from a step."""


class StepRecord(NamedTuple):
    """One run of the model thread."""

    began: float  # on the engine's clock
    seconds: float
    num_requests: int
    num_tokens: int
    failure: str | None  # the kind of exception


class Watchdog:
    """Gives up a call of the model thread that takes longer than ``seconds``; 0 is never.

    The caller that waits for it gets `StepHung`; the thread itself cannot be ended. One timer runs
    while calls follow each other, none while nothing is computed. The last calls are recorded.
    """

    def __init__(self, seconds: float) -> None:
        self.records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._began: float | None = None  # of the call under way, on the engine's clock
        self._period = seconds / BEATS
        self._seconds = seconds
        self._job: Job[Any] | None = None  # under way
        self._num_jobs = 0  # so far
        self._seen = 0  # of these, at the last beat
        self._num_beats = 0  # since the present one was first seen
        self._timer: asyncio.TimerHandle | None = None
        self.gave_up = False

    def watch(self, job: Job[Any], now: float) -> None:
        """Watch a call that begins, on the running event loop."""
        self._job, self._began = job, now
        self._num_jobs += 1
        if self._timer is None and self._seconds > 0:
            self._arm(job.loop)

    def end(self, plan: StepPlan, now: float, failure: BaseException | None) -> None:
        """Record the end of the call, which computed ``plan``."""
        began, self._job, self._began = self._began, None, None
        if began is not None:
            kind = None if failure is None else type(failure).__name__
            counts = len(plan.requests), plan.num_tokens
            self.records.append(StepRecord(began, now - began, *counts, kind))

    def seconds_under_way(self, now: float) -> float:
        """Seconds since the present call began; 0 between two calls."""
        return 0.0 if self._began is None else now - self._began

    def close(self) -> None:
        """Stop watching."""
        self._job = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._period, self._beat)

    def _beat(self) -> None:
        self._timer = None
        job = self._job
        if job is None:
            return
        self._num_beats = self._num_beats + 1 if self._seen == self._num_jobs else 0
        self._seen = self._num_jobs
        if self._num_beats < BEATS:
            self._arm(job.loop)
            return
        self.gave_up = True
        job.end(None, StepHung(f"a step took longer than {self._seconds:g} s (--step-timeout)"))


class LoopGuard:
    """A thread that calls ``on_stuck`` once if `beat` was not called for ``seconds``.

    The event loop calls `beat` while it runs. ``on_stuck`` runs in this thread: a stuck loop
    cannot run it.
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

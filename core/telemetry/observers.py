"""Observers of requests and steps: logs, traces, the dashboard."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec

from ..interface.output import StepOutput
from ..interface.plan import StepPlan
from ..interface.request import Delta, Request

logger = logging.getLogger(__name__)
P = ParamSpec("P")


class EngineObserver:
    """Base class of observers of requests and steps, whose methods do nothing.

    The engine calls the methods on the event loop, between two steps. Times are seconds on the
    engine's clock. A method must be quick. If it raises, the failure is counted, and logged the
    first time; the engine continues.
    """

    def begin(self, request: Request, now: float) -> None:
        """Observe an accepted request. This runs in the task of the caller, not of the engine."""

    def observe_step(
        self, plan: StepPlan, output: StepOutput, *, began: float, ended: float
    ) -> None:
        """Observe a step, from its start in the model thread to the end of its commit."""

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """Observe the next delta of a request; ``delta.terminal`` is true for the last one."""

    def observe_replica_step(self, replica: int) -> None:
        """Note that all deltas of a step of this replica were observed.

        This is called only in a process that serves several replicas.
        """

    def observe_idle_chunk(self, replica: int) -> None:
        """Observe a part of a next turn's prompt that this replica has computed in idle time.

        This is called only in a process that serves several replicas.
        """


class Observers:
    """Group of observers, each of which gets every call.

    A call that raises is counted, and logged the first time.
    """

    def __init__(self, count_failure: Callable[[], None]) -> None:
        self.members: list[EngineObserver] = []
        self._count_failure = count_failure
        self._failed: set[str] = set()  # methods whose failure was logged

    def begin(self, request: Request, now: float) -> None:
        """Pass an accepted request to the observers."""
        for observer in self.members:
            self._notify(observer.begin, request, now)

    def observe_step(
        self, plan: StepPlan, output: StepOutput, *, began: float, ended: float
    ) -> None:
        """Pass a step that has ended to the observers."""
        for observer in self.members:
            self._notify(observer.observe_step, plan, output, began=began, ended=ended)

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """Pass served tokens, or a request's end, to the observers."""
        for observer in self.members:
            self._notify(observer.observe_delta, request, delta, now)

    def observe_replica_step(self, replica: int) -> None:
        """Tell the observers that the deltas of a step of a replica were observed."""
        for observer in self.members:
            self._notify(observer.observe_replica_step, replica)

    def observe_idle_chunk(self, replica: int) -> None:
        """Tell the observers that a replica has computed a chunk in idle time."""
        for observer in self.members:
            self._notify(observer.observe_idle_chunk, replica)

    def _notify(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a method of each observer; an exception does not affect steps and requests."""
        try:
            call(*args, **kwargs)
        except Exception:
            self._count_failure()
            name = getattr(call, "__qualname__", repr(call))
            if name not in self._failed:
                self._failed.add(name)
                logger.exception(
                    "observer %s raised an exception; its next exceptions are only counted", name
                )

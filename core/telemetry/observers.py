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
    """Follows requests and steps; this one does nothing, subclasses do.

    Called by the engine, on the event loop, between two steps. Times are seconds on the engine's
    clock. It must be quick. If a method raises, that is counted, and logged the first time; the
    engine goes on.
    """

    def begin(self, request: Request, now: float) -> None:
        """A request was accepted. Called in the caller's own context, unlike the other methods."""

    def observe_step(
        self, plan: StepPlan, output: StepOutput, *, began: float, ended: float
    ) -> None:
        """A step, from its plan's start in the model thread to the end of its commit."""

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """Tokens that were served, and the end: then ``delta.terminal`` holds."""

    def observe_replica_step(self, replica: int) -> None:
        """All deltas of a step of this replica, by its number, were observed; only in a front."""


class Observers:
    """Observers of requests and steps. A call that fails is counted, and logged the first time."""

    def __init__(self, count_failure: Callable[[], None]) -> None:
        self.members: list[EngineObserver] = []
        self._count_failure = count_failure
        self._failed: set[str] = set()  # methods whose failure was logged

    def begin(self, request: Request, now: float) -> None:
        """A request was accepted."""
        for observer in self.members:
            self._notify(observer.begin, request, now)

    def observe_step(
        self, plan: StepPlan, output: StepOutput, *, began: float, ended: float
    ) -> None:
        """A step has ended."""
        for observer in self.members:
            self._notify(observer.observe_step, plan, output, began=began, ended=ended)

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """Tokens were served, or a request ended."""
        for observer in self.members:
            self._notify(observer.observe_delta, request, delta, now)

    def observe_replica_step(self, replica: int) -> None:
        """The deltas of a step of a replica were observed."""
        for observer in self.members:
            self._notify(observer.observe_replica_step, replica)

    def _notify(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call an observer's method; no step and no request depends on it."""
        try:
            call(*args, **kwargs)
        except Exception:
            self._count_failure()
            name = getattr(call, "__qualname__", repr(call))
            if name not in self._failed:
                self._failed.add(name)
                logger.exception("%s raised an exception; later ones are only counted", name)

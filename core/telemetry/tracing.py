"""Protocols that follow single requests: `Tracer`, steps as well, and `RequestObserver`."""

from __future__ import annotations

from typing import Protocol

from ..interface.request import Delta, Request
from ..interface.step import StepOutput, StepPlan


class Tracer(Protocol):
    """Called by the engine, on the event loop, between two steps.

    Times are seconds on the engine's clock. It must be quick and must not raise.
    """

    def begin(self, request: Request, now: float) -> None:
        """A request was accepted. Called in the caller's own context, unlike the other methods."""

    def observe_step(
        self, plan: StepPlan, output: StepOutput, *, began: float, ended: float
    ) -> None:
        """A step, from its plan's start in the model thread to the end of its commit."""

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """Tokens that were served, and the end."""


class RequestObserver(Protocol):
    """Called by the engine, on the event loop, at both ends of a request; quick, never raises."""

    def begin(self, request: Request) -> None:
        """A request was accepted. Called in the caller's own context."""

    def end(self, request: Request, delta: Delta) -> None:
        """It has ended; ``delta`` says why."""


class NoTracer:
    """A tracer that does nothing."""

    def begin(self, request: Request, now: float) -> None:
        """Nothing."""

    def observe_step(
        self, plan: StepPlan, output: StepOutput, *, began: float, ended: float
    ) -> None:
        """Nothing."""

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """Nothing."""


NO_TRACER = NoTracer()

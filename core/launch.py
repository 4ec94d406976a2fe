"""Launches: steps that a device is given before the one ahead of them is over."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from .step import StepOutput, StepPlan


class Launched(Protocol):
    """A step that the device was asked for."""

    def finish(self) -> StepOutput:
        """Wait for it. Raises what the device makes of it: then no row is valid."""


@runtime_checkable
class Launcher(Protocol):
    """Who runs steps, on a device that computes behind the host's back or not."""

    @property
    def launches(self) -> bool:
        """Whether it does: else `launch` is not called."""

    def launch(self, plan: StepPlan, after: Launched | None = None) -> Launched:
        """Ask for a steady step without waiting: one pending token a row, nothing to look at.

        Rows whose tokens are `AheadTokens` take their last token on the device from ``after``, the
        step launched before this one, in which the same requests have a row. What this step has for
        a row means nothing where that one has an error for it. Raises ValueError for a plan that is
        not steady, and what asking the device raises.
        """

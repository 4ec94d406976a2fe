"""Run: a few steps of a rest that are planned, and over, without anybody asking why.

To ask and to tell takes microseconds: what is met once a step has left the processor's caches by
then. In steps of a small model that is a share worth having.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Run:
    """Steps in a row that rest."""

    left: int = 0  # steps that are still to be planned
    num_untold: int = 0  # steps that are over and count, but nobody was told of
    untold_s: float = 0.0  # what these took in all
    _length: int = 0

    @property
    def num_planned(self) -> int:
        """Steps of it that were planned."""
        return self._length - self.left

    def begin(self, num_steps: int) -> None:
        """The next steps belong to it."""
        self.left = self._length = num_steps

    def end(self) -> int:
        """No more steps do; how many were planned."""
        num_steps = self.num_planned
        self.left = self._length = 0
        return num_steps

    def tell(self) -> tuple[int, float]:
        """The steps that nobody was told of, and their seconds."""
        told = self.num_untold, self.untold_s
        self.num_untold, self.untold_s = 0, 0.0
        return told

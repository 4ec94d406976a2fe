"""Pace: how much of a prompt a step may compute beside requests that wait for their next token.

A step's time is the gap between two tokens of everybody who decodes in it. What a chunk of so many
tokens takes is measured, so the gap is bounded in time on any machine: a fixed chunk is a short
pause on one and a long one on another.
"""

from __future__ import annotations

from .step import StepOutput, StepPlan

MEAN_RATE = 0.2  # of a new value in a running mean
LEAST_TOKENS = 16  # of a chunk: a prompt gets on whatever its tokens cost


class Pace:
    """``slowdown``: how many times longer a step may take for its chunks than without them."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._token_s = 0.0  # seconds that one more token of a prompt adds to a step
        self._plain_s: dict[int, float] = {}  # of a step without chunks, by bits of its requests

    def limit(self, num_decodes: int, budget: int) -> int:
        """Tokens of prompts for a step in which so many requests decode; at most ``budget``."""
        plain_s = self._plain(num_decodes)
        if not num_decodes or not plain_s or not self._token_s:
            return budget
        spare_s = (self._slowdown - 1.0) * plain_s
        return min(budget, max(LEAST_TOKENS, int(min(spare_s / self._token_s, budget))))

    def observe(self, plan: StepPlan, output: StepOutput) -> None:
        """A step was computed; runners that tell no times teach nothing."""
        seconds = sum(output.times.values())
        chunks = [row.stop - row.start for row in plan.rows if row.stop - row.start > 1]
        num_decodes = len(plan.rows) - len(chunks)
        if seconds <= 0.0:
            return
        if not chunks:
            size = num_decodes.bit_length()
            self._plain_s[size] = _mean(self._plain_s.get(size), seconds)
            return
        plain_s = self._plain(num_decodes)
        if plain_s is not None:
            self._token_s = _mean(self._token_s or None, max(0.0, seconds - plain_s) / sum(chunks))

    def _plain(self, num_decodes: int) -> float | None:
        """Seconds of a step without chunks, from about so many requests, else from most like it."""
        if not num_decodes:
            return 0.0
        size = num_decodes.bit_length()
        nearest = min(self._plain_s, key=lambda known: (abs(known - size), known), default=None)
        return None if nearest is None else self._plain_s[nearest]


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + MEAN_RATE * (value - before)

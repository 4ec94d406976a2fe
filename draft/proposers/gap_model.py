"""GapModel: how likely the target takes each of a drafter's best tokens, by their scores' gaps.

A drafter knows the noise with which the target will choose, so it knows how close its own choice
was. Of its best tokens, with scores s_0 >= s_1 >= ... and gaps d_j = s_0 - s_j, the target takes
rank j with the chance

    e^(-B d_j) / (sum_l e^(-B d_l) + e^(a - b d_1)),

and none of them otherwise. Looking at the noise is harmless where the verifier's token does not
depend on drafts. B, a and b are fitted as positions are judged.

It judges single tokens, in the model thread, and grows trees by them. What a drafter's nodes bring
to a step, by source and rank, is learnt in the event loop: see draft/control/estimators.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

MAX_GAP = 8.0  # that one judged position may claim
RATE = 0.02  # of a gradient step
LEAST = 0.05  # of B and b

GapNumbers: TypeAlias = tuple[float, float, float]
"""B, a and b of a `GapModel`."""
# Where a fit begins, by whether tokens are sampled: measured with the built-in pair.
FIRST_NUMBERS: dict[bool, GapNumbers] = {False: (2.4, -1.0, 3.5), True: (1.6, -0.9, 1.4)}


class GapModel:
    """The chances of one drafter's tokens, for greedy or for sampled requests."""

    def __init__(self, falloff: float, rest: float, slope: float) -> None:
        self.falloff, self.rest, self.slope = falloff, rest, slope  # B, a and b
        self.mean_best = 0.7  # chance of the best token behind a node, lately

    def chances(self, scores: Sequence[float]) -> list[float]:
        """The chance that the target takes each of the best tokens, by their falling ``scores``."""
        weights, rest = self._weights(scores)
        total = sum(weights) + rest
        return [weight / total for weight in weights]

    def learn(self, scores: Sequence[float], rank: int | None) -> None:
        """The target took the token of that rank, or (None) another: a step down the log loss."""
        if len(scores) < 2:
            return
        weights, rest = self._weights(scores)
        total = sum(weights) + rest
        self.mean_best += RATE * (weights[0] / total - self.mean_best)
        errors = [weight / total - (index == rank) for index, weight in enumerate(weights)]
        rest_error = rest / total - (rank is None)
        gaps = [min(MAX_GAP, scores[0] - score) for score in scores]
        self.falloff += RATE * sum(error * gap for error, gap in zip(errors, gaps, strict=True))
        self.rest -= RATE * rest_error
        self.slope += RATE * rest_error * gaps[1]
        self.falloff, self.slope = max(LEAST, self.falloff), max(LEAST, self.slope)

    def _weights(self, scores: Sequence[float]) -> tuple[list[float], float]:
        gaps = [scores[0] - score for score in scores]
        second = gaps[1] if len(gaps) > 1 else math.inf
        rest = math.exp(self.rest - self.slope * second)
        return [math.exp(-self.falloff * gap) for gap in gaps], rest


def default_gap_models() -> dict[bool, GapModel]:
    """A model for greedy and one for sampled requests, by whether tokens are sampled."""
    return {is_sampled: GapModel(*numbers) for is_sampled, numbers in FIRST_NUMBERS.items()}

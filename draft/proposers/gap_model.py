"""GapModel: estimates which of a drafter's best tokens the target chooses, from score gaps.

The drafter scores tokens with the same noise with which the target will choose. The smaller the gap
between two scores, the less certain it is which token the target prefers. Let the best tokens have
the scores s_0 >= s_1 >= ... and the gaps d_j = s_0 - s_j. The model assumes that the target chooses
the token of rank j with the probability

    e^(-B d_j) / (sum_l e^(-B d_l) + e^(a - b d_1)),

and otherwise another token. Using the noise is safe because the verifier's token does not depend on
drafts. B, a and b are fitted online to verified positions.

The model rates single tokens in the model thread, while trees grow. The event loop has its own
estimate of a whole draft's accepted tokens: `NodeWorth` in draft/control/estimators.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import exp
from typing import TypeAlias

MAX_GAP = 8.0  # maximum gap that a gradient step uses
RATE = 0.02  # learning rate
LEAST = 0.05  # minimum of the parameters B and b

FIRST_CHANCES = 0.7, 0.14, 0.05, 0.02  # initial values of `GapModel.mean_chances`
NUM_CHANCES = len(FIRST_CHANCES)

GapNumbers: TypeAlias = tuple[float, float, float]
"""B, a and b of a `GapModel`."""
# Initial values of the fit, by whether tokens are sampled: measured with the built-in models.
FIRST_NUMBERS: dict[bool, GapNumbers] = {False: (2.4, -1.0, 3.5), True: (1.6, -0.9, 1.4)}


class GapModel:
    """Acceptance probabilities of one drafter's tokens, for either greedy or sampled requests."""

    def __init__(self, falloff: float, rest: float, slope: float) -> None:
        self.falloff, self.rest, self.slope = falloff, rest, slope  # parameters B, a and b
        self.mean_chances = list(FIRST_CHANCES)  # running mean of each rank's probability
        self.rounded_chances: tuple[float, ...] = FIRST_CHANCES  # to two decimals

    def chances(self, scores: Sequence[float]) -> list[float]:
        """Return the probability that the target chooses each token.

        ``scores`` are in descending order.
        """
        *weights, rest = self._weights(scores)
        total = sum(weights) + rest
        return [weight / total for weight in weights]

    def learn(self, scores: Sequence[float], rank: int | None) -> None:
        """Take a gradient step on the log loss of one verified position.

        The target chose the token of ``rank``, or another token if it is None.
        """
        if len(scores) < 2:
            return
        *weights, rest = self._weights(scores)
        total, means, best, slope = sum(weights) + rest, self.mean_chances, scores[0], 0.0
        for index, weight in enumerate(weights):
            chance = weight / total
            if index < NUM_CHANCES:
                means[index] += RATE * (chance - means[index])
            gap = best - scores[index]
            slope += (chance - (index == rank)) * (gap if gap < MAX_GAP else MAX_GAP)
        self.rounded_chances = tuple([round(mean, 2) for mean in means])
        rest_error = rest / total - (rank is None)
        self.falloff = max(LEAST, self.falloff + RATE * slope)
        self.rest -= RATE * rest_error
        self.slope = max(LEAST, self.slope + RATE * rest_error * min(MAX_GAP, best - scores[1]))

    def _weights(self, scores: Sequence[float]) -> map[float]:
        """Yield the weight of each token, then the weight of all other tokens."""
        best, falloff = scores[0], self.falloff
        exponents = [-falloff * (best - score) for score in scores]
        second = best - scores[1] if len(scores) > 1 else math.inf
        return map(exp, (*exponents, self.rest - self.slope * second))


def default_gap_models() -> dict[bool, GapModel]:
    """Return new gap models for greedy (False) and for sampled (True) requests."""
    return {is_sampled: GapModel(*numbers) for is_sampled, numbers in FIRST_NUMBERS.items()}

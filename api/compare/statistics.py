"""A confidence sequence for the mean of paired differences, valid at every look.

Source: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (2020,
arXiv 2010.09686): the hedged capital of theorem 3, with a uniform mixture over fixed bets
(their section on "diversified" bets) in place of predictable ones. The interval at a look is the
set of means that the capital has not refuted. By Ville's inequality the probability that any of
the intervals, over all looks, misses the true mean is at most 1 - level. So a comparison may stop
as soon as an interval excludes 0.

Assumption: each difference has the same mean given those before it, as for tasks that are drawn
independently of each other. Nothing else is assumed of the distribution, except the range.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BETS = 0.99 * 2.0 ** (-np.arange(14) / 2)
"""Fractions of the capital to bet: [num_bets], from 0.99 down to 0.011."""
STEPS = 30  # halvings of an interval of length 2: its ends are exact to 2e-9
EDGE = 1e-9  # smallest distance of a mean from -1 and 1, where the capital has no finite value


class Interval(NamedTuple):
    """A confidence interval for the mean difference B - A, within [-1, 1]."""

    low: float
    high: float


class ConfidenceSequence:
    """Intervals for the mean of differences in [-1, 1], which are added one by one.

    The bets are fixed, so the order of the differences does not matter, and equal differences are
    only counted. An interval takes time in proportion to the number of distinct differences.
    """

    def __init__(self, level: float = 0.95) -> None:
        """``level``: probability with which all intervals contain the true mean, below 1."""
        self._log_limit = -math.log(1 - level)
        self._counts: Counter[float] = Counter()
        self._sum = 0.0
        self.num = 0  # number of differences

    def add(self, difference: float) -> None:
        """Add the difference of one task, in [-1, 1]."""
        self._counts[difference] += 1
        self._sum += difference
        self.num += 1

    @property
    def mean(self) -> float:
        """The mean of the differences; 0 if there are none."""
        return self._sum / self.num if self.num else 0.0

    @property
    def interval(self) -> Interval:
        """The interval at this look.

        The capital is a convex function of the mean, and at most 1 at the observed mean. So the
        means that it does not refute are an interval around the observed one.
        """
        mean = min(max(self.mean, EDGE - 1), 1 - EDGE)
        return Interval(self._end(mean, EDGE - 1, -1.0), self._end(mean, 1 - EDGE, 1.0))

    def refutes(self, mean: float) -> bool:
        """Whether this look excludes ``mean``, which is above -1 and below 1."""
        values = np.fromiter(self._counts, float, len(self._counts))
        counts = np.fromiter(self._counts.values(), float, len(self._counts))
        return log_capital(values, counts, mean) >= self._log_limit

    def is_within(self, margin: float) -> bool:
        """Whether this look excludes every mean that is farther than ``margin`` from 0."""
        return abs(self.mean) < margin and self.refutes(-margin) and self.refutes(margin)

    def _end(self, kept: float, refuted: float, extreme: float) -> float:
        """Return the end of the interval between a mean inside and one outside.

        ``extreme`` is returned if no mean on this side is refuted.
        """
        if not self.refutes(refuted):
            return extreme
        for _ in range(STEPS):
            middle = (kept + refuted) / 2
            if self.refutes(middle):
                refuted = middle
            else:
                kept = middle
        return refuted  # the wider end, so that the interval has at least its level


def log_capital(values: NDArray[np.float64], counts: NDArray[np.float64], mean: float) -> float:
    """Return the logarithm of the hedged capital against the hypothesis that the mean is ``mean``.

    ``values`` [num_values] are the distinct differences, ``counts`` [num_values] how often each
    occurred. Half of the capital bets that the true mean is higher, half that it is lower; each
    half is spread evenly over `BETS`. The capital starts at 1, and it is a nonnegative martingale
    if the hypothesis is true.
    """
    bets = BETS[:, None]
    higher = np.log1p(bets * (values - mean) / (1 + mean)) @ counts
    lower = np.log1p(bets * (mean - values) / (1 - mean)) @ counts
    logs = np.concatenate((higher, lower))
    top = logs.max()
    return float(top + np.log(np.exp(logs - top).mean()))

"""AcceptanceModel: how likely draft tokens are accepted, by source, kind, position and request.

The chance of a token *given that all before it are accepted* is learnt for each source and kind of
guess in classes of positions, separately for greedy and for sampled requests. If a source does
better or worse for one request, the request's survival is the curve's survival ** hazard
(proportional hazards, Cox 1972). The hazard is the request's rejections over those that the curve
expected. One rejection changes it a little, three in a row a lot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..sources.source import BUCKETS, Odds, Priors

FloatArray = NDArray[np.float64]

MAX_LENGTH = 64  # positions that a curve covers; the last chance holds beyond
PRIOR_TOKENS = 10.0  # tokens that the prior weighs as much as
WINDOW = 150.0  # tokens of a class over which counts fade
HAZARD_PRIOR = 0.7  # expected rejections that "as usual" weighs as much as
HAZARD_KEEP = 0.9  # what is left of a request's counts after each of its guesses
HAZARD_RANGE = (0.1, 12.0)
CHANCE_RANGE = (0.005, 0.998)

_CLASS_OF = np.searchsorted(BUCKETS, np.arange(MAX_LENGTH), side="right") - 1


@dataclass(slots=True)
class _Curve:
    """Chances of one kind of guess; the arrays [MAX_LENGTH] are void while stale."""

    hits: list[float]  # [len(BUCKETS)]
    trials: list[float]
    log_survival: FloatArray = field(default_factory=lambda: np.zeros(MAX_LENGTH))
    misses: FloatArray = field(default_factory=lambda: np.zeros(MAX_LENGTH))  # expected so far
    survival: FloatArray = field(default_factory=lambda: np.ones(MAX_LENGTH))
    is_stale: bool = True

    @classmethod
    def of(cls, prior: Odds) -> _Curve:
        curve = cls([PRIOR_TOKENS * chance for chance in prior], [PRIOR_TOKENS] * len(prior))
        curve.refresh()
        return curve

    def count(self, num_hits: int, missed: bool) -> None:
        """Count ``num_hits`` positions as right, and the next one as wrong if ``missed``."""
        num_tried = num_hits + missed
        for index, start in enumerate(BUCKETS):
            if start >= num_tried:
                break
            stop = BUCKETS[index + 1] if index + 1 < len(BUCKETS) else num_tried
            tried = min(num_tried, stop) - start
            keep = max(0.0, 1.0 - tried / WINDOW)
            self.hits[index] = keep * self.hits[index] + min(num_hits, stop) - start
            self.trials[index] = keep * self.trials[index] + tried
        self.is_stale = True

    def refresh(self) -> None:
        """Bring the arrays up to the counts."""
        low, high = CHANCE_RANGE
        pairs = zip(self.hits, self.trials, strict=True)
        chances = np.array([min(high, max(low, hit / tried)) for hit, tried in pairs])
        np.cumsum(np.log(chances)[_CLASS_OF], out=self.log_survival)
        np.cumsum((1.0 - chances)[_CLASS_OF], out=self.misses)
        self.survival = np.exp(self.log_survival)
        self.is_stale = False


@dataclass(slots=True)
class _Adjustment:
    """The hazard of one request with one source."""

    rejections: float = 0.0
    expected: float = 0.0
    hazard: float = 1.0

    def count(self, expected: float, missed: bool) -> None:
        self.rejections = HAZARD_KEEP * self.rejections + missed
        self.expected = HAZARD_KEEP * self.expected + expected
        low, high = HAZARD_RANGE
        hazard = (HAZARD_PRIOR + self.rejections) / (HAZARD_PRIOR + self.expected)
        self.hazard = min(high, max(low, hazard))


class _SourceOdds:
    """One source: a curve for each of its kinds, an adjustment for each request."""

    def __init__(self, priors: Priors) -> None:
        self._curves = [
            [_Curve.of(odds) for odds in kinds] for kinds in (priors.greedy, priors.sampled)
        ]
        self.adjustments: dict[str, _Adjustment] = {}

    def curve(self, kind: int, *, sampled: bool) -> _Curve:
        return self._curves[sampled][kind]


class AcceptanceModel:
    """Learns the acceptance rate of each source. Sources must be registered first."""

    def __init__(self) -> None:
        self._sources: dict[str, _SourceOdds] = {}

    def register(self, source: str, priors: Priors) -> None:
        """Add a source with its odds before anything is measured."""
        self._sources[source] = _SourceOdds(priors)

    def survival(
        self, source: str, kind: int, request_id: str, length: int, *, sampled: bool
    ) -> FloatArray:
        """Chance that the first 1, 2, ... ``length`` tokens are all accepted; read only, [length].

        ``length`` may be `MAX_LENGTH` at most. ``sampled``: the temperature is above 0.
        """
        odds = self._sources[source]
        curve = odds.curve(kind, sampled=sampled)
        if curve.is_stale:
            curve.refresh()
        adjustment = odds.adjustments.get(request_id)
        if adjustment is None:
            return curve.survival[:length]
        bent: FloatArray = np.exp(adjustment.hazard * curve.log_survival[:length])
        return bent

    def score(
        self, source: str, kind: int, request_id: str, num_hits: int, *, missed: bool, sampled: bool
    ) -> None:
        """Learn that ``num_hits`` leading tokens were right, and the next one wrong if ``missed``.

        Not missed: the guess has no further token, or it is not known whether it is right.
        """
        num_tried = min(num_hits + missed, MAX_LENGTH)
        if not num_tried:
            return
        odds = self._sources[source]
        curve = odds.curve(kind, sampled=sampled)
        adjustment = odds.adjustments.setdefault(request_id, _Adjustment())
        adjustment.count(float(curve.misses[num_tried - 1]), missed)
        curve.count(num_hits, missed)

    def forget(self, request_id: str) -> None:
        """Drop a request's adjustments; the curves stay."""
        for odds in self._sources.values():
            odds.adjustments.pop(request_id, None)

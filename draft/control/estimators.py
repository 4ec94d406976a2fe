"""The estimators of acceptance, each with the question that it answers.

`AcceptanceModel`: how likely are the first 1, 2, ... tokens of a guess that was looked up accepted,
from this source, of this kind, for this request? The chance of a token *given that all before it
are accepted* is learnt for each source and kind of guess in classes of positions, separately for
greedy and for sampled requests. If a source does better or worse for one request, the request's
survival is the curve's survival ** hazard (proportional hazards, Cox 1972). The hazard is the
request's rejections over those that the curve expected. One rejection changes it a little, three in
a row a lot.

`NodeWorth`: how many accepted tokens does the b-th best node of a proposer's draft bring, and how
often has a draft so many nodes? Asked before the proposer drafts.

A third one, `GapModel` (draft/proposers/gap_model.py), works in the model thread, while a draft
grows: which of the best tokens of a place will the target take, by the gaps of their scores?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import maxsize

import numpy as np
from numpy.typing import NDArray

from ..sources.source import BUCKETS, Chances, Priors

FloatArray = NDArray[np.float64]

MAX_LENGTH = 64  # positions that a curve covers; the last chance holds beyond
PRIOR_TOKENS = 10.0  # tokens that the prior weighs as much as
WINDOW = 150.0  # tokens of a class over which counts fade
HAZARD_PRIOR = 1.0  # expected rejections that "as usual" weighs as much as
HAZARD_KEEP = 0.95  # what is left of a request's counts after each of its guesses
HAZARD_RANGE = (0.1, 12.0)
CHANCE_RANGE = (0.005, 0.998)
PRIOR_DRAFTS = 4.0  # that the prior of a node weighs as much as
TRIAL_WEIGHT = 5.0  # drafts that one of a model counts as that is tried now and then
NODE_WINDOW = 60.0  # drafts over which counts of nodes fade

_STOPS = (*BUCKETS[1:], maxsize)  # of each class of positions
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
    def of(cls, prior: Chances) -> _Curve:
        curve = cls([PRIOR_TOKENS * chance for chance in prior], [PRIOR_TOKENS] * len(prior))
        curve.refresh()
        return curve

    def count(self, num_hits: int, missed: bool) -> None:
        """Count ``num_hits`` positions as right, and the next one as wrong if ``missed``."""
        num_tried = num_hits + missed
        for index, start in enumerate(BUCKETS):
            if start >= num_tried:
                break
            stop = _STOPS[index] if _STOPS[index] < num_tried else num_tried
            hit, tried = num_hits if num_hits < stop else stop, stop - start
            keep = max(0.0, 1.0 - tried / WINDOW)
            self.hits[index] = keep * self.hits[index] + hit - start
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


class AcceptanceModel:
    """Learns the acceptance rate of each source. Sources must be registered first."""

    def __init__(self) -> None:
        self._curves: dict[str, list[list[_Curve]]] = {}  # by source, whether sampled, and kind
        self._adjustments: dict[str, dict[str, _Adjustment]] = {}  # by request and source

    def register(self, source: str, priors: Priors) -> None:
        """Add a source with its chances before anything is measured."""
        self._curves[source] = [
            [_Curve.of(chances) for chances in kinds] for kinds in (priors.greedy, priors.sampled)
        ]

    def survival(
        self, source: str, kind: int, request_id: str, length: int, *, sampled: bool
    ) -> FloatArray:
        """Chance that the first 1, 2, ... ``length`` tokens are all accepted; read only, [length].

        ``length`` may be `MAX_LENGTH` at most. ``sampled``: the temperature is above 0.
        """
        curve = self._curves[source][sampled][kind]
        if curve.is_stale:
            curve.refresh()
        adjustments = self._adjustments.get(request_id)
        adjustment = None if adjustments is None else adjustments.get(source)
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
        curve = self._curves[source][sampled][kind]
        expected = float(curve.misses[num_tried - 1])
        self._adjustment(request_id, source).count(expected, missed)
        curve.count(num_hits, missed)

    def _adjustment(self, request_id: str, source: str) -> _Adjustment:
        """The adjustment of a request for a source, made where there is none yet."""
        by_source = self._adjustments.setdefault(request_id, {})
        adjustment = by_source.get(source)
        if adjustment is None:
            adjustment = by_source[source] = _Adjustment()
        return adjustment

    def forget(self, request_id: str) -> None:
        """Drop a request's adjustments; the curves stay."""
        self._adjustments.pop(request_id, None)


class NodeWorth:
    """Learns how often the b-th best node of a proposer's draft is accepted, by b.

    Counts drafts that might have had so many nodes: a node that the proposer did not think worth
    its row brought nothing, and cost nothing. While nothing is known of a node, those before it are
    continued: its value falls as it fell. For greedy and for sampled requests apart.
    """

    def __init__(self, most: int, *, greedy: float, sampled: float) -> None:
        self._counts = _NodeCounts(most, greedy), _NodeCounts(most, sampled)

    def expected_accepted(self, most: int, *, sampled: bool) -> FloatArray:
        """Accepted tokens that each of ``most`` nodes brings a draft, [most]; never rising."""
        return self._counts[sampled].refreshed().accepted[:most]

    def node_probability(self, most: int, *, sampled: bool) -> FloatArray:
        """Share of drafts with so many nodes, [most]; never rising."""
        return self._counts[sampled].refreshed().probability[:most]

    def observe(
        self,
        most: int,
        num_proposed: int,
        ranks: Sequence[int],
        *,
        sampled: bool,
        weight: float = 1.0,
    ) -> None:
        """A draft of at most ``most`` nodes had ``num_proposed``; those of ``ranks`` were right.

        ``weight``: drafts that it counts as.
        """
        self._counts[sampled].count(most, num_proposed, ranks, weight)


class _NodeCounts:
    """Faded counts of drafts by rank, and what follows from them; all [most]."""

    def __init__(self, most: int, first: float) -> None:
        self.accepted, self.probability = np.ones(most), np.ones(most)
        self._first = first  # accepted tokens of the best node while nothing is known
        self._num_hits, self._num_proposed, self._num_trials = (
            [0.0] * most,
            [0.0] * most,
            [0.0] * most,
        )
        self._is_stale = True

    def count(self, most: int, num_proposed: int, ranks: Sequence[int], weight: float) -> None:
        """Count a draft."""
        keep, hit = (1.0 - 1.0 / NODE_WINDOW) ** weight, set(ranks)
        for rank in range(min(most, len(self._num_trials))):
            self._num_trials[rank] = keep * self._num_trials[rank] + weight
            self._num_proposed[rank] = keep * self._num_proposed[rank] + weight * (
                rank < num_proposed
            )
            self._num_hits[rank] = keep * self._num_hits[rank] + weight * (rank in hit)
        self._is_stale = True

    def refreshed(self) -> _NodeCounts:
        """Bring the arrays up to the counts."""
        if not self._is_stale:
            return self
        self._is_stale = False
        accepted, fall, probability = 1.0, self._first, 1.0
        counts = zip(self._num_hits, self._num_proposed, self._num_trials, strict=True)
        for rank, (num_hits, num_proposed, num_trials) in enumerate(counts):
            trials, before = PRIOR_DRAFTS + num_trials, accepted
            accepted = min(accepted, (PRIOR_DRAFTS * accepted * fall + num_hits) / trials)
            probability = min(probability, (PRIOR_DRAFTS * probability + num_proposed) / trials)
            fall = accepted / max(before, 1e-9)
            self.accepted[rank], self.probability[rank] = accepted, probability
        return self

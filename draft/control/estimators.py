"""Estimators of acceptance.

`AcceptanceModel` estimates the survival of a looked-up guess from its source, its kind (an index
that its source chooses) and its request. It learns the acceptance probability of a token *given
that all tokens before it are accepted*, for each source, kind and bucket of positions, separately
for greedy and for sampled requests. If the guesses of a source are better or worse for one request
than for others, the survival is raised to the power of the request's hazard (proportional hazards,
Cox 1972). The hazard is the number of rejections for the request divided by the expected number.

`NodeWorth` estimates, before a proposer drafts, how often the draft will have a b-th best node, and
how often that node will be accepted.

A third estimator, `GapModel` (draft/proposers/gap_model.py), works in the model thread while a
draft grows. It estimates which of the best next tokens the target will choose, from the gaps
between their scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import maxsize

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..sources.source import BUCKETS, Chances, Priors

FloatArray = NDArray[np.float64]

MAX_LENGTH = 64  # number of positions that a curve covers
PRIOR_TOKENS = 10.0  # weight of the prior, in observed tokens
WINDOW = 150.0  # number of tokens over which the counts of a bucket decay
HAZARD_PRIOR = 1.0  # weight of the prior hazard of 1, in expected rejections
HAZARD_KEEP = 0.95  # share of a request's counts that remains after each of its guesses
HAZARD_RANGE = (0.1, 12.0)
CHANCE_RANGE = (0.005, 0.998)
PRIOR_DRAFTS = 4.0  # weight of a node's prior, in observed drafts
TRIAL_WEIGHT = 5.0  # weight of a probe of an unused proposer, in drafts
NODE_WINDOW = 60.0  # number of drafts over which counts of nodes decay

_SPANS = tuple(zip(BUCKETS, (*BUCKETS[1:], maxsize), strict=True))  # positions of each bucket
_CLASS_OF = np.searchsorted(BUCKETS, np.arange(MAX_LENGTH), side="right") - 1


@dataclass(slots=True)
class _Curve:
    """The survival of one kind of guess.

    ``log_survival`` and ``expected_rejections`` include the new ``scores`` only after `refresh`.
    """

    hits: list[float]  # [len(BUCKETS)] decayed number of accepted tokens
    trials: list[float]  # [len(BUCKETS)] decayed number of tokens with a known outcome
    log_survival: FloatArray = field(default_factory=lambda: np.zeros(MAX_LENGTH))
    row: int = 0  # index in the model's table of curves, of which ``log_survival`` is a row
    # [MAX_LENGTH] expected rejections among the first 1, 2, ... tokens
    expected_rejections: list[float] = field(default_factory=list)
    # (accepted, tried) tokens of the guesses that were scored since the arrays were computed
    scores: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, prior: Chances) -> _Curve:
        curve = cls([PRIOR_TOKENS * chance for chance in prior], [PRIOR_TOKENS] * len(prior))
        curve.refresh()
        return curve

    def count(self) -> None:
        """Decay the counts and add the new scores to them, all with the same weight."""
        for index, (start, stop) in enumerate(_SPANS):
            hits = tried = 0
            for num_hits, num_tried in self.scores:
                if num_tried > start:
                    hits += (num_hits if num_hits < stop else stop) - start
                    tried += (num_tried if num_tried < stop else stop) - start
            if not tried:
                break
            keep = math.exp(-tried / WINDOW)
            self.hits[index] = keep * self.hits[index] + hits
            self.trials[index] = keep * self.trials[index] + tried
        self.scores.clear()

    def refresh(self) -> None:
        """Count the new scores and recompute the arrays."""
        self.count()
        low, high = CHANCE_RANGE
        pairs = zip(self.hits, self.trials, strict=True)
        chances = np.array([min(high, max(low, hit / tried)) for hit, tried in pairs])
        np.cumsum(np.log(chances)[_CLASS_OF], out=self.log_survival)
        self.expected_rejections = (1.0 - chances)[_CLASS_OF].cumsum().tolist()


@dataclass(slots=True)
class _Adjustment:
    """The hazard of one source's guesses for one request: rejections per expected rejection."""

    rejections: float = 0.0
    expected: float = 0.0
    hazard: float = 1.0

    def count(self, expected: float, missed: bool) -> None:
        self.rejections = HAZARD_KEEP * self.rejections + missed
        self.expected = HAZARD_KEEP * self.expected + expected
        low, high = HAZARD_RANGE
        hazard = (HAZARD_PRIOR + self.rejections) / (HAZARD_PRIOR + self.expected)
        self.hazard = min(high, max(low, hazard))


class GuessClass(msgspec.Struct, frozen=True, gc=False):
    """The properties of a guess on which its survival depends."""

    source: str
    kind: int
    request_id: str
    sampled: bool  # whether the request's temperature is above 0


class AcceptanceModel:
    """Learns the acceptance of each source. `register` must be called for each source first."""

    def __init__(self) -> None:
        self._curves: dict[str, list[list[_Curve]]] = {}  # curves by source, is_sampled and kind
        self._log_survival = np.zeros((0, MAX_LENGTH))  # [number of curves, MAX_LENGTH]
        self._adjustments: dict[str, dict[str, _Adjustment]] = {}  # hazards by request and source

    def register(self, source: str, priors: Priors) -> None:
        """Add a source with the prior acceptance probabilities of its guesses."""
        self._curves[source] = [
            [_Curve.of(chances) for chances in kinds] for kinds in (priors.greedy, priors.sampled)
        ]
        curves = [each for kinds in self._curves.values() for own in kinds for each in own]
        self._log_survival = np.array([curve.log_survival for curve in curves])
        for row, curve in enumerate(curves):
            curve.row, curve.log_survival = row, self._log_survival[row]

    def survivals(self, guesses: Sequence[GuessClass], longest: int) -> FloatArray:
        """Return the probabilities that the first 1, 2, ... ``longest`` tokens are all accepted.

        The shape is [len(guesses), longest]; ``longest`` is at most `MAX_LENGTH`.
        """
        curves = [self._curves[each.source][each.sampled][each.kind] for each in guesses]
        for curve in curves:
            if curve.scores:
                curve.refresh()
        known = self._adjustments
        hazards = [
            known[each.request_id][each.source].hazard
            if each.request_id in known and each.source in known[each.request_id]
            else 1.0
            for each in guesses
        ]
        logs = self._log_survival[[curve.row for curve in curves], :longest]
        survivals: FloatArray = np.exp(np.array(hazards)[:, None] * logs)
        return survivals

    def score(
        self, source: str, kind: int, request_id: str, num_hits: int, *, missed: bool, sampled: bool
    ) -> None:
        """Learn that ``num_hits`` leading tokens were right, and the next one wrong if ``missed``.

        ``missed`` is False if the guess has no further token, or if its outcome is unknown.
        """
        num_tried = min(num_hits + missed, MAX_LENGTH)
        if not num_tried:
            return
        curve = self._curves[source][sampled][kind]
        self._adjustment(request_id, source).count(curve.expected_rejections[num_tried - 1], missed)
        curve.scores.append((num_hits, num_hits + missed))

    def _adjustment(self, request_id: str, source: str) -> _Adjustment:
        """Return how one request's hazard for a source differs; create the record on first use."""
        by_source = self._adjustments.setdefault(request_id, {})
        adjustment = by_source.get(source)
        if adjustment is None:
            adjustment = by_source[source] = _Adjustment()
        return adjustment

    def forget(self, request_id: str) -> None:
        """Drop the hazards of a request; the curves of the sources remain."""
        self._adjustments.pop(request_id, None)


class NodeWorth:
    """Learns how often the b-th best node of a proposer's draft is accepted, for each b.

    Drafts with fewer than b nodes count too, if b nodes were allowed: the missing node brought no
    token and cost no row. The prior of a node continues the trend of the nodes before it. Greedy
    and sampled requests are counted separately.
    """

    def __init__(self, most: int, *, greedy: float, sampled: float) -> None:
        self._counts = _NodeCounts(most, greedy), _NodeCounts(most, sampled)

    def expected_accepted(self, most: int, *, sampled: bool) -> FloatArray:
        """Return the probability that each of the best nodes exists and is accepted, [most]."""
        return self._counts[sampled].refreshed().accepted[:most]

    def node_probability(self, most: int, *, sampled: bool) -> FloatArray:
        """Return the probability that a draft has at least 1, 2, ... ``most`` nodes, [most]."""
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
        """Learn from a verified draft.

        The draft was allowed ``most`` nodes and had ``num_proposed``. ``ranks``: ranks of the
        accepted nodes; 0 is the best. The draft has the weight of ``weight`` drafts.
        """
        self._counts[sampled].count(most, num_proposed, ranks, weight)


class _NodeCounts:
    """Counts by the rank of a node, in which old drafts weigh less, and the estimates from them.

    All arrays and lists have the shape [most].
    """

    def __init__(self, most: int, first: float) -> None:
        self.accepted, self.probability = np.ones(most), np.ones(most)
        self._first = first  # prior acceptance probability of the best node
        self._num_hits, self._num_proposed, self._num_trials = (
            [0.0] * most,
            [0.0] * most,
            [0.0] * most,
        )
        self._is_stale = True

    def count(self, most: int, num_proposed: int, ranks: Sequence[int], weight: float) -> None:
        """Count a draft that was allowed ``most`` nodes, with the weight of ``weight`` drafts."""
        keep, hit = (1.0 - 1.0 / NODE_WINDOW) ** weight, set(ranks)
        for rank in range(min(most, len(self._num_trials))):
            self._num_trials[rank] = keep * self._num_trials[rank] + weight
            self._num_proposed[rank] = keep * self._num_proposed[rank] + weight * (
                rank < num_proposed
            )
            self._num_hits[rank] = keep * self._num_hits[rank] + weight * (rank in hit)
        self._is_stale = True

    def refreshed(self) -> _NodeCounts:
        """Recompute the estimates from the counts, if they are stale; return this object."""
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

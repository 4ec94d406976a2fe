"""How often guesses come true, by source and position, and for each request on its own.

The chance of a token *given that all before it were right* is learnt for each source and kind of
guess in buckets of positions. A request for which a source does better or worse than usual bends
the curve: survival of the request = survival of the curve ** hazard (proportional hazards, Cox
1972), where the hazard is its rejections over those that the curve expected, one for each token
tried and its chance to be wrong. One failure bends a little, three in a row a lot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

BUCKETS = (0, 1, 2, 4, 8, 16)  # first position of each
MAX_LENGTH = 64  # positions that a curve covers; the last chance holds beyond
PRIOR_TOKENS = 10.0  # tokens that the prior weighs as much as
WINDOW = 150.0  # tokens of a bucket over which counts fade
BEND_PRIOR = 0.7  # expected rejections that "as usual" weighs as much as
BEND_KEEP = 0.9  # what is left of a request's counts after each of its guesses
BEND_RANGE = (0.1, 12.0)
STALE_AFTER = 500  # guesses of a source after which a silent request counts half
CHANCE_RANGE = (0.005, 0.998)

_OF_POSITION = np.searchsorted(BUCKETS, np.arange(MAX_LENGTH), side="right") - 1


@dataclass(slots=True)
class _Curve:
    """Chances of one kind of guess; the arrays [MAX_LENGTH] are void while stale."""

    hits: list[float]
    trials: list[float]
    log_survival: FloatArray = field(default_factory=lambda: np.zeros(MAX_LENGTH))
    misses: FloatArray = field(default_factory=lambda: np.zeros(MAX_LENGTH))  # expected so far
    survival: FloatArray = field(default_factory=lambda: np.ones(MAX_LENGTH))
    is_stale: bool = True

    @classmethod
    def of(cls, prior: float) -> _Curve:
        curve = cls([PRIOR_TOKENS * prior] * len(BUCKETS), [PRIOR_TOKENS] * len(BUCKETS))
        curve.refresh()
        return curve

    def count(self, num_hits: int, missed: bool) -> None:
        """Positions below ``num_hits`` came true; the next one did not, or was not known."""
        num_tried = num_hits + missed
        for bucket, start in enumerate(BUCKETS):
            if start >= num_tried:
                break
            stop = BUCKETS[bucket + 1] if bucket + 1 < len(BUCKETS) else num_tried
            tried = min(num_tried, stop) - start
            keep = max(0.0, 1.0 - tried / WINDOW)
            self.hits[bucket] = keep * self.hits[bucket] + min(num_hits, stop) - start
            self.trials[bucket] = keep * self.trials[bucket] + tried
        self.is_stale = True

    def misses_among(self, num_tried: int) -> float:
        """Misses that were expected of so many tokens, when last asked for survival."""
        return float(self.misses[num_tried - 1])

    def refresh(self) -> None:
        low, high = CHANCE_RANGE
        pairs = zip(self.hits, self.trials, strict=True)
        chances = np.array([min(high, max(low, hit / tried)) for hit, tried in pairs])
        np.cumsum(np.log(chances)[_OF_POSITION], out=self.log_survival)
        np.cumsum((1.0 - chances)[_OF_POSITION], out=self.misses)
        self.survival = np.exp(self.log_survival)
        self.is_stale = False


@dataclass(slots=True)
class _Bend:
    """How one request fares with one source against the source's curves."""

    seen_at: int  # guesses of the source scored until then
    rejections: float = 0.0
    expected: float = 0.0
    hazard: float = 1.0

    def count(self, expected: float, missed: bool, now: int) -> None:
        self.rejections = BEND_KEEP * self.rejections + missed
        self.expected = BEND_KEEP * self.expected + expected
        self.seen_at = now
        self._update()

    def fade(self, now: int) -> None:
        """A source may have come right since: half forget what is old."""
        self.rejections *= 0.5
        self.expected *= 0.5
        self.seen_at = now
        self._update()

    def _update(self) -> None:
        low, high = BEND_RANGE
        hazard = (BEND_PRIOR + self.rejections) / (BEND_PRIOR + self.expected)
        self.hazard = min(high, max(low, hazard))


class _Track:
    """One source: a curve for each of its kinds, a bend for each request."""

    def __init__(self, priors: Sequence[float]) -> None:
        self.curves = [_Curve.of(prior) for prior in priors]
        self.bends: dict[str, _Bend] = {}
        self.num_scored = 0

    def curve(self, kind: int) -> _Curve:
        curve = self.curves[kind]
        if curve.is_stale:
            curve.refresh()
        return curve


class Calibration:
    """Learns how far each source can be trusted. Sources must be registered first."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}

    def register(self, source: str, priors: Sequence[float]) -> None:
        """A source, with the chance of a token for each of its kinds while nothing is known."""
        self._tracks[source] = _Track(priors)

    def survival(self, source: str, kind: int, request_id: str, length: int) -> FloatArray:
        """Chance that the first 1, 2, ... ``length`` tokens all come true; read only, [length].

        ``length`` may be `MAX_LENGTH` at most.
        """
        track = self._tracks[source]
        curve = track.curve(kind)
        bend = track.bends.get(request_id)
        if bend is None:
            return curve.survival[:length]
        if track.num_scored - bend.seen_at > STALE_AFTER:
            bend.fade(track.num_scored)
        return np.exp(bend.hazard * curve.log_survival[:length])

    def chance(self, source: str, kind: int, request_id: str) -> float:
        """Chance that the first token comes true: `survival` at a glance, without arrays."""
        track = self._tracks[source]
        curve, bend = track.curves[kind], track.bends.get(request_id)
        chance = min(CHANCE_RANGE[1], curve.hits[0] / curve.trials[0])
        return chance if bend is None else float(chance**bend.hazard)

    def score(self, source: str, kind: int, request_id: str, num_hits: int, missed: bool) -> None:
        """``num_hits`` leading tokens of a guess came true; then one was wrong if ``missed``.

        Not missed: the guess was used up, or nothing is known of the rest.
        """
        num_tried = min(num_hits + missed, MAX_LENGTH)
        if not num_tried:
            return
        track = self._tracks[source]
        expected = track.curves[kind].misses_among(num_tried)
        track.num_scored += 1
        bend = track.bends.get(request_id)
        if bend is None:
            bend = track.bends[request_id] = _Bend(track.num_scored)
        bend.count(expected, missed, track.num_scored)
        track.curves[kind].count(num_hits, missed)

    def forget(self, request_id: str) -> None:
        """The request left; what it taught of the sources stays."""
        for track in self._tracks.values():
            track.bends.pop(request_id, None)

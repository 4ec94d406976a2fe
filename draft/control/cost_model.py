"""CostModel: the time of a step, measured at start-up and corrected by every step.

All times are in seconds. The model deals with rows, passes and tokens, not with single requests or
drafts. A row attends to the whole context of its request. The time of a pass is a function of its
number of rows, plus a time per key for every row of a request after the first. The keys of each
request's first row are part of every pass, with or without drafts, so their time counts as part of
the pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, log

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

UNMEASURED_ROW_SHARE = 0.05  # unmeasured cost of one more row, as a share of a one-row pass
UNMEASURED_DRAFT_SHARE = 0.2  # cost of an unmeasured proposer's pass, as a share of a target's
DRIFT_RATE, KNOT_RATE = 0.03, 0.05  # share of an error that one pass corrects
MAX_ERROR = 0.3  # limit of one pass's error (share or log ratio), so that stalls count less
MEAN_RATE = 0.05  # minimum weight of a new value in a running mean
PRIOR_SPREAD = 0.1  # prior spread of predicted seconds, as a share of their mean
SLOPE_RANGE = (0.2, 5.0)
MAX_OUTLIER = 3.0  # maximum multiple of a mean that one value counts as, so that stalls count less


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Times of passes, in seconds, by the number of rows of a pass."""

    forward: Mapping[int, float] = field(default_factory=dict)  # seconds of target passes by rows
    draft: Mapping[int, float] = field(default_factory=dict)  # seconds of proposer passes by rows
    key_s: float = 0.0  # seconds per key of each row after a request's first, in the target's pass


class CostCurve:
    """The seconds of a pass as a function of its rows: linear between knots, never falling.

    Each knot has its own correction. In addition, all knots share one correction, the drift,
    because the speed of a machine may change.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        self.is_measured = bool(measured)
        self._knots, base = _with_tail(measured or {1: 1.0})
        self._log_base = np.log(base)
        self._corrections = np.zeros(len(base))
        self._drift = 0.0
        self._values = base
        self._index: list[float] = self._knots.tolist()

    def at(self, num_rows: int | IntArray) -> FloatArray:
        """Return the seconds of a pass for each number of rows in ``num_rows``, in its shape."""
        return np.asarray(np.interp(num_rows, self._knots, self._values))

    def seconds(self) -> dict[int, float]:
        """Return the seconds of a pass for each number of rows that has a knot."""
        return {
            int(knot): value for knot, value in zip(self._index, self._values.tolist(), strict=True)
        }

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from one pass of ``num_rows`` rows that took ``seconds``."""
        if num_rows <= 0 or seconds <= 0.0:
            return
        error = log(seconds / float(self.at(num_rows)))
        if not self.is_measured:  # The first pass corrects all knots alike.
            self.is_measured, self._drift = True, error
        else:
            self._correct(num_rows, min(MAX_ERROR, max(-MAX_ERROR, error)))
        logs = self._log_base + self._corrections + self._drift
        self._values = np.maximum.accumulate(np.exp(logs))

    def _correct(self, num_rows: int, error: float) -> None:
        """Distribute the error of a prediction over the drift and the two nearest knots.

        ``error``: logarithm of the ratio of measured to predicted seconds.
        """
        low = min(max(0, bisect_right(self._index, num_rows) - 1), len(self._index) - 2)
        width = self._index[low + 1] - self._index[low]
        share = min(1.0, max(0.0, (num_rows - self._index[low]) / width))
        self._drift += DRIFT_RATE * error
        self._corrections[low] += KNOT_RATE * (1.0 - share) * error
        self._corrections[low + 1] += KNOT_RATE * share * error


def _with_tail(measured: Mapping[int, float]) -> tuple[FloatArray, FloatArray]:
    """Return the knots of a curve, in rows, and the seconds of a pass at each knot.

    The knots are the measured numbers of rows and all larger powers of two up to 2**17. A
    disturbance can only make a pass slower. So if a pass of fewer rows took longer than a pass of
    more rows, the shorter time is used for both.
    """
    knots = np.array(sorted(measured), dtype=np.float64)
    found = np.array([measured[int(knot)] for knot in knots])
    base = np.minimum.accumulate(found[::-1])[::-1]
    if len(knots) > 1:
        # The slope of the tail is a mean over the upper half of the knots, because the last
        # interval alone may be noisy.
        half = (len(knots) - 1) // 2
        slope = (base[-1] - base[half]) / (knots[-1] - knots[half])
    else:
        slope = UNMEASURED_ROW_SHARE * base[0] / knots[0]
    tail = 2.0 ** np.arange(1, 18)
    tail = tail[tail > knots[-1]]
    return np.append(knots, tail), np.append(base, base[-1] + slope * (tail - knots[-1]))


class Mean:
    """A running mean.

    The weight of the n-th value is 1/n, but at least `MEAN_RATE`. From the fourth value on, values
    are limited to ``max_outlier`` times the mean.
    """

    def __init__(self, max_outlier: float = MAX_OUTLIER) -> None:
        self.value = 0.0
        self.num_seen = 0
        self._max_outlier = max_outlier

    def observe(self, value: float) -> None:
        """Add a value, which must not be negative."""
        self.num_seen += 1
        if self.num_seen > 3:
            value = min(value, self._max_outlier * self.value)
        self.value += max(MEAN_RATE, 1.0 / self.num_seen) * (value - self.value)


class _Fit:
    """A running least-squares fit: seconds of a pass = slope * predicted seconds + residual.

    The prediction comes from the cost curve and the time per key. Longer contexts increase the
    residual, and a slower machine increases the slope. If all passes have the same number of rows,
    slope and residual cannot be distinguished, and the slope stays near 1.
    """

    def __init__(self) -> None:
        self._curve, self._seen = Mean(), Mean()
        self._variance = self._covariance = 0.0

    def observe(self, by_curve: float, seconds: float) -> None:
        """Add a pass that took ``seconds`` and was predicted to take ``by_curve`` seconds."""
        if self._seen.num_seen > 3:
            fitted = self.at(by_curve)
            seconds = min((1.0 + MAX_ERROR) * fitted, max((1.0 - MAX_ERROR) * fitted, seconds))
        off, seen_off = by_curve - self._curve.value, seconds - self._seen.value
        self._curve.observe(by_curve)
        self._seen.observe(seconds)
        if self._seen.num_seen > 1:
            self._variance += MEAN_RATE * (off * off - self._variance)
            self._covariance += MEAN_RATE * (off * seen_off - self._covariance)

    @property
    def ratio(self) -> float:
        """Mean measured seconds divided by mean predicted seconds; 1.0 before the first pass."""
        return self._seen.value / self._curve.value if self._curve.value else 1.0

    @property
    def slope(self) -> float:
        """Measured seconds of a pass per predicted second, within `SLOPE_RANGE`."""
        prior = (PRIOR_SPREAD * self._curve.value) ** 2
        if not prior:
            return 1.0
        low, high = SLOPE_RANGE
        return min(high, max(low, (self._covariance + prior) / (self._variance + prior)))

    def at(self, by_curve: float) -> float:
        """Return the fitted seconds of a pass that is predicted to take ``by_curve`` seconds."""
        return self._seen.value + self.slope * (by_curve - self._curve.value)


@dataclass(slots=True)
class _Load:
    """Means over steps without prompts that have a similar number of decoding requests."""

    seconds: Mean = field(default_factory=Mean)  # seconds from commit to commit
    tokens: Mean = field(default_factory=partial(Mean, max_outlier=inf))  # tokens per request
    forward: _Fit = field(default_factory=_Fit)  # seconds of the target's pass
    host_plain: Mean = field(default_factory=Mean)  # seconds outside passes, without drafts
    host_lookup: Mean = field(default_factory=Mean)  # seconds outside passes, with look-ups only
    host_proposer: Mean = field(default_factory=Mean)  # seconds outside passes, with a proposer


def best_chain_speedup(profile: StepProfile, odds: float, longest: int = 8) -> float:
    """Return the speed-up of decoding one request with chains of the best length.

    ``odds``: probability that a draft token is accepted if all tokens before it were accepted.
    ``longest``: maximum length of a chain in tokens.
    """
    forward, draft = CostCurve(profile.forward), CostCurve(profile.draft)
    lengths = np.arange(longest + 1)
    tokens = (odds**lengths).cumsum()
    seconds = forward.at(1 + lengths) + lengths * draft.at(1)
    return float((tokens / seconds).max() * forward.at(1))


class CostModel:
    """Estimates the seconds of rows and passes, and the engine's tokens per second."""

    def __init__(self, profile: StepProfile | None = None) -> None:
        self.load(profile or StepProfile())

    def load(self, profile: StepProfile) -> None:
        """Replace all measurements by a profile."""
        self.profile = profile
        self._forward, self._draft = CostCurve(profile.forward), CostCurve(profile.draft)
        self._loads: dict[int, _Load] = {}  # loads by the bit length of the number of requests
        self.num_observed = 0  # number of steps observed

    def learnt(self) -> StepProfile:
        """Return a profile of the curves, with all corrections from observed steps.

        All seconds of the target are multiplied by the ratio of measured to predicted seconds,
        taken from the steps with the most frequent number of requests.
        """
        profile, factor = self.profile, 1.0
        seen = max(self._loads.values(), key=lambda load: load.seconds.num_seen, default=None)
        if seen is not None:
            low, high = SLOPE_RANGE
            factor = min(high, max(low, seen.forward.ratio))
        forward = {rows: factor * value for rows, value in self._forward.seconds().items()}
        draft = self._draft.seconds() if profile.draft else {}
        return StepProfile(forward, draft, factor * profile.key_s)

    @property
    def is_ready(self) -> bool:
        """Whether a pass of the target was measured at start-up or observed in a step."""
        return self._forward.is_measured

    def row_seconds(self, num_rows: int, most: int, num_requests: int) -> FloatArray:
        """Return the seconds that 0, 1, ... ``most`` rows add to a pass of ``num_rows``.

        The shape is [most + 1]. ``num_requests``: requests that decode in the pass.
        """
        by_curve = self._forward.at(num_rows + np.arange(most + 1))
        added: FloatArray = by_curve - by_curve[0]
        load = self._loads.get(num_requests.bit_length())
        return added if load is None else load.forward.slope * added

    def key_seconds(self, num_requests: int) -> float:
        """Return the seconds per token of context that one more row adds to a pass."""
        load = self._loads.get(num_requests.bit_length())
        return self.profile.key_s * (1.0 if load is None else load.forward.slope)

    def draft_pass(self, num_rows: int | IntArray) -> FloatArray:
        """Return the seconds of a proposer's pass for each number of rows in ``num_rows``."""
        if self._draft.is_measured:
            return self._draft.at(num_rows)
        return UNMEASURED_DRAFT_SHARE * self._forward.at(num_rows)

    def draft_overhead(self, num_requests: int, *, with_proposer: bool = False) -> float:
        """Return how many more seconds the host takes in a step with drafts than in a step without.

        ``with_proposer``: whether a proposer drafts. Returns the value of steps with looked-up
        drafts until a step with a proposer has been observed.
        """
        load = self._loads.get(num_requests.bit_length())
        if load is None or not load.host_plain.num_seen:
            return 0.0
        host = (
            load.host_proposer
            if with_proposer and load.host_proposer.num_seen
            else load.host_lookup
        )
        return max(0.0, host.value - load.host_plain.value)

    def rate(self, num_requests: int) -> float:
        """Return the engine's recent tokens per second with about ``num_requests`` decodes.

        The rate is the mean number of tokens of a step divided by the mean seconds of a step. A
        mean of the steps' own rates would undervalue the few steps that yield most of the tokens,
        and so would clipped token counts.
        """
        load = self._loads.get(num_requests.bit_length())
        if load is None or not load.seconds.num_seen:
            return num_requests / float(self._forward.at(num_requests))
        return num_requests * load.tokens.value / load.seconds.value

    def step_seconds(self, num_requests: int) -> float:
        """Return the recent seconds of a step with about ``num_requests`` decodes."""
        load = self._loads.get(num_requests.bit_length())
        if load is None or not load.seconds.num_seen:
            return float(self._forward.at(num_requests))
        return load.seconds.value

    def observe(
        self,
        *,
        num_rows: int,
        num_requests: int,
        num_tokens: int,
        forward_s: float,
        draft_s: float,
        seconds: float,
        with_prompts: bool,
        with_proposer: bool = False,
        num_keys: int = 0,
    ) -> None:
        """Learn from one step.

        ``num_rows``: rows of the target's pass. ``num_requests``: requests that decode.
        ``num_tokens``: tokens that the step committed for these requests. ``seconds``: time since
        the tokens of the previous step were committed, including ``forward_s`` for the target's
        pass and ``draft_s`` for the proposer's passes. ``with_prompts``: whether prompt chunks
        share the step. ``with_proposer``: whether a proposer drafts. ``num_keys``: sum of the
        context lengths of all rows after the first of each request.
        """
        self.num_observed += 1
        keys_s = self.profile.key_s * num_keys
        if with_prompts or not num_requests or not self.is_ready:
            self._forward.observe(num_rows, forward_s - keys_s)
        if with_prompts or not num_requests:
            return
        load = self._loads.setdefault(num_requests.bit_length(), _Load())
        by_curve = float(self._forward.at(num_rows))
        load.forward.observe(by_curve + keys_s, forward_s)
        off = (forward_s - load.forward.at(by_curve + keys_s)) / load.forward.slope
        self._forward.observe(num_rows, by_curve + off)
        load.seconds.observe(seconds)
        load.tokens.observe(num_tokens / num_requests)
        host = load.host_lookup if num_rows > num_requests else load.host_plain
        host = load.host_proposer if with_proposer else host
        host.observe(max(0.0, seconds - forward_s - draft_s))

    def observe_draft(self, passes: Sequence[int], seconds: float) -> None:
        """Learn from the proposer's passes of one step, which took ``seconds`` together.

        ``passes``: the rows of each pass.
        """
        if not passes:
            return
        by_curve = np.ones(len(passes))
        if self._draft.is_measured:
            by_curve = self._draft.at(np.array(passes))
        factor = seconds / float(by_curve.sum())  # ratio of measured to predicted seconds
        known = dict(zip(passes, (factor * by_curve).tolist(), strict=True))
        for num_rows, each in known.items():
            self._draft.observe(num_rows, each)

"""What is learnt of one cost: a curve over the rows of a pass, and a line. Times are seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import log
from typing import overload

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

UNMEASURED_ROW_SHARE = 0.05  # of a pass of one row: a first guess, tried out in small steps
UNLIMITED = 1 << 40
NUM_STEADY = 10  # visits after which a knot no longer moves by the mean of its visits
NUM_NEW, NEW_SHIFT = 3, 1.0  # visits up to which a knot believes a log error so large
DRIFT_RATE, KNOT_RATE, FAST_RATE = 0.03, 0.07, 0.4  # share of an error that one step corrects
ALARM_LOW, ALARM_HIGH, ALARM_STEPS = 0.67, 1.5, 20
MAX_SHIFT = 3.0  # log ratio that one observation may claim when nothing better is known


class CostCurve:
    """Seconds of one pass against its rows: linear between knots, never falling.

    Each knot has a correction of its own, and all share one drift (contexts grow, machines slow
    down). Knots that nothing was measured at follow their neighbours' corrections.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        knots, base = _with_tail(measured) if measured else _unmeasured()
        self.num_observed = 0
        self.num_alarms = 0
        self.is_measured = bool(measured)
        self.reach = UNLIMITED if measured else 0  # rows that it can be asked about
        self._knots = knots
        self._log_knots = np.log(knots)
        self._log_base = np.log(base)
        self._values = base
        self._corrections = np.zeros(len(knots))
        self._visits = np.where(np.isin(knots, list(measured)), NUM_STEADY, 0)
        self._last_visit = np.zeros(len(knots), dtype=np.int64)
        self._index = knots.tolist()
        self._drift = 0.0
        self._spread = 0.2  # mean size of the log errors, clipped
        self._num_outside = 0
        self._num_fast = 0  # steps for which learning stays fast

    @overload
    def at(self, num_rows: int) -> float: ...
    @overload
    def at(self, num_rows: NDArray[np.integer]) -> FloatArray: ...
    def at(self, num_rows: int | NDArray[np.integer]) -> float | FloatArray:
        """Seconds of a pass of so many rows."""
        return np.interp(num_rows, self._knots, self._values)

    def age(self, num_rows: int) -> int:
        """Passes observed since the last one of about so many rows."""
        low, share = self._place(num_rows)
        return self.num_observed - int(self._last_visit[low + (share > 0.5)])

    def observe(self, num_rows: int, seconds: float) -> None:
        """One pass took so long."""
        if num_rows <= 0 or seconds <= 0.0:
            return
        error = log(seconds / self.at(num_rows))
        if not self.num_observed and not self.is_measured:
            self._drift, error = error, 0.0  # the first time sets the scale
        self.num_observed += 1
        self.reach = max(self.reach, 2 * num_rows + 2)
        self._watch(error)
        self._correct(num_rows, error)
        self._rebuild()

    def _watch(self, error: float) -> None:
        """Sound the alarm when the predictions are wrong for long."""
        is_outside = not log(ALARM_LOW) < error < log(ALARM_HIGH)
        self._num_outside = self._num_outside + 1 if is_outside else 0
        self._num_fast = max(0, self._num_fast - 1)
        if self._num_outside >= ALARM_STEPS:
            self.num_alarms += 1
            self._num_outside, self._num_fast = 0, ALARM_STEPS
            self._visits = np.minimum(self._visits, 1)  # each knot is learnt anew,
            self._last_visit -= UNLIMITED  # and all prices are stale

    def _correct(self, num_rows: int, error: float) -> None:
        """Shared between the drift and the two knots beside, an outlier's influence clipped."""
        low, share = self._place(num_rows)
        fast = self._num_fast > 0
        is_new = self._visits[low : low + 2].min() < NUM_NEW
        limit = MAX_SHIFT if fast else NEW_SHIFT if is_new else min(0.5, max(0.1, 3 * self._spread))
        self._spread += 0.05 * (min(0.5, abs(error)) - self._spread)
        clipped = min(limit, max(-limit, error))
        self._drift += (FAST_RATE if fast else DRIFT_RATE) * clipped
        for knot, weight in ((low, 1.0 - share), (low + 1, share)):
            if weight > 0.0:
                rate = max(KNOT_RATE, (1.0 - DRIFT_RATE) / (1 + int(self._visits[knot])))
                self._corrections[knot] += rate * weight * clipped
                self._visits[knot] += 1
        self._last_visit[low + (share > 0.5)] = self.num_observed

    def _rebuild(self) -> None:
        seen = self._visits > 0
        if not seen.all():
            known = self._corrections[seen]
            self._corrections = np.interp(self._log_knots, self._log_knots[seen], known)
        logs = self._log_base + self._corrections
        self._values = np.maximum.accumulate(np.exp(logs + self._drift))

    def _place(self, num_rows: int) -> tuple[int, float]:
        """The knot at or below, and how far towards the next one, in [0, 1]."""
        low = min(max(0, bisect_right(self._index, num_rows) - 1), len(self._index) - 2)
        width = self._index[low + 1] - self._index[low]
        return low, min(1.0, max(0.0, (num_rows - self._index[low]) / width))


class CostLine:
    """A cost ``base + slope * x``, both at least 0, by least squares over steps that fade.

    Where x hardly varies the cost is put down to the slope.
    """

    def __init__(self, slope: float = 0.0) -> None:
        self.base = 0.0
        self.slope = slope
        self._sums = np.zeros(5)  # of 1, x, x * x, y, x * y

    def observe(self, x: float, y: float) -> None:
        """Clips ``y`` to three times what was expected once a few steps are known."""
        if self._sums[0] > 3.0:
            expected = self.base + self.slope * x
            y = min(3.0 * expected, max(expected / 3.0, y)) if expected > 0.0 else y
        self._sums *= 0.98
        self._sums += (1.0, x, x * x, y, x * y)
        self._solve()

    def _solve(self) -> None:
        n, sx, sxx, sy, sxy = self._sums.tolist()
        ridge = n + 0.5
        det = ridge * sxx - sx * sx
        self.base = max(0.0, (sy * sxx - sx * sxy) / det) if det > 0.0 else 0.0
        self.slope = (sxy - self.base * sx) / sxx if sxx > 0.0 else 0.0
        if self.slope < 0.0:
            self.base, self.slope = sy / n, 0.0


def _with_tail(measured: Mapping[int, float]) -> tuple[FloatArray, FloatArray]:
    """Knots and their seconds: the measured ones made monotone, then powers of two beyond."""
    knots = np.array(sorted(measured), dtype=np.float64)
    base = np.maximum.accumulate(np.array([measured[int(knot)] for knot in knots]))
    if len(knots) > 1:
        # the mean slope of the upper half: one noisy step at the end must not rule the tail
        half = (len(knots) - 1) // 2
        slope = (base[-1] - base[half]) / (knots[-1] - knots[half])
    else:
        slope = UNMEASURED_ROW_SHARE * base[0] / knots[0]
    tail = 2.0 ** np.arange(1, 18)
    tail = tail[tail > knots[-1]]
    tail = tail if len(tail) else knots[-1:] * 2
    return np.append(knots, tail), np.append(base, base[-1] + slope * (tail - knots[-1]))


def _unmeasured() -> tuple[FloatArray, FloatArray]:
    """A shape without a scale."""
    knots = np.unique(np.concatenate([2.0 ** np.arange(18), 3.0 * 2.0 ** np.arange(12)]))
    return knots, 1.0 + UNMEASURED_ROW_SHARE * (knots - 1.0)

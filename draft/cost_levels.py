"""What steps take beyond the curves of their passes: learnt while they run, by who takes part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

NUM_SIZES = 12  # classes of draft rows
LEVEL_RATE, LEVEL_STEADY, LEVEL_CLIP = 0.08, 4, 0.3
CAUTION = 0.1  # of a pass, that drafts of a size not tried yet may cost beyond their rows
HOST_FORGOTTEN, FEW_SEEN = 300, 2  # steps
SCALE_FADE, SCALE_NOISE, MAX_SCALE = 0.98, 0.1, 2.0  # noise: of a pass
LEVEL_FORGOTTEN = 1000  # steps with about as many requests
NO_LEVELS = np.zeros(NUM_SIZES)
SIZE_OF = np.array([min(n.bit_length(), NUM_SIZES - 1) for n in range(1 << NUM_SIZES)])


class Levels:
    """By how much steps take longer than their rows and the profile tell, by size and draft rows.

    Steps with and without drafts differ by more than their rows (another shape of the batch,
    say), and that difference decides: so both are measured. [NUM_SIZES] values: no draft rows, 1,
    2 to 3, 4 to 7, ... What was not seen lately is taken from the next smaller size, and where
    no draft was seen at all, as dearer than it may be: trying out costs.
    """

    def __init__(self) -> None:
        self._seconds = np.zeros(NUM_SIZES)
        self._num_seen = np.zeros(NUM_SIZES, dtype=np.int64)
        self._last_seen = np.zeros(NUM_SIZES, dtype=np.int64)
        self._now = 0
        self._whole = 0.0  # seconds of such a pass; running mean
        self._filled = np.zeros(NUM_SIZES)

    def seconds(self) -> FloatArray:
        """[NUM_SIZES]; read only."""
        return self._filled

    def observe(self, num_drafts: int, error: float, whole: float) -> None:
        """A step with so many draft rows was off by ``error`` of its ``whole`` seconds."""
        self._now += 1
        size = min(num_drafts.bit_length(), NUM_SIZES - 1)
        if self._now - self._last_seen[size] > LEVEL_FORGOTTEN:
            self._num_seen[size] = 0
        seen = self._num_seen[size] = self._num_seen[size] + 1
        self._last_seen[size] = self._now
        self._whole += max(LEVEL_RATE, 1.0 / self._now) * (whole - self._whole)
        limit = whole if seen < LEVEL_STEADY else LEVEL_CLIP * whole
        error = min(limit, max(-limit, error - self._seconds[size] if seen > 1 else error))
        before = self._seconds[size] if seen > 1 else 0.0
        rate = max(LEVEL_RATE, 1.0 / max(1, seen - 1))  # the first ran on cold caches
        self._seconds[size] = before + rate * error
        self._fill()

    def _fill(self) -> None:
        is_known = (self._num_seen > 0) & (self._now - self._last_seen <= LEVEL_FORGOTTEN)
        if not is_known[0] and is_known.any():  # plain steps: what is known of the fewest drafts
            self._seconds[0] = self._seconds[int(is_known.argmax())]
        source = np.maximum.accumulate(np.where(is_known, np.arange(NUM_SIZES), 0))
        self._filled = self._seconds[source]
        self._filled[1:][source[1:] == 0] += CAUTION * self._whole


class _Mean:
    """A running mean of seconds, one outlier's influence clipped."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_seen = 0
        self.last_seen = 0

    def observe(self, seconds: float, now: int) -> None:
        """The first one ran on cold caches: the second replaces it."""
        self.num_seen, self.last_seen = self.num_seen + 1, now
        rate = max(0.05, 1.0 / max(1, self.num_seen - 1))
        limit = 2.0 * self.seconds + 1e-4 if self.num_seen > 1 else seconds
        self.seconds += rate * (min(seconds, limit) - self.seconds)


class Hosts:
    """What a step takes beyond its passes and its sampling, with drafts and without.

    It grows with those who take part: each power of two has means of its own, for a price that
    was learnt of a few requests makes drafts look cheap, or dear, beside one of many. What was
    seen once is not believed, and what was not seen for long is forgotten: a price that keeps
    drafts from being made would never be corrected.
    """

    def __init__(self, seconds: float) -> None:
        self._first = seconds
        self._means: dict[tuple[int, bool], _Mean] = {}
        self._now = 0  # steps

    def observe(self, num_requests: int, seconds: float, *, drafts: bool) -> None:
        """A step of so many requests."""
        self._now += 1
        key = (num_requests.bit_length(), drafts)
        known = self._means.get(key)
        if known is None or self._is_old(known):
            known = self._means[key] = _Mean()
        known.observe(seconds, self._now)

    def _is_old(self, mean: _Mean) -> bool:
        return self._now - mean.last_seen > HOST_FORGOTTEN

    def seconds(self, num_requests: int, *, drafts: bool) -> float:
        """As far as is known: of about as many requests, if need be of the other kind of step."""
        size = num_requests.bit_length()
        known = self._means.get((size, drafts))
        if known is None or known.num_seen < FEW_SEEN or self._is_old(known):
            known = self._nearest(size, drafts=drafts)
        return self._first if known is None else known.seconds

    def _nearest(self, size: int, *, drafts: bool) -> _Mean | None:
        def worth(key: tuple[int, bool]) -> tuple[bool, bool, int, bool]:
            mean = self._means[key]
            is_outlier = mean.num_seen < FEW_SEEN
            return is_outlier, self._is_old(mean), abs(key[0] - size), key[1] != drafts

        nearest = min(self._means, key=worth, default=None)
        return None if nearest is None else self._means[nearest]

    def num_seen(self, num_requests: int, *, drafts: bool) -> int:
        """Steps of about so many requests."""
        known = self._means.get((num_requests.bit_length(), drafts))
        return 0 if known is None else known.num_seen


class Scale:
    """What looking back takes, over what was said of it at start-up.

    That is measured but once, and a machine that was busy then may have told of any price. A line
    through steps that fade, whose slope is 1 where contexts differ by less than steps do anyway;
    what all steps have alike is not this one's.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._mean_s = 0.0  # of a pass
        self._sums = np.zeros(5)  # of 1, x, y, x * x, x * y

    def observe(self, context_s: float, seconds: float, forward_s: float) -> None:
        """A pass took ``seconds`` beyond its rows, of which ``context_s`` were expected."""
        if forward_s <= 0.0:
            return
        self._mean_s += (forward_s - self._mean_s) * (0.05 if self._mean_s else 1.0)
        limit = 2.0 * self._mean_s
        x, y = context_s / max(0.01, self.scale), min(limit, max(-limit, seconds))
        self._sums *= SCALE_FADE
        self._sums += (1.0, x, y, x * x, x * y)
        n, sx, sy, sxx, sxy = self._sums.tolist()
        noise = (SCALE_NOISE * self._mean_s) ** 2
        slope = (sxy - sx * sy / n + noise) / (sxx - sx * sx / n + noise)
        self.scale = min(MAX_SCALE, max(0.01, slope))

"""What a step costs: tables measured at start-up, corrected by every step that runs.

All times are seconds. Nothing here knows of requests or drafts, only of rows, passes and tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from .cost_curve import CostCurve, CostLine

FloatArray = NDArray[np.float64]

UNMEASURED_DRAFT_SHARE = 0.2  # of the target's pass, for a draft model never timed
READY_AFTER = 8  # passes; before that an unmeasured model drafts nothing
NUM_PLAIN = 8  # steps without drafts that tell their price; until then they are asked for


NUM_SIZES = 12  # classes of draft rows
LEVEL_RATE, LEVEL_STEADY, LEVEL_CLIP = 0.08, 4, 0.3
CAUTION = 0.1  # of a pass, that drafts of a size not tried yet may cost beyond their rows
HOST_FORGOTTEN, FEW_SEEN = 300, 2  # steps
SCALE_FADE, SCALE_NOISE, MAX_SCALE = 0.98, 0.1, 2.0  # noise: of a pass
LEVEL_FORGOTTEN = 1000  # steps with about as many requests
NO_LEVELS = np.zeros(NUM_SIZES)
SIZE_OF = np.array([min(n.bit_length(), NUM_SIZES - 1) for n in range(1 << NUM_SIZES)])


@dataclass(frozen=True, slots=True)
class LookBack:
    """Seconds of a pass that do not depend on what is drafted: who takes part, how far back."""

    per_request: float = 0.0  # beyond the first
    per_longest: float = 0.0  # for each token that the longest request looks back on
    per_token: float = 0.0  # for each token that all look back on together

    def seconds(self, num_requests: int, longest: int, total: int) -> float:
        """Of requests of ``total`` tokens together, the longest of ``longest``."""
        more = self.per_request * (num_requests - 1)
        return more + self.per_longest * longest + self.per_token * total


NO_LOOK_BACK = LookBack()


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Times measured at start-up, in seconds, by the number of rows of a pass."""

    forward: Mapping[int, float] = field(default_factory=dict)  # of the target
    draft: Mapping[int, float] = field(default_factory=dict)  # of the draft model; empty: none
    look_back: LookBack = NO_LOOK_BACK
    draft_look_back: LookBack = NO_LOOK_BACK


class _Levels:
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


class _Hosts:
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


class _Scale:
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


class CostModel:
    """Predicts a step's seconds; learns from each step. Works without a profile too."""

    def __init__(
        self,
        profile: StepProfile | None = None,
        *,
        per_token: float = 0.0,
        per_step: float = 0.0,
    ) -> None:
        self._levels: dict[tuple[int, bool], _Levels] = {}
        self.load(profile or StepProfile())
        self._verify = CostLine(per_token)
        self._hosts = _Hosts(per_step)

    def load(self, profile: StepProfile) -> None:
        """Begin anew from what was measured; what is known of sampling and the host stays."""
        self.profile = profile
        self._forward = CostCurve(profile.forward)
        self._draft = CostCurve(profile.draft)
        self._look_back = _Scale()
        self._levels.clear()

    def look_back(self, num_requests: int, longest: int, total: int) -> float:
        """Seconds of the target's pass that do not depend on its rows."""
        said = self.profile.look_back.seconds(num_requests, longest, total)
        return self._look_back.scale * said

    def levels(self, num_requests: int, *, with_prompts: bool) -> FloatArray:
        """What steps of about so many requests take beyond that, [NUM_SIZES] by draft rows."""
        known = self._levels.get((num_requests.bit_length(), with_prompts))
        return NO_LEVELS if known is None else known.seconds()

    def draft_look_back(self, num_requests: int, longest: int, total: int) -> float:
        """The same of one pass of the draft model, by the profile alone."""
        return self.profile.draft_look_back.seconds(num_requests, longest, total)

    @property
    def is_ready(self) -> bool:
        """Whether the target's pass was measured, or seen a few times."""
        return self._forward.is_measured or self._forward.num_observed >= READY_AFTER

    def lacks_plain(self, num_requests: int) -> bool:
        """Whether few steps without drafts were seen of about so many, for those with drafts.

        The first ones run on cold caches: believed for long, they would make drafts look cheap.
        """
        with_drafts = self._hosts.num_seen(num_requests, drafts=True)
        num_plain = self._hosts.num_seen(num_requests, drafts=False)
        return num_plain < NUM_PLAIN and with_drafts >= READY_AFTER * (1 + num_plain)

    @property
    def reach(self) -> int:
        """Rows of a pass at most: what was seen bounds it where nothing was measured."""
        return self._forward.reach

    @property
    def per_token(self) -> float:
        """Sampling seconds for each token that comes out."""
        return self._verify.slope

    @property
    def draft_per_token(self) -> float:
        """Sampling seconds for each token that the draft model guesses: the same sampler."""
        return self._verify.slope

    def per_step(self, num_requests: int, *, drafts: bool = False) -> float:
        """Seconds of the host in a step, and what sampling costs at least; deciding left out."""
        return self._hosts.seconds(num_requests, drafts=drafts) + self._verify.base

    @property
    def num_alarms(self) -> int:
        """How often predictions were wrong for so long that all was learnt anew."""
        return self._forward.num_alarms + self._draft.num_alarms

    @overload
    def forward(self, num_rows: int) -> float: ...
    @overload
    def forward(self, num_rows: NDArray[np.integer]) -> FloatArray: ...
    def forward(self, num_rows: int | NDArray[np.integer]) -> float | FloatArray:
        """Seconds of the target's pass of so many rows."""
        return self._forward.at(num_rows)

    @overload
    def draft_pass(self, num_rows: int) -> float: ...
    @overload
    def draft_pass(self, num_rows: NDArray[np.integer]) -> FloatArray: ...
    def draft_pass(self, num_rows: int | NDArray[np.integer]) -> float | FloatArray:
        """Seconds of one pass of the draft model, sampling left out."""
        if self._draft.is_measured or self._draft.num_observed:
            return self._draft.at(num_rows)
        return UNMEASURED_DRAFT_SHARE * self._forward.at(num_rows)

    def draft(self, rows_per_pass: NDArray[np.integer]) -> float:
        """Seconds of one pass for each entry, sampling left out; a pass of no rows is free."""
        return float(self.draft_pass(rows_per_pass)[rows_per_pass > 0].sum())

    def age(self, num_rows: int) -> int:
        """Steps since the target's pass was last observed at about so many rows."""
        return self._forward.age(num_rows)

    def observe(
        self,
        *,
        num_rows: int,
        forward_s: float,
        verify_s: float,
        num_tokens: int,
        draft_s: float = 0.0,
        draft_passes: int = 0,
        draft_rows: int = 0,
        num_drafted: int = 0,
        host_s: float = 0.0,
        context_s: float = 0.0,
        draft_context_s: float = 0.0,
        num_requests: int = 0,
        num_drafts: int = 0,
        with_prompts: bool = False,
    ) -> None:
        """One step: ``draft_rows`` in all of its ``draft_passes``, ``num_drafted`` of them sampled.

        The target's pass had ``num_rows``, and ``num_tokens`` came out. ``context_s`` of its time,
        and ``draft_context_s`` of each pass of the draft model, were expected for looking back;
        ``num_requests`` took part, 0 where that is not known, with ``num_drafts`` draft rows.
        """
        if num_requests:
            levels = self._levels.setdefault((num_requests.bit_length(), with_prompts), _Levels())
            size = min(num_drafts.bit_length(), NUM_SIZES - 1)
            error = forward_s - context_s - self.forward(num_rows)
            if not with_prompts:
                self._look_back.observe(context_s, error + context_s, forward_s)
            levels.observe(num_drafts, error, forward_s)
            context_s += float(levels.seconds()[size])
        self._forward.observe(num_rows, max(0.3 * forward_s, forward_s - context_s))
        if draft_passes > 0:
            other_s = num_drafted * self.draft_per_token + draft_passes * draft_context_s
            seconds = max(0.3 * draft_s, draft_s - other_s)
            self._draft.observe(round(draft_rows / draft_passes), seconds / draft_passes)
        if with_prompts:
            return  # who arrives, and rows that are only looked at: nothing that a draft changes
        if num_tokens > 0:
            self._verify.observe(num_tokens, verify_s)
        self._hosts.observe(num_requests, max(0.0, host_s), drafts=num_drafts > 0)

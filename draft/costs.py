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


class CostModel:
    """Predicts a step's seconds; learns from each step. Works without a profile too."""

    def __init__(
        self,
        profile: StepProfile | None = None,
        *,
        per_token: float = 0.0,
        per_step: float = 0.0,
    ) -> None:
        self.load(profile or StepProfile())
        self._verify = CostLine(per_token)
        self._host = per_step
        self._num_hosts = 0

    def load(self, profile: StepProfile) -> None:
        """Begin anew from what was measured; what is known of sampling and the host stays."""
        self.profile = profile
        self._forward = CostCurve(profile.forward)
        self._draft = CostCurve(profile.draft)

    @property
    def is_ready(self) -> bool:
        """Whether the target's pass was measured, or seen a few times."""
        return self._forward.is_measured or self._forward.num_observed >= READY_AFTER

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

    @property
    def per_step(self) -> float:
        """Seconds of a step whatever is in it: the host's, and what sampling costs at least."""
        return self._host + self._verify.base

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
    ) -> None:
        """One step: ``draft_rows`` in all of its ``draft_passes``, ``num_drafted`` of them sampled.

        The target's pass had ``num_rows``, and ``num_tokens`` came out. ``context_s`` of its time,
        and ``draft_context_s`` of each pass of the draft model, were expected for looking back.
        """
        self._forward.observe(num_rows, max(0.3 * forward_s, forward_s - context_s))
        if num_tokens > 0:
            self._verify.observe(num_tokens, verify_s)
        if draft_passes > 0:
            other_s = num_drafted * self.draft_per_token + draft_passes * draft_context_s
            seconds = max(0.3 * draft_s, draft_s - other_s)
            self._draft.observe(round(draft_rows / draft_passes), seconds / draft_passes)
        self._num_hosts += 1
        rate = max(0.05, 1.0 / self._num_hosts)
        limit = 3.0 * self._host + 1e-4 if self._num_hosts > 3 else host_s
        self._host += rate * (min(max(0.0, host_s), limit) - self._host)

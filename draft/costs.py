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
from .cost_levels import NO_LEVELS, NUM_SIZES, Hosts, Levels, Scale

FloatArray = NDArray[np.float64]

UNMEASURED_DRAFT_SHARE = 0.2  # of the target's pass, for a draft model never timed
READY_AFTER = 8  # passes; before that an unmeasured model drafts nothing
NUM_PLAIN = 8  # steps without drafts that tell their price; until then they are asked for


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
        self._levels: dict[tuple[int, bool], Levels] = {}
        self.load(profile or StepProfile())
        self._verify = CostLine(per_token)
        self._hosts = Hosts(per_step)

    def load(self, profile: StepProfile) -> None:
        """Begin anew from what was measured; what is known of sampling and the host stays."""
        self.profile = profile
        self._forward = CostCurve(profile.forward)
        self._draft = CostCurve(profile.draft)
        self._look_back = Scale()
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
            levels = self._levels.setdefault((num_requests.bit_length(), with_prompts), Levels())
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

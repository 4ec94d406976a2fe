"""Which drafts of a batch to verify: the most tokens for each second, by the predicted costs.

For every depth the draft model may go to (0 included) each request takes the better of its two
drafts; the tokens of all drafts, most likely first, then form a queue of which some front part is
verified. Survivals never rise along a draft, so a front part takes a prefix of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .cost_levels import NO_LEVELS, SIZE_OF
from .costs import CostModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

PAYBACK = 32  # tokens over which catching up with a request's KV has to pay
SMALL_BACKLOG = 4  # tokens; so many are owed after any accepted draft, and paid in full
TOKENS_PER_STEP = 3.0  # of a request that drafts, about: how fast a catch-up is paid back
TIE = 1e-3
LEAST = 0.2  # of what the rows of a pass should take, whatever was measured of other steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What could be drafted in a step.

    ``free`` [num_requests, F]: chance that a known draft comes true so far, 0 beyond its end.
    ``lm`` [num_requests, D]: the same of what the draft model would guess, 0 where it may not.
    ``backlog`` [num_requests]: tokens whose KV the draft model lacks. ``horizon``
    [num_requests]: tokens that the request may still generate. ``num_prefill``: prompt tokens
    of others in the same pass. ``budget``: rows that all drafts together may add. ``context_s``:
    seconds of the target's pass for looking back on the context, whatever is drafted;
    ``draft_context_s``: the same of each pass of the draft model. ``levels``: what
    `CostModel.levels` knows that steps take beyond that. ``decide_s``: host seconds of deciding on
    a step, which those that draft pay; after a verdict against drafts the next ones rest.
    ``is_mixed``: others draft in the step whatever is chosen here. ``num_others``: requests that
    decode beside these, each of which yields a token whatever is chosen.
    """

    free: FloatArray
    lm: FloatArray
    backlog: IntArray
    horizon: IntArray
    budget: int
    num_prefill: int = 0
    context_s: float = 0.0
    levels: FloatArray = field(default_factory=lambda: NO_LEVELS)
    draft_context_s: float = 0.0
    decide_s: float = 0.0
    is_mixed: bool = False
    num_others: int = 0

    @property
    def num_decodes(self) -> int:
        """Requests that yield a token, at least."""
        return len(self.free) + self.num_others

    @property
    def num_rows(self) -> int:
        """Rows of the target's pass without drafts."""
        return self.num_decodes + self.num_prefill

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to choose from."""
        return self.budget <= 0 or not (self.free.any() or self.lm.any())


@dataclass(frozen=True, slots=True)
class Option:
    """A choice and what it is expected to yield, without ``num_free`` and ``depths`` if plain."""

    tokens: float
    seconds: float
    shared: float  # seconds of the step that prompts are to blame for
    num_free: IntArray | None = None  # [num_requests]
    depths: IntArray | None = None  # [num_requests]

    @property
    def rate(self) -> float:
        """Tokens for each second that decoding is to blame for."""
        return self.tokens / (self.seconds - self.shared)


class Search:
    """All options of one step.

    O(num_caps * n log n) for n = num_requests * width tokens that could be drafted; queues are
    [num_caps, num_requests, width] before the sort. A request alone needs no sort.
    """

    def __init__(self, candidates: Candidates, costs: CostModel) -> None:
        self._candidates = candidates
        self._costs = costs
        num_requests, num_rows = len(candidates.free), candidates.num_rows
        num_decodes = candidates.num_decodes
        self._budget = min(candidates.budget, max(1, costs.reach - num_rows))
        longest = num_requests * max(candidates.free.shape[1], candidates.lm.shape[1])
        far = min(self._budget, longest)
        near = min(far, 2 * num_requests + 2)
        rows = np.array([num_decodes, num_rows, num_rows + near, num_rows + far])
        alone, start, at_near, at_far = costs.forward(rows).tolist()
        # Prompts make steps differ by so much that drafts may seem to make one shorter.
        self._least = alone if candidates.num_prefill else LEAST * alone
        self._overhead = costs.per_token * num_decodes + candidates.context_s
        self._plain_host = costs.per_step(num_decodes)
        self._draft_host = costs.per_step(num_decodes, drafts=True) + candidates.decide_s
        self._shared = start - alone
        pass_s = max(LEAST * start, start + float(candidates.levels[0]))
        if candidates.num_prefill:  # what such steps take beyond their rows is the prompts' fault
            self._shared = max(0.0, pass_s - alone)
        plain_s = pass_s + self._overhead + self._plain_host
        self.plain = Option(float(num_decodes), plain_s, self._shared)
        # Tokens that plain decoding yields in the time of one more row.
        self._price = min((at_near - start) / near, (at_far - start) / far) * self.plain.rate
        self._free, self._lm = candidates.free, candidates.lm
        if num_requests > 1:
            # what is not worth half the price of now will not be worth a better rate's
            self._free = _cut(candidates.free, 0.5 * self._price)
            self._lm = _cut(candidates.lm, 0.5 * self._price)

    def best(self) -> tuple[Option, Option | None]:
        """The best without the draft model, and the best with it (None where it may not)."""
        if len(self._candidates.free) == 1:
            return self._best_of_one()
        return self._best_of_many()

    def _best_of_one(self) -> tuple[Option, Option | None]:
        """Each prefix of each of the two drafts."""
        free, lm = self._free[0], self._lm[0]
        most = min(self._budget, max(len(free), len(lm)))
        counts = np.arange(1, most + 1)
        passes = self._passes(counts)
        option = self._best_prefix(free[:most], passes)
        if not len(lm) or lm[0] <= 0.0:
            return option, None
        draft = _DraftCosts(self._candidates, self._costs)
        passes += (draft.per_pass + draft.per_token) * counts + draft.entry[0]
        return option, self._best_prefix(lm[:most], passes, is_lm=True)

    def _passes(self, counts: IntArray) -> FloatArray:
        """Seconds of steps with so many draft rows, none or more, draft model left out."""
        candidates = self._candidates
        passes: FloatArray = self._costs.forward(counts + candidates.num_rows)
        sizes = SIZE_OF[np.minimum(counts, len(SIZE_OF) - 1)]
        passes = np.maximum(LEAST * passes, passes + candidates.levels[sizes])
        passes = np.maximum(passes, self._shared + self._least)
        passes += self._overhead + np.where(counts > 0, self._draft_host, self._plain_host)
        return passes

    def _best_prefix(self, survival: FloatArray, passes: FloatArray, is_lm: bool = False) -> Option:
        if not len(survival) or survival[0] <= 0.0:
            return self.plain
        gains = survival.cumsum()
        seconds = passes[: len(gains)] + self._costs.per_token * gains
        rates = (self.plain.tokens + gains) / (seconds - self._shared)
        at = int(rates.argmax())
        if rates[at] <= self.plain.rate:
            return self.plain
        lengths, none = np.array([at + 1]), np.zeros(1, dtype=np.int64)
        return Option(
            self.plain.tokens + float(gains[at]),
            float(seconds[at]),
            self._shared,
            none if is_lm else lengths,
            lengths if is_lm else none,
        )

    def _best_of_many(self) -> tuple[Option, Option | None]:
        """Every front part of the queue under every depth of the draft model."""
        values, is_lm = self._queues()
        num_caps, num_requests, width = values.shape
        most = min(self._budget, int(np.count_nonzero(values, axis=(1, 2)).max()))
        flat = values.reshape(num_caps, num_requests * width)
        order = (-flat).argsort(axis=1)[:, :most]
        gains = np.zeros((num_caps, most + 1))
        np.take_along_axis(flat, order, axis=1).cumsum(axis=1, out=gains[:, 1:])
        seconds = self._passes(np.arange(most + 1)) + self._costs.per_token * gains
        if num_caps > 1:
            draft = _DraftCosts(self._candidates, self._costs)
            seconds[1:, 1:] += draft.seconds(is_lm[1:], order[1:], width)
        rates = (self.plain.tokens + gains) / (seconds - self._shared)
        counts = rates.argmax(axis=1)
        best = rates[np.arange(num_caps), counts]
        options = []
        for cap in (0, 1 + int(best[1:].argmax()) if num_caps > 1 else 0):
            # More rows may be expected to take less time, but what cannot come is not drafted.
            num_taken = min(int(counts[cap]), int(np.count_nonzero(flat[cap])))
            taken = order[cap, :num_taken]
            options.append(self._option(taken, is_lm[cap], gains[cap], seconds[cap], width))
        return options[0], options[1] if num_caps > 1 else None

    def _queues(self) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Survivals [num_caps, num_requests, width], and who uses the draft model under a cap."""
        free, lm = self._free, self._lm
        num_requests, num_depths = lm.shape
        if not num_depths:
            return free[None], np.zeros((1, num_requests), dtype=np.bool_)
        values = np.zeros((num_depths + 1, num_requests, max(free.shape[1], num_depths)))
        values[:, :, : free.shape[1]] = free
        padded = np.zeros_like(values)
        padded[:, :, :num_depths] = lm * np.tri(num_depths + 1, num_depths, -1)[:, None, :]
        is_lm = self._is_lm_better()
        np.copyto(values, padded, where=is_lm[:, :, None])
        return values, is_lm

    def _is_lm_better(self) -> NDArray[np.bool_]:
        """By what is left after the rows are paid, [num_caps, num_requests]."""
        num_requests, num_depths = self._lm.shape
        draft = _DraftCosts(self._candidates, self._costs)
        rate = self.plain.rate
        # the last terms decide where the price, taken between few sizes, leaves nothing of either
        free_worth = (np.maximum(self._free - self._price, 0.0) + TIE * self._free).sum(axis=1)
        lm_price = self._price + draft.per_token * rate
        lm_worth = np.maximum(self._lm - lm_price, 0.0) + TIE * self._lm
        is_better = np.zeros((num_depths + 1, num_requests), dtype=np.bool_)
        is_better[1:] = lm_worth.cumsum(axis=1).T - draft.entry * rate > free_worth
        return is_better

    def _option(
        self,
        order: IntArray,
        is_lm: NDArray[np.bool_],
        gains: FloatArray,
        seconds: FloatArray,
        width: int,
    ) -> Option:
        """The first ``len(order)`` tokens of a queue."""
        if not len(order):
            return self.plain
        lengths = np.bincount(order // width, minlength=len(is_lm))
        return Option(
            self.plain.tokens + float(gains[len(order)]),
            float(seconds[len(order)]),
            self._shared,
            np.where(is_lm, 0, lengths),
            np.where(is_lm, lengths, 0),
        )


def _cut(survival: FloatArray, least: float) -> FloatArray:
    """Without the columns in which nothing exceeds ``least``; survivals below it become 0."""
    is_worth = survival > least
    width = int(np.count_nonzero(is_worth, axis=1).max(initial=0))
    cut: FloatArray = (survival * is_worth)[:, :width]
    return cut


class _DraftCosts:
    """Seconds of the draft model, as a line in the rows of a pass near this batch's size."""

    def __init__(self, candidates: Candidates, costs: CostModel) -> None:
        num_requests = len(candidates.free)
        owed = int(candidates.backlog.max(initial=0))
        rows = np.array([1, num_requests, num_requests + max(owed, 1)])
        first, full, longer = costs.draft_pass(rows).tolist()
        per_row = (full - first) / (num_requests - 1) if num_requests > 1 else 0.0
        self.per_pass = first - per_row + candidates.draft_context_s
        self.per_token = per_row + costs.draft_per_token
        self.entry = np.zeros(num_requests)  # seconds of catching up, for each request
        if owed:
            # what is owed once is shared among the tokens that it may bring
            small = np.minimum(candidates.backlog, SMALL_BACKLOG)
            payback = np.clip(candidates.horizon, 1, PAYBACK)
            late = (candidates.backlog - small) * np.minimum(1.0, TOKENS_PER_STEP / payback)
            self.entry = (small + late) * ((longer - full) / owed)

    def seconds(self, is_lm: NDArray[np.bool_], order: IntArray, width: int) -> FloatArray:
        """For every front part of each queue but the empty one, [num_caps, most].

        ``is_lm`` [num_caps, num_requests], ``order`` [num_caps, most] indexes into
        num_requests * width tokens.
        """
        # by token, before the sort: its depth, and what it costs beyond a pass
        num_caps, num_requests = is_lm.shape
        depth = is_lm[:, :, None] * np.arange(1.0, width + 1.0)
        each = np.zeros((num_requests, width))
        each += self.per_token
        each[:, 0] += self.entry
        depth = np.take_along_axis(depth.reshape(num_caps, -1), order, axis=1)
        each = np.where(depth > 0.0, each.reshape(-1)[order], 0.0)
        passes = np.maximum.accumulate(depth, axis=1)
        seconds: FloatArray = self.per_pass * passes + each.cumsum(axis=1)
        return seconds

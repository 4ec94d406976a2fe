"""Controller: how much each request drafts, step by step, so that drafting never costs speed.

Call `allocate` before a step and `observe` after it, in turn. The predicted best is taken, with
some reluctance to change over, a guard against predictions that turn out wrong, and rare probes
that keep what is not in use up to date.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .allocation import Candidates, Option, Search
from .costs import CostModel
from .watch import STALL, Guard, Prober, refresh_interval

__all__ = ["Allocation", "Candidates", "Controller"]

IntArray = NDArray[np.int64]

CHANGE_OVER = 0.03  # predicted gain that it takes, beyond the margin, to begin drafting
LM_CHANGE_OVER = 0.1  # the same for the draft model against all that goes without it
MEASURING = "plain: measuring its cost"


@dataclass(frozen=True, slots=True)
class Allocation:
    """What each request drafts: a known draft or the draft model's, never both.

    Rates are expected tokens per second of the step, prompts in the same pass included; both are
    0 where nothing could be drafted, or the costs are not known yet.
    """

    num_free: IntArray  # [num_requests] leading tokens of the known draft
    lm_depth: IntArray  # [num_requests]
    rate: float = 0.0
    plain_rate: float = 0.0
    reason: str = "plain: nothing to draft"

    @property
    def kind(self) -> str:
        """The first word of the reason: plain, draft or probe."""
        return self.reason.partition(":")[0]

    @property
    def is_draft(self) -> bool:
        """Whether anything is drafted at all."""
        return self.kind != "plain"

    @property
    def measures(self) -> bool:
        """Whether drafts would pay, and the price of doing without is to be looked at again."""
        return self.reason == MEASURING


@dataclass(frozen=True, slots=True)
class _Expected:
    """What the step under way should bring; seconds without the prompts' share."""

    kind: str  # "plain", "draft", "lm" or "probe"
    num_requests: int
    plain_s: float = 0.0
    shared_s: float = 0.0
    seconds: float = 0.0
    probe_cost: float = 0.0  # plain steps
    is_guarded: bool = False


class Controller:
    """Chooses drafts by expected tokens per second."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.guard = Guard()
        self.prober = Prober()
        self._is_drafting = False
        self._uses_lm = False
        self._expected = _Expected("plain", 0)
        self._pass_rows = 0  # of the step allocated last
        self._token_s = 0.0  # seconds in which plain decoding yields a token, or drafting if faster
        self._num_steps: Counter[str] = Counter()
        self._reason = ""
        self._num_drafted = 0  # tokens
        self._speedups = (0.0, 0)  # sum and number

    # -- before a step --------------------------------------------------------------------------

    def allocate(self, candidates: Candidates) -> Allocation:
        """The drafts of one step."""
        if candidates.is_empty:
            return self._plain(candidates, "plain: nothing to draft")
        if not self.costs.is_ready:
            return self._plain(candidates, "plain: learning what a step costs")
        search = Search(candidates, self.costs)
        free, lm = search.best()
        chosen, kind = self._choose(search.plain, free, lm)
        if kind != "lm" and self.prober.is_ripe and candidates.lm.any():
            probe = self._probe(candidates, search, chosen)
            if probe is not None:
                return probe
        if kind == "plain":
            return self._accept(
                candidates, search.plain, chosen, "plain", "plain: drafts cost more than they give"
            )
        if self._is_plain_price_stale(candidates, search.plain.rate / chosen.rate):
            return self._accept(candidates, search.plain, search.plain, "plain", MEASURING)
        return self._accept(candidates, search.plain, chosen, kind, f"draft: {kind}")

    def takes(self, gain_tokens: float, num_rows: int) -> bool:
        """Adds more rows to the step just allocated if they pay, an alternative branch's say.

        ``gain_tokens``: what they are expected to add to its tokens.
        """
        if self._token_s <= 0.0:
            return False
        rows = np.array([self._pass_rows, self._pass_rows + num_rows])
        before, after = self.costs.forward(rows).tolist()
        cost: float = after - before + gain_tokens * self.costs.per_token
        if gain_tokens * self._token_s <= cost * (1.0 + self.guard.margin):
            return False
        self._pass_rows += num_rows
        return True

    def _choose(self, plain: Option, free: Option, lm: Option | None) -> tuple[Option, str]:
        """The best by the demanded margins, and its kind."""
        least = 1.0 + self.guard.margin + (0.0 if self._is_drafting else CHANGE_OVER)
        kind, best = "plain", plain
        if free.num_free is not None and free.rate > least * plain.rate:
            kind, best = "free", free
        if lm is not None and lm.depths is not None and lm.depths.any():
            against = best.rate * (1.0 if self._uses_lm else 1.0 + LM_CHANGE_OVER)
            if lm.rate > max(against, least * plain.rate):
                kind, best = "lm", lm
        self._is_drafting, self._uses_lm = kind != "plain", kind == "lm"
        return best, kind

    def _is_plain_price_stale(self, candidates: Candidates, plain_share: float) -> bool:
        if candidates.num_prefill or candidates.is_mixed:
            return False  # such a pass says little about a plain one, or will not be one
        if self.costs.lacks_plain(candidates.num_decodes):
            return True
        return self.costs.age(candidates.num_rows) > refresh_interval(plain_share)

    def _probe(self, candidates: Candidates, search: Search, rest: Option) -> Allocation | None:
        """One token of the draft model for the request whose KV lacks least, when it is due.

        The other requests do what they would have done.
        """
        row = int(np.where(candidates.lm[:, 0] > 0.0, candidates.backlog, 1 << 40).argmin())
        plain = search.plain
        plain_s = plain.seconds - plain.shared
        owed = 1 + int(candidates.backlog[row])
        draft_s = self.costs.draft_pass(owed) + self.costs.draft_per_token
        draft_s += candidates.draft_context_s
        extra_s = draft_s + self._added_s(candidates.num_rows, 1)
        if rest.num_free is not None:
            lost = rest.num_free[row] * (plain_s / candidates.num_decodes)
            extra_s += float(lost)
        if not self.prober.is_due(extra_s / plain_s):
            return None
        none = np.zeros(len(candidates.free), dtype=np.int64)
        num_free, depths = (none if rest.num_free is None else rest.num_free.copy()), none.copy()
        num_free[row], depths[row] = 0, 1
        if int(num_free.sum()) >= candidates.budget:
            return None
        probe = Option(rest.tokens, rest.seconds + extra_s, rest.shared, num_free, depths)
        return self._accept(
            candidates, plain, probe, "probe", "probe: trying the draft model", extra_s / plain_s
        )

    def _added_s(self, num_rows: int, more: int) -> float:
        before, after = self.costs.forward(np.array([num_rows, num_rows + more])).tolist()
        return float(after - before)

    def _plain(self, candidates: Candidates, reason: str) -> Allocation:
        """Nothing is drafted, and nothing is computed to find that out."""
        num_requests = len(candidates.free)
        self._expected = _Expected("plain", candidates.num_decodes)
        self._token_s = 0.0
        self._reason = reason
        none = np.zeros(num_requests, dtype=np.int64)
        return Allocation(none, none, reason=reason)

    def _accept(
        self,
        candidates: Candidates,
        plain: Option,
        chosen: Option,
        kind: str,
        reason: str,
        probe_cost: float = 0.0,
    ) -> Allocation:
        none = np.zeros(len(candidates.free), dtype=np.int64)
        num_free = none if chosen.num_free is None else chosen.num_free
        depths = none if chosen.depths is None else chosen.depths
        num_drafted = int(num_free.sum() + depths.sum())
        self._expected = _Expected(
            kind,
            candidates.num_decodes,
            plain.seconds - plain.shared,
            plain.shared,
            chosen.seconds - chosen.shared,
            probe_cost,
            is_guarded=kind in ("free", "lm") and not candidates.num_prefill,
        )
        self._pass_rows = candidates.num_rows + num_drafted
        self._token_s = 1.0 / max(chosen.rate, plain.rate)
        self._reason = reason
        self._num_drafted += num_drafted
        self._speedups = (
            self._speedups[0] + float(chosen.rate / plain.rate),
            self._speedups[1] + 1,
        )
        rates = (chosen.tokens / chosen.seconds, plain.tokens / plain.seconds)
        return Allocation(num_free, depths, *rates, reason)

    # -- after it -------------------------------------------------------------------------------

    def observe(
        self, num_tokens: int, seconds: float, *, num_lm_drafted: int = 0, num_lm_hits: int = 0
    ) -> None:
        """The step allocated last took so long and yielded so many tokens for decoding requests.

        ``num_lm_drafted`` tokens were guessed by the draft model, ``num_lm_hits`` came true.
        """
        expected = self._expected
        self._num_steps[expected.kind] += 1
        self.guard.relax()
        if expected.kind == "lm":
            self.prober.used()
        elif expected.kind == "probe":
            # It takes more than its passes: the models push each other out of the caches.
            took = (seconds - expected.shared_s) / expected.plain_s - 1.0
            cost = min(max(expected.probe_cost, took), STALL * (1.0 + expected.probe_cost))
            self.prober.probed(cost, num_lm_drafted, num_lm_hits, expected.num_requests)
        else:
            self.prober.idle()
        if expected.is_guarded:
            self.guard.observe(
                num_tokens / expected.num_requests,
                (seconds - expected.shared_s) / expected.plain_s,
                expected.seconds / expected.plain_s,
            )

    def rested(self, num_steps: int) -> None:
        """So many steps were plain without being allocated or observed."""
        self._num_steps["plain"] += num_steps
        self.guard.relax(num_steps)
        self.prober.idle(num_steps)

    def describe(self) -> dict[str, float | str]:
        """What it did since the last call, and why; for the log."""
        steps = max(1, self._num_steps.total())
        total, number = self._speedups
        lines: dict[str, float | str] = {
            f"share_{kind}": round(self._num_steps[kind] / steps, 4)
            for kind in ("plain", "free", "lm", "probe")
        }
        lines |= {
            "mean_drafted": round(self._num_drafted / steps, 2),
            "speedup": round(total / number, 3) if number else 1.0,
            "margin": round(self.guard.margin, 3),
            "guard_alarms": self.guard.num_alarms,
            "cost_alarms": self.costs.num_alarms,
            "reason": self._reason,
        }
        self._num_steps.clear()
        self._num_drafted, self._speedups = 0, (0.0, 0)
        return lines

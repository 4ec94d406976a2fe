"""Controller: decides how much each request drafts in a step.

A token is drafted if its expected gain exceeds the price of its row, by measured acceptance and
measured costs. A proposer that does not pay is probed at intervals, within a budget. Look-ups
need no probes: each guess is scored against the committed tokens, verified or not.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from .allocation import Allocation, StepCandidates, allocate
from .cost_model import CostModel

PROBE_SHARE = 0.01  # of all time that probes of an unused proposer may take
FIRST_PROBE, LAST_PROBE = 32, 1024  # steps between two probes


class ProbeScheduler:
    """Decides when a proposer that is not in use drafts one token of one request.

    An accepted probe is soon followed by another one; a rejected probe doubles the interval.
    """

    def __init__(self) -> None:
        self._interval = FIRST_PROBE
        self._num_idle = 0  # steps since the proposer was last used
        self._saved_s = 0.0  # of the budget

    def idle(self, seconds: float) -> None:
        """Count a step without the proposer."""
        self._num_idle += 1
        self._saved_s += PROBE_SHARE * seconds

    def is_due(self, cost_s: float) -> bool:
        """Whether a probe of this cost may be made now."""
        return self._num_idle >= self._interval and cost_s <= self._saved_s

    def note_use(self, cost_s: float, num_hits: int, *, is_probe: bool) -> None:
        """Learn that the proposer drafted; ``num_hits`` of its tokens were accepted."""
        self._num_idle = 0
        if not is_probe:
            self._interval = FIRST_PROBE
            return
        self._saved_s -= cost_s
        shorter, longer = max(FIRST_PROBE, self._interval // 4), min(LAST_PROBE, 2 * self._interval)
        self._interval = shorter if num_hits else longer


class Controller:
    """Chooses drafts by expected tokens against their price."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._probes = ProbeScheduler()
        self._probe_s = 0.0  # seconds of the probe in the step under way; 0: there is none
        self._rows = 0  # of the pass of the step allocated last
        self._num_decodes = 0  # requests in it
        self._rate = 0.0  # tokens a second by which it was allocated
        self._num_steps: Counter[str] = Counter()
        self._num_drafted = 0  # tokens

    def allocate(self, candidates: StepCandidates) -> Allocation:
        """Choose the drafts of the next step."""
        self._probe_s = 0.0
        if not self.costs.is_ready:
            none = np.zeros(len(candidates.lookup), dtype=np.int64)
            return Allocation(none, none)
        self._num_decodes = candidates.num_decodes
        self._rate = self.costs.rate(self._num_decodes)
        chosen = allocate(candidates, self.costs, self._rate)
        if candidates.proposer_worth.any() and not chosen.num_proposer.any():
            chosen = self._with_probe(candidates, chosen)
        self._rows = candidates.num_rows + chosen.num_rows
        self._count(chosen)
        return chosen

    @property
    def is_trying(self) -> bool:
        """Whether the step under way tries a proposer that is not in use."""
        return self._probe_s > 0.0

    def _with_probe(self, candidates: StepCandidates, chosen: Allocation) -> Allocation:
        """Add a probe, if one is due, for the request that lacks the least draft KV."""
        may = candidates.proposer_worth[:, 0] > 0.0
        row = int(np.where(may, candidates.num_uncached_draft_tokens, 1 << 40).argmin())
        cost_s = float(self.costs.draft_pass(1 + int(candidates.num_uncached_draft_tokens[row])))
        if not self._probes.is_due(cost_s) or chosen.num_rows >= candidates.budget:
            return chosen
        self._probe_s = cost_s
        num_lookup, depths = chosen.num_lookup.copy(), chosen.num_proposer.copy()
        num_lookup[row], depths[row] = 0, 1
        return Allocation(num_lookup, depths, chosen.net)

    def observe(self, seconds: float, *, num_drafted: int, num_hits: int) -> None:
        """Learn a step's seconds; ``num_drafted`` tokens came from the proposer."""
        if num_drafted or self._probe_s:
            is_probe = self._probe_s > 0.0
            self._probes.note_use(self._probe_s, num_hits, is_probe=is_probe)
        else:
            self._probes.idle(seconds)
        self._probe_s = 0.0

    def _count(self, chosen: Allocation) -> None:
        kind = "lookup" if chosen.num_lookup.any() else "plain"
        kind = "proposer" if chosen.num_proposer.any() else kind
        self._num_steps["probe" if self._probe_s else kind] += 1
        self._num_drafted += chosen.num_rows

    def describe(self) -> dict[str, float]:
        """Shares of each kind of step since the last call and rows drafted a step, for the log."""
        steps = max(1, self._num_steps.total())
        lines = {
            f"share_{kind}": round(self._num_steps[kind] / steps, 4)
            for kind in ("plain", "lookup", "proposer", "probe")
        }
        lines |= {
            "mean_drafted": round(self._num_drafted / steps, 2),
            "row_price": round(self._rate * self._row_seconds(1), 4),
        }
        self._num_steps.clear()
        self._num_drafted = 0
        return lines

    def _row_seconds(self, num_rows: int) -> float:
        """Seconds that ``num_rows`` more rows add to the step allocated last."""
        return float(self.costs.row_seconds(self._rows, num_rows, self._num_decodes)[-1])

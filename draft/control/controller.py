"""Controller: decides how much each request drafts in a step.

The rule: where the engine yields r tokens a second (`CostModel.rate`), drafting a set D of tokens
gains, in tokens,

    net_gain(D) = sum of s_i  -  r * (c(n + |D|) - c(n))  -  sum of r * k * l_i  -  r * overhead

    s_i         the chance that token i and all before it on its path are accepted: of what was
                looked up `lookup`; of a proposer's b-th best node `expected_accepted`
    c(n)        seconds of a pass of n rows; `CostModel.row_seconds` has the differences
    k, l_i      seconds for each key that a row attends to, and the tokens behind its request
    overhead    seconds of the host, where anything is drafted

Where a proposer drafts, r * seconds of its passes are subtracted, too, and a price for the KV that
it lacks (``catch_up_price``). Its b-th node takes a row as often as it has one: `node_probability`.

`allocate` chooses the D with the largest net_gain, which may be empty. Chances never rise along a
path, so it is a prefix of all tokens sorted by s_i - r * k * l_i. estimators.py estimates s_i,
cost_model.py measures seconds, and docs/speculation-internals.md explains the rule.

The `Controller` keeps what that needs from step to step. A proposer that does not pay is probed at
intervals, within a budget. Look-ups need no probes: each guess is scored against the committed
tokens, verified or not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from .cost_model import CostModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

PAYBACK_STEPS = 12.0  # over which catching up with a request's KV must pay
PASS_ROWS = 3  # rows for each request up to which passes of the proposer are priced
LEAST_ROWS = 0.01  # rows that a node of the proposer takes at least
FEW_UNCACHED_TOKENS = 4  # tokens; so many are owed after any accepted draft, and paid in full
PROBE_SHARE = 0.01  # of all time that probes of an unused proposer may take
FIRST_PROBE, LAST_PROBE = 32, 1024  # steps between two probes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCandidates:
    """The drafts that a step could verify.

    ``lookup`` [num_requests, F]: chances of the nodes of a known draft, those of the nodes before
    each included, the best first; 0 beyond the last.
    ``expected_accepted`` [num_requests, D]: accepted tokens that the proposer's b-th best node
    would bring, 0 where it may not draft; ``node_probability``, alike: how often there would be
    such a node.
    ``passes_per_node``: passes of the proposer for each node.
    ``num_uncached_draft_tokens`` [num_requests]: tokens whose KV the proposer lacks. ``budget``:
    rows that all drafts together may add. ``num_prefill``: prompt tokens of others in the same
    pass. ``num_others``: requests that decode beside these. ``tokens_per_pass``: tokens of a
    draft that one pass of the proposer yields. ``context_lens`` [num_requests]: tokens behind each
    request.
    """

    lookup: FloatArray
    expected_accepted: FloatArray
    num_uncached_draft_tokens: IntArray
    budget: int
    num_prefill: int = 0
    num_others: int = 0
    tokens_per_pass: int = 1
    node_probability: FloatArray | float = 1.0
    passes_per_node: float = 1.0
    context_lens: IntArray | int = 0

    @property
    def num_decodes(self) -> int:
        """Requests that yield a token, at least."""
        return len(self.lookup) + self.num_others

    @property
    def num_rows(self) -> int:
        """Rows of the target's pass without drafts."""
        return self.num_decodes + self.num_prefill


@dataclass(frozen=True, slots=True)
class Allocation:
    """Draft tokens of each request: nodes of its known draft, or of the proposer.

    The proposer's draft includes the known one.

    ``net_gain``: expected tokens beyond the price of the drafts. ``row_prices``: tokens that
    1, 2, ... rows of the proposer must bring the step, beside those of known drafts, none where it
    is not asked; ``key_prices``: that a row of each request must bring besides, for its keys;
    ``pass_prices``: that one more pass of the proposer with 1, 2, ... rows must bring the step.
    """

    num_lookup: IntArray  # [num_requests] best nodes of the known draft
    num_proposer: IntArray  # [num_requests] nodes that the proposer is expected to guess
    net_gain: float = 0.0
    row_prices: FloatArray | None = None  # [most]
    key_prices: FloatArray | None = None  # [num_requests]
    pass_prices: FloatArray | None = None

    @property
    def num_rows(self) -> int:
        """Rows that the drafts add."""
        return int(self.num_lookup.sum() + self.num_proposer.sum())


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
        if candidates.expected_accepted.any() and not chosen.num_proposer.any():
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
        may = candidates.expected_accepted[:, 0] > 0.0
        row = int(np.where(may, candidates.num_uncached_draft_tokens, 1 << 40).argmin())
        cost_s = float(self.costs.draft_pass(1 + int(candidates.num_uncached_draft_tokens[row])))
        if not self._probes.is_due(cost_s) or chosen.num_rows >= candidates.budget:
            return chosen
        self._probe_s = cost_s
        num_lookup, depths = chosen.num_lookup.copy(), chosen.num_proposer.copy()
        num_lookup[row], depths[row] = 0, 1
        return Allocation(num_lookup, depths, chosen.net_gain)

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


def allocate(candidates: StepCandidates, costs: CostModel, rate: float) -> Allocation:
    """The drafts with the highest expected net gain, at ``rate`` tokens a second.

    A row's price in tokens is its seconds times ``rate``; it attends to all tokens behind its
    request, so a row of a long request is dearer. The tokens of all drafts are sorted by what they
    bring beyond that, and the prefix of this order with the highest net gain is taken. Chances
    never rise along a path, so this takes a prefix of each chain, and of each tree a smaller tree.
    The numbers of passes of the proposer are tried one by one; at each, a request takes the better
    of its two drafts.

    O(P * n log n) for n = num_requests * width tokens that could be drafted and P passes.
    """
    none = np.zeros(len(candidates.lookup), dtype=np.int64)
    may_propose = _may_pay(candidates, costs, rate)
    if candidates.budget <= 0 or not (may_propose or candidates.lookup.any()):
        return Allocation(none, none)
    prices = _prices(candidates, costs, rate)
    every = np.ones_like(candidates.lookup)
    overhead = rate * costs.draft_overhead(candidates.num_decodes)
    best = _best_prefix(candidates.lookup, every, candidates.budget, prices, overhead)
    chosen = Allocation(best.counts, none, best.net_gain)
    if may_propose:
        with_proposer = _best_with_proposer(candidates, costs, rate, prices)
        if with_proposer.net_gain > chosen.net_gain:
            known = int(with_proposer.num_lookup.sum())
            others = prices.rows[known + 1 :] - prices.rows[known]
            pass_rows = np.arange(1, PASS_ROWS * len(candidates.lookup) + 1)
            return replace(
                with_proposer,
                row_prices=others,
                key_prices=prices.keys,
                pass_prices=rate * costs.draft_pass(pass_rows),
            )
    return chosen


@dataclass(frozen=True, slots=True)
class _Prices:
    """Tokens that rows must bring.

    ``rows`` [most + 1]: 0, 1, ... rows of any requests. ``keys`` [num_requests]: a row of each
    request besides, for the keys that it attends to.
    """

    rows: FloatArray
    keys: FloatArray


def _prices(candidates: StepCandidates, costs: CostModel, rate: float) -> _Prices:
    most = max(candidates.lookup.size, candidates.expected_accepted.size)
    seconds = costs.row_seconds(candidates.num_rows, most, candidates.num_decodes)
    context_lens = np.broadcast_to(candidates.context_lens, len(candidates.lookup))
    return _Prices(rate * seconds, rate * costs.key_seconds(candidates.num_decodes) * context_lens)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The best prefix of the sorted tokens."""

    counts: IntArray  # [num_requests]
    net_gain: float


def _best_prefix(
    survival: FloatArray, num_rows: FloatArray, budget: int, prices: _Prices, overhead: float
) -> _Prefix:
    """The best prefix of the sorted tokens of ``survival`` [num_requests, width].

    ``num_rows``, alike: rows that each is expected to take, above 0; the sort is by gain for a row.
    ``overhead``: tokens that any draft must bring.
    """
    num_requests, width = survival.shape
    gains = survival - prices.keys[:, None] * num_rows
    for_a_row = np.minimum.accumulate(gains / num_rows, axis=1).ravel()
    most = min(budget, int(np.count_nonzero(for_a_row > 0.0)))
    if not most:
        return _Prefix(np.zeros(num_requests, dtype=np.int64), 0.0)
    order = (-for_a_row).argsort(kind="stable") if num_requests > 1 else np.arange(width)
    order = order[:most]
    taken = num_rows.ravel()[order].cumsum()
    paid = np.interp(taken, np.arange(most + 1), prices.rows[: most + 1])
    net_gains = gains.ravel()[order].cumsum() - paid - overhead
    if net_gains.max() <= 0.0:
        return _Prefix(np.zeros(num_requests, dtype=np.int64), 0.0)
    length = int(net_gains.argmax()) + 1
    counts = np.bincount(order[:length] // width, minlength=num_requests)
    return _Prefix(counts, float(net_gains[length - 1]))


def _may_pay(candidates: StepCandidates, costs: CostModel, rate: float) -> bool:
    """Whether a pass of the proposer could bring more than it costs, if rows cost nothing.

    No node brings more than the best one of its request. Takes a tenth of the time of finding the
    best draft, which mostly fails where the target is fast.
    """
    nodes = candidates.expected_accepted
    if not nodes.size:
        return False
    nodes_of_a_pass = candidates.tokens_per_pass / candidates.passes_per_node
    pass_s = float(costs.draft_pass(len(nodes)))
    return float(nodes.max(axis=1).sum()) * nodes_of_a_pass > rate * pass_s


def _best_with_proposer(
    candidates: StepCandidates, costs: CostModel, rate: float, prices: _Prices
) -> Allocation:
    """The best of all numbers of passes of the proposer."""
    lookup, nodes = candidates.lookup, candidates.expected_accepted
    uncached = candidates.num_uncached_draft_tokens
    num_requests, num_depths = nodes.shape
    width = max(lookup.shape[1], num_depths)
    # Of the first row of each, where all get one.
    row_prices = (prices.rows[num_requests] / num_requests + prices.keys)[:, None]
    overhead = rate * costs.draft_overhead(candidates.num_decodes, with_proposer=True)
    # A node that is not worth its row at its place is not drafted: it costs nothing.
    node_rows = np.maximum(LEAST_ROWS, np.broadcast_to(candidates.node_probability, nodes.shape))
    passes = costs.draft_pass(np.array([1, num_requests, num_requests + int(uncached.max())]))
    pass_price, owed_s = rate * float(passes[1]), float(passes[2] - passes[1])
    # What is owed once is shared among the steps that it may serve.
    late = np.maximum(0, uncached - FEW_UNCACHED_TOKENS) / PAYBACK_STEPS
    owed = np.minimum(uncached, FEW_UNCACHED_TOKENS) + late
    catch_up_price = rate * owed * (owed_s / max(1, int(uncached.max())))  # [num_requests] tokens
    lookup_gain = np.maximum(lookup - row_prices, 0.0).sum(axis=1)
    node_gains = np.maximum(nodes - node_rows * row_prices, 0.0).cumsum(axis=1)
    most_gain = np.maximum(nodes.cumsum(axis=1), lookup.sum(axis=1)[:, None]).sum(axis=0)
    none = np.zeros(num_requests, dtype=np.int64)
    best = Allocation(none, none)
    for depth in _last_depths(candidates, num_depths):
        if most_gain[depth - 1] - pass_price * _num_passes(candidates, depth) <= best.net_gain:
            continue  # even if rows cost nothing
        gain = node_gains[:, depth - 1] - catch_up_price
        by_proposer = (gain > lookup_gain) & (nodes[:, 0] > 0.0)
        if not by_proposer.any():
            continue
        survival, num_rows = np.zeros((num_requests, width)), np.ones((num_requests, width))
        survival[:, : lookup.shape[1]] = np.where(by_proposer[:, None], 0.0, lookup)
        survival[by_proposer, :depth] = nodes[by_proposer, :depth]
        num_rows[by_proposer, :depth] = node_rows[by_proposer, :depth]
        prefix = _best_prefix(survival, num_rows, candidates.budget, prices, overhead)
        depths = np.where(by_proposer, prefix.counts, 0)
        num_passes = _num_passes(candidates, int(depths.max()))
        paid = pass_price * num_passes + float(catch_up_price[depths > 0].sum())
        if depths.any() and prefix.net_gain - paid > best.net_gain:
            counts = np.where(by_proposer, 0, prefix.counts)
            net_gain = prefix.net_gain - paid
            best = Allocation(counts, depths, net_gain)
    return best


def _num_passes(candidates: StepCandidates, depth: int) -> int:
    """Passes of the proposer that yield so many nodes."""
    return max(1, ceil(candidates.passes_per_node * depth / candidates.tokens_per_pass))


def _last_depths(candidates: StepCandidates, num_depths: int) -> list[int]:
    """Most nodes that each number of passes yields: fewer are within these."""
    by_passes = {_num_passes(candidates, depth): depth for depth in range(1, num_depths + 1)}
    return list(by_passes.values())

"""Controller: decides how many tokens are drafted for each request in a step.

If the engine yields r tokens per second (`CostModel.rate`), drafting a set D of tokens has the
expected net gain, in tokens,

    net_gain(D) = sum of s_i  -  r * (c(n + |D|) - c(n))  -  sum of r * k * l_i  -  r * overhead

    s_i         survival: the probability that token i and all tokens before it on its path are
                accepted; the value is in `lookup_survival` for tokens that a source looked up, and
                in `expected_accepted` for the nodes of a proposer
    c(n)        seconds of a pass of n rows; `CostModel.row_seconds` returns the differences
    k           seconds that a row takes for each key that it attends to
    l_i         context length of the request that token i is drafted for
    overhead    seconds that the host needs for the drafts of a step

If a proposer drafts, two more prices are subtracted: r * the seconds of the proposer's passes, and
the price of computing the KV that the proposer lacks (``catch_up_price``). A draft may have fewer
nodes than planned, so the price of a row is multiplied by the probability that its node exists
(`node_probability`).

`allocate` chooses the D with the largest net_gain, which may be empty. Survival never rises along a
path, so D is a prefix of all tokens sorted by s_i - r * k * l_i. estimators.py estimates s_i,
cost_model.py measures seconds, and docs/speculation-internals.md explains the formula.

The `Controller` keeps the state from step to step. If drafting with the proposer does not pay, the
controller still probes it from time to time, within a time budget. Looked-up guesses need no
probes, because each one is compared with the committed tokens even if it was not verified.
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

PAYBACK_STEPS = 12.0  # number of steps over which the cost of computing much missing KV is spread
PASS_ROWS = 3  # passes of the proposer are priced up to this many rows per request
LEAST_ROWS = 0.01  # minimum number of rows that a node of the proposer is expected to take
FEW_UNCACHED_TOKENS = 4  # tokens of missing KV charged in full; an accepted draft leaves a few
PROBE_SHARE = 0.01  # share of all time that probes of an unused proposer may take
FIRST_PROBE, LAST_PROBE = 32, 1024  # minimum and maximum number of steps between two probes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCandidates:
    """The drafts that a step could verify.

    F and D are the maximum numbers of looked-up tokens and of proposed nodes per request.
    ``lookup_survival`` [num_requests, F]: survival of the nodes of each looked-up draft, in
    descending order, padded with 0. ``expected_accepted`` [num_requests, D]: probability that the
    proposer's 1st, 2nd, ... best node exists and is accepted; 0 if the proposer may not draft for
    the request.
    ``node_probability`` [num_requests, D]: probability that the proposer's draft has at least 1, 2,
    ... nodes. ``passes_per_node``: passes of the proposer per node. ``num_uncached_draft_tokens``
    [num_requests]: tokens before the last whose KV the proposer lacks. ``budget``: maximum number
    of rows that all drafts together may add. ``num_prefill``: prompt tokens of other requests in
    the same pass. ``num_others``: other requests that decode in the step. ``tokens_per_pass``:
    draft tokens that one pass of the proposer yields. ``context_lens`` [num_requests]: context
    length of each request in tokens.
    """

    lookup_survival: FloatArray
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
        """Number of requests that decode in the step."""
        return len(self.lookup_survival) + self.num_others

    @property
    def num_rows(self) -> int:
        """Number of rows that the target's pass has without drafts."""
        return self.num_decodes + self.num_prefill


@dataclass(frozen=True, slots=True)
class Allocation:
    """The number of draft tokens of each request, from a looked-up draft or from the proposer.

    A draft of the proposer includes the looked-up one. ``net_gain``: expected tokens minus the
    price of the drafts. All prices are in tokens; they are None if the proposer does not draft.
    ``row_prices``: price of 1, 2, ... rows of the proposer's drafts, in addition to the rows of
    looked-up drafts. ``key_prices``: additional price of a row of each request, for the keys it
    attends to. ``pass_prices``: price of one more pass of the proposer with 1, 2, ... rows.
    """

    num_lookup: IntArray  # [num_requests] number of looked-up nodes to verify, the best ones
    num_proposer: IntArray  # [num_requests] expected number of nodes that the proposer drafts
    net_gain: float = 0.0
    row_prices: FloatArray | None = None  # [most] tokens, for 1, 2, ... rows
    key_prices: FloatArray | None = None  # [num_requests] tokens per row
    pass_prices: FloatArray | None = None  # [PASS_ROWS * num_requests] tokens, for 1, 2, ... rows

    @property
    def num_rows(self) -> int:
        """Number of rows that the drafts add."""
        return int(self.num_lookup.sum() + self.num_proposer.sum())


class ProbeScheduler:
    """Decides in which steps a proposer that is not in use drafts one token, as a probe.

    If the token is accepted, the interval to the next probe becomes shorter; if not, it doubles.
    """

    def __init__(self) -> None:
        self._interval = FIRST_PROBE
        self._num_idle = 0  # steps since the proposer was last used
        self._saved_s = 0.0  # unused budget for probes, in seconds

    def note_idle(self, seconds: float) -> None:
        """Record a step that took ``seconds`` and in which the proposer did not draft."""
        self._num_idle += 1
        self._saved_s += PROBE_SHARE * seconds

    def is_due(self, cost_s: float) -> bool:
        """Whether a probe that takes ``cost_s`` seconds may run now."""
        return self._num_idle >= self._interval and cost_s <= self._saved_s

    def note_use(self, cost_s: float, num_hits: int, *, is_probe: bool) -> None:
        """Record that the proposer drafted and ``num_hits`` of its tokens were accepted."""
        self._num_idle = 0
        if not is_probe:
            self._interval = FIRST_PROBE
            return
        self._saved_s -= cost_s
        shorter, longer = max(FIRST_PROBE, self._interval // 4), min(LAST_PROBE, 2 * self._interval)
        self._interval = shorter if num_hits else longer


class Controller:
    """Chooses the drafts whose expected tokens exceed their price."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._probes = ProbeScheduler()
        self._probe_s = 0.0  # expected seconds of the probe in the current step; 0 without a probe
        self._rows = 0  # rows of the last allocated step
        self._num_decodes = 0  # requests that decode in the last allocated step
        self._rate = 0.0  # tokens per second for which the last step was allocated
        self._num_steps: Counter[str] = Counter()  # steps by kind since `describe` was called
        self._num_drafted = 0  # draft tokens since `describe` was called

    def allocate(self, candidates: StepCandidates) -> Allocation:
        """Return the drafts of the next step; none until a pass of the target has been measured."""
        self._probe_s = 0.0
        if not self.costs.is_ready:
            none = np.zeros(len(candidates.lookup_survival), dtype=np.int64)
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
        """Whether the current step probes a proposer that is not in use."""
        return self._probe_s > 0.0

    def _with_probe(self, candidates: StepCandidates, chosen: Allocation) -> Allocation:
        """Add a probe to ``chosen``, if one is due.

        The request for which the proposer lacks the least KV gets the probe.
        """
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
        """Record a step that took ``seconds``.

        The proposer drafted ``num_drafted`` tokens in the step, and ``num_hits`` of them were
        accepted.
        """
        if num_drafted or self._probe_s:
            is_probe = self._probe_s > 0.0
            self._probes.note_use(self._probe_s, num_hits, is_probe=is_probe)
        else:
            self._probes.note_idle(seconds)
        self._probe_s = 0.0

    def _count(self, chosen: Allocation) -> None:
        kind = "lookup" if chosen.num_lookup.any() else "plain"
        kind = "proposer" if chosen.num_proposer.any() else kind
        self._num_steps["probe" if self._probe_s else kind] += 1
        self._num_drafted += chosen.num_rows

    def describe(self) -> dict[str, float]:
        """Return statistics since the last call, for the log.

        The statistics are the shares of steps without drafts, with looked-up drafts only, with
        drafts of the proposer, and with a probe; the mean number of draft tokens per step; and the
        price of a row in tokens.
        """
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
        """Return the seconds that ``num_rows`` more rows would add to the last allocated step."""
        return float(self.costs.row_seconds(self._rows, num_rows, self._num_decodes)[-1])


def allocate(candidates: StepCandidates, costs: CostModel, rate: float) -> Allocation:
    """Return the drafts with the highest expected net gain, at ``rate`` tokens per second.

    A row's price in tokens is its seconds times ``rate``. A row attends to the whole context of its
    request, so rows of long requests cost more. The tokens of all drafts are sorted by survival
    minus the price of their keys, and the prefix with the highest net gain is taken. Survival never
    rises along a path, so a prefix contains a prefix of each chain and a subtree of each tree. For
    every possible number of the proposer's passes, each request gets the better of its looked-up
    draft and the proposer's draft.

    O(P * n log n) for n = num_requests * width tokens that could be drafted and P passes.
    """
    none = np.zeros(len(candidates.lookup_survival), dtype=np.int64)
    may_propose = _may_pay(candidates, costs, rate)
    if candidates.budget <= 0 or not (may_propose or candidates.lookup_survival.any()):
        return Allocation(none, none)
    prices = _prices(candidates, costs, rate)
    every = np.ones_like(candidates.lookup_survival)
    overhead = rate * costs.draft_overhead(candidates.num_decodes)
    best = _best_prefix(candidates.lookup_survival, every, candidates.budget, prices, overhead)
    chosen = Allocation(best.counts, none, best.net_gain)
    if may_propose:
        with_proposer = _best_with_proposer(candidates, costs, rate, prices)
        if with_proposer.net_gain > chosen.net_gain:
            known = int(with_proposer.num_lookup.sum())
            others = prices.rows[known + 1 :] - prices.rows[known]
            pass_rows = np.arange(1, PASS_ROWS * len(candidates.lookup_survival) + 1)
            return replace(
                with_proposer,
                row_prices=others,
                key_prices=prices.keys,
                pass_prices=rate * costs.draft_pass(pass_rows),
            )
    return chosen


@dataclass(frozen=True, slots=True)
class _Prices:
    """Prices of rows, in tokens.

    ``rows`` [most + 1]: price of 0, 1, ... rows, whichever requests they belong to. ``keys``
    [num_requests]: additional price of a row of each request, for the keys it attends to.
    """

    rows: FloatArray
    keys: FloatArray


def _prices(candidates: StepCandidates, costs: CostModel, rate: float) -> _Prices:
    most = max(candidates.lookup_survival.size, candidates.expected_accepted.size)
    seconds = costs.row_seconds(candidates.num_rows, most, candidates.num_decodes)
    context_lens = np.broadcast_to(candidates.context_lens, len(candidates.lookup_survival))
    return _Prices(rate * seconds, rate * costs.key_seconds(candidates.num_decodes) * context_lens)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The prefix of the sorted draft tokens with the highest net gain."""

    counts: IntArray  # [num_requests] number of tokens of each request in the prefix
    net_gain: float  # tokens


def _best_prefix(
    survival: FloatArray, num_rows: FloatArray, budget: int, prices: _Prices, overhead: float
) -> _Prefix:
    """Sort all draft tokens by gain per row, and return the prefix with the highest net gain.

    ``survival`` [num_requests, width]: survival of each token. ``num_rows`` [num_requests, width]:
    number of rows that each token is expected to take, above 0. ``overhead``: price of drafting,
    independent of the number of draft tokens, in tokens.
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

    All nodes of a request are assumed to be as good as its best node. This check takes a tenth of
    the time of `_best_with_proposer`, which rarely finds a draft worth its price if the target is
    fast.
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
    """Return the allocation with the highest net gain for any number of the proposer's passes."""
    lookup, nodes = candidates.lookup_survival, candidates.expected_accepted
    uncached = candidates.num_uncached_draft_tokens
    num_requests, num_depths = nodes.shape
    width = max(lookup.shape[1], num_depths)
    # Price of each request's first row, if every request gets one. [num_requests, 1] tokens
    row_prices = (prices.rows[num_requests] / num_requests + prices.keys)[:, None]
    overhead = rate * costs.draft_overhead(candidates.num_decodes, with_proposer=True)
    # The proposer drops a node that is not worth its row, so the expected rows of a node are the
    # probability that it exists.
    node_rows = np.maximum(LEAST_ROWS, np.broadcast_to(candidates.node_probability, nodes.shape))
    passes = costs.draft_pass(np.array([1, num_requests, num_requests + int(uncached.max())]))
    pass_price, owed_s = rate * float(passes[1]), float(passes[2] - passes[1])
    # Much missing KV is computed once, so its price is spread over the steps that profit from it.
    late = np.maximum(0, uncached - FEW_UNCACHED_TOKENS) / PAYBACK_STEPS
    owed = np.minimum(uncached, FEW_UNCACHED_TOKENS) + late
    catch_up_price = rate * owed * (owed_s / max(1, int(uncached.max())))  # [num_requests] tokens
    lookup_gain = np.maximum(lookup - row_prices, 0.0).sum(axis=1)
    node_gains = np.maximum(nodes - node_rows * row_prices, 0.0).cumsum(axis=1)
    most_gain = np.maximum(nodes.cumsum(axis=1), lookup.sum(axis=1)[:, None]).sum(axis=0)
    none = np.zeros(num_requests, dtype=np.int64)
    best = Allocation(none, none)
    for num_passes, depth in _last_depths(candidates, num_depths).items():
        if most_gain[depth - 1] - pass_price * num_passes <= best.net_gain:
            continue  # This number of nodes cannot be the best, even if rows cost nothing.
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
        num_needed = _num_passes(candidates, int(depths.max()))
        paid = pass_price * num_needed + float(catch_up_price[depths > 0].sum())
        if depths.any() and prefix.net_gain - paid > best.net_gain:
            counts = np.where(by_proposer, 0, prefix.counts)
            net_gain = prefix.net_gain - paid
            best = Allocation(counts, depths, net_gain)
    return best


def _num_passes(candidates: StepCandidates, depth: int) -> int:
    """Return the number of passes that the proposer needs for ``depth`` nodes of each request."""
    return max(1, ceil(candidates.passes_per_node * depth / candidates.tokens_per_pass))


def _last_depths(candidates: StepCandidates, num_depths: int) -> dict[int, int]:
    """Return the maximum number of nodes per request, by the number of the proposer's passes."""
    depths = np.arange(1, num_depths + 1)
    passes = np.ceil(candidates.passes_per_node * depths / candidates.tokens_per_pass)
    return dict(
        zip(np.maximum(1.0, passes).astype(np.int64).tolist(), depths.tolist(), strict=True)
    )

"""StepTrees: the trees of a step, whose nodes share the rows of one pass of the target.

What a row costs depends on all rows of the pass: where a tile begins, one is dear and the next ones
cost nothing. So the nodes of all trees are ranked together, and the best are taken as long as they
bring more than their rows cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...core.interface.draft import Draft
from .tree_growth import Growing, TreeGrowth, TreeNodes

FloatArray = NDArray[np.float64]
_Placed: TypeAlias = tuple[int, Growing]
_Offered: TypeAlias = dict[TreeGrowth, list[Growing]]


class StepTrees:
    """Trees that are grown together, with prices in their plans or without.

    Without prices all ``max_draft`` nodes of a plan are grown.
    """

    def __init__(self, trees: Sequence[TreeGrowth]) -> None:
        self._trees = trees
        weighed = [tree for tree in trees if tree.plan.row_prices]
        others = [tree for tree in trees if not tree.plan.row_prices]
        self._groups = [_Group(each) for each in (weighed, others) if each]

    def open(self, level: int | None = None, *, takes_pass: bool = True) -> TreeNodes:
        """Give slots to the nodes that `frontiers` finds; return those that are to be computed."""
        found = self.frontiers(level, takes_pass=takes_pass)
        pairs = zip(self._trees, found, strict=True)
        return [(tree, node) for tree, nodes in pairs for node in tree.open(nodes)]

    def frontiers(self, level: int | None = None, *, takes_pass: bool = True) -> list[list[int]]:
        """The nodes of each tree to compute next; none where a pass would not pay for itself.

        ``level``: those of one level alone. ``takes_pass``: they take another pass.
        """
        found: _Offered = {}
        for group in self._groups:
            group.rank()
            offered = group.frontiers(level)
            found |= group.paying(offered) if takes_pass else offered
        return [[node for each in found[tree] for node in each.nodes] for tree in self._trees]

    def drafts(self, owed: Sequence[int] | None = None) -> list[Draft]:
        """The draft of each tree. ``owed``: tokens of each whose KV the proposer lacks."""
        counts: dict[TreeGrowth, int] = {}
        for group in self._groups:
            group.rank()
            counts |= group.counts()
        pairs = zip(self._trees, owed or [0] * len(self._trees), strict=True)
        return [tree.draft(counts[tree], lacking) for tree, lacking in pairs]


class _Group:
    """Trees whose nodes are paid by one list of prices, as they were when `rank` was called."""

    def __init__(self, trees: Sequence[TreeGrowth]) -> None:
        self.trees = trees
        most = sum(tree.plan.max_draft for tree in trees)
        self._prices = _prices(trees[0].plan.row_prices, most)  # of 0, 1, ... nodes of all
        self._worths, self._count, self._gain = list[list[float]](), 0, 0.0

    def rank(self) -> None:
        """Rank the nodes that the trees have now."""
        self._worths = [tree.worths() for tree in self.trees]
        self._count, self._gain = self._best(_ranked(self._worths))

    def least(self) -> float:
        """Return what one more node must bring, beyond the price of its keys."""
        prices, count, most = self._prices, self._count, len(self._prices) - 1
        worst = float(_ranked(self._worths)[count - 1]) if count else np.inf
        if count == most:
            return worst
        ahead = (prices[count + 1 :] - prices[count]) / np.arange(1, most - count + 1)
        return min(worst, float(ahead.min()))

    def frontiers(self, level: int | None) -> _Offered:
        """Nodes whose followers may be among the best, by tree."""
        least = self.least()
        return {tree: tree.frontier(least, level) for tree in self.trees}

    def paying(self, offered: _Offered) -> _Offered:
        """Keep the offered nodes for which a pass pays best; none where it does not pay.

        Each row of the pass has a price, too: a node is computed if what is expected behind it is
        worth that and a row of the target's pass.
        """
        known = self.trees[0].plan.pass_prices
        if not known or not any(offered.values()):
            return offered
        ordered, gains = self._by_gain(offered)
        rows = np.array([len(each.nodes) for _, each in ordered]).cumsum()
        prices = _prices(known, int(rows[-1]))
        count = int((gains.cumsum() - prices[rows]).argmax()) + 1
        found: _Offered = {tree: [] for tree in self.trees}
        if self._more(ordered[:count]) > prices[rows[count - 1]]:
            for at, each in ordered[:count]:
                found[self.trees[at]].append(each)
        return found

    def _by_gain(self, offered: _Offered) -> tuple[list[_Placed], FloatArray]:
        """Sort all, the best for a row first, with the tree's place; and what each brings."""
        placed, gains, for_a_row = list[_Placed](), list[float](), list[float]()
        least = self.least()
        for at, tree in enumerate(self.trees):
            last = np.inf
            for each in offered[tree]:
                gain = sum(max(0.0, worth - least) for worth in each.followers)
                last = min(last, gain / len(each.nodes))  # it may need those before it
                placed.append((at, each))
                gains.append(gain)
                for_a_row.append(last)
        order = np.argsort(-np.array(for_a_row), kind="stable").tolist()
        return [placed[at] for at in order], np.array(gains)[order]

    def _more(self, placed: Sequence[_Placed]) -> float:
        """Tokens that a pass over these would bring, beyond the price of the target's rows."""
        worths = [[*each] for each in self._worths]
        for at, each in placed:
            worths[at] += each.followers
        for mine, tree in zip(worths, self.trees, strict=True):
            mine.sort(reverse=True)
            del mine[tree.plan.max_draft :]
        return self._best(_ranked(worths))[1] - self._gain

    def counts(self) -> dict[TreeGrowth, int]:
        """The nodes of each tree that are among the best of all, above their rows' price."""
        order = np.argsort(-np.concatenate(self._worths), kind="stable")
        owners = np.repeat(np.arange(len(self.trees)), [len(each) for each in self._worths])
        numbers = np.bincount(owners[order[: self._count]], minlength=len(self.trees))
        return dict(zip(self.trees, numbers.tolist(), strict=True))

    def _best(self, worths: FloatArray) -> tuple[int, float]:
        """Count the best nodes, by falling ``worths``, that bring most beyond their rows' price.

        Returns that count and gain. A row may cost nothing, and the next one a tile's price.
        """
        net = worths.cumsum() - self._prices[1 : len(worths) + 1]
        if not len(net) or net.max() <= 0.0:
            return 0, 0.0
        return int(net.argmax()) + 1, float(net.max())


def _ranked(parts: Sequence[Sequence[float]]) -> FloatArray:
    """All of these, the greatest first."""
    return np.sort(np.concatenate(parts))[::-1]


def _prices(known: Sequence[float], most: int) -> FloatArray:
    """Tokens that 0, 1, ... ``most`` rows must bring; beyond the known ones as the last one.

    Nothing where no prices are known.
    """
    if not known:
        return np.zeros(most + 1)
    step = known[-1] - (known[-2] if len(known) > 1 else 0.0)
    more = known[-1] + step * np.arange(1, most - len(known) + 1)
    return np.concatenate(([0.0], known[:most], more))

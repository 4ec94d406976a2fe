"""StepTrees: the trees of a step, whose nodes share the rows of one pass of the target.

What a row costs depends on all rows of the pass: where a tile begins, one is dear and the next ones
cost nothing. So the nodes of all trees are ranked together, and the best are taken as long as they
bring more than their rows cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...core.interface.draft import Draft
from .tree_growth import TreeGrowth

FloatArray = NDArray[np.float64]
Paths: TypeAlias = list[list[int]]
"""Nodes of a tree that may be computed, each behind those on its path that are not yet."""


class StepTrees:
    """Trees that are grown together, with prices in their plans or without.

    Without prices all ``max_draft`` nodes of a plan are grown.
    """

    def __init__(self, trees: Sequence[TreeGrowth]) -> None:
        self._trees = trees
        weighed = [tree for tree in trees if tree.plan.row_prices]
        others = [tree for tree in trees if not tree.plan.row_prices]
        self._groups = [_Group(each) for each in (weighed, others) if each]

    def frontiers(self, level: int | None = None, *, takes_pass: bool = True) -> list[list[int]]:
        """The nodes of each tree to compute next; none where a pass would not pay for itself.

        ``level``: those of one level alone. ``takes_pass``: they take another pass.
        """
        found: dict[int, Paths] = {}
        for group in self._groups:
            offered = group.frontiers(level)
            found |= group.paying(offered) if takes_pass else offered
        return [[node for path in found[id(tree)] for node in path] for tree in self._trees]

    def drafts(self, owed: Sequence[int] | None = None) -> list[Draft]:
        """The draft of each tree. ``owed``: tokens of each whose KV the proposer lacks."""
        counts = {id(tree): num for group in self._groups for tree, num in group.counts()}
        pairs = zip(self._trees, owed or [0] * len(self._trees), strict=True)
        return [tree.draft(counts[id(tree)], lacking) for tree, lacking in pairs]


class _Group:
    """Trees whose nodes are paid by one list of prices."""

    def __init__(self, trees: Sequence[TreeGrowth]) -> None:
        self.trees = trees
        most = sum(tree.plan.max_draft for tree in trees)
        self._prices = _prices(trees[0].plan.row_prices, most)  # of 0, 1, ... nodes of all
        self._least: float | None = None

    def least(self) -> float:
        """Return what one more node must bring, beyond the price of its keys."""
        if self._least is None:
            worths, prices = self._worths(), self._prices
            count, most = self._best(worths)[0], len(prices) - 1
            if count == most:
                return float(worths[-1])
            ahead = (prices[count + 1 :] - prices[count]) / np.arange(1, most - count + 1)
            slope = float(ahead.min())
            self._least = min(slope, float(worths[count - 1])) if count else slope
        return self._least

    def frontiers(self, level: int | None) -> dict[int, Paths]:
        """Nodes whose followers may be among the best, by the tree's identity."""
        return {id(tree): tree.frontier(self.least(), level) for tree in self.trees}

    def paying(self, offered: Mapping[int, Paths]) -> dict[int, Paths]:
        """Keep the offered nodes for which a pass pays best; none where it does not pay.

        Each row of the pass has a price, too: a node is computed if what is expected behind it is
        worth that and a row of the target's pass.
        """
        known = self.trees[0].plan.pass_prices
        if not known or not any(offered.values()):
            return dict(offered)
        paths, gains = self._by_gain(offered)
        rows = np.array([len(path) for _, path in paths]).cumsum()
        prices = _prices(known, int(rows[-1]))
        count = int((gains.cumsum() - prices[rows]).argmax()) + 1
        found: dict[int, Paths] = {id(tree): [] for tree in self.trees}
        for owner, path in paths[:count]:
            found[owner].append(path)
        if self.gain(found) > prices[rows[count - 1]]:
            return found
        return {id(tree): [] for tree in self.trees}

    def _by_gain(
        self, offered: Mapping[int, Paths]
    ) -> tuple[list[tuple[int, list[int]]], FloatArray]:
        """Sort all paths with their trees, and what each brings; the best for a row first."""
        paths, gains, for_a_row = list[tuple[int, list[int]]](), list[float](), list[float]()
        for tree in self.trees:
            mine, last = offered[id(tree)], np.inf
            needed = self.least() + tree.plan.key_price
            for path, followers in zip(mine, tree.likely_followers(mine), strict=True):
                gain = sum(max(0.0, each - needed) for each in followers)
                last = min(last, gain / len(path))  # a path may need those before it
                paths.append((id(tree), path))
                gains.append(gain)
                for_a_row.append(last)
        order = np.argsort(-np.array(for_a_row), kind="stable").tolist()
        return [paths[at] for at in order], np.array(gains)[order]

    def gain(self, found: Mapping[int, Paths]) -> float:
        """Tokens that a pass over these nodes would bring, beyond the price of their rows."""
        followers = [tree.likely_followers(found[id(tree)]) for tree in self.trees]
        parts = [
            tree.worths([each for path in behind for each in path])
            for tree, behind in zip(self.trees, followers, strict=True)
        ]
        return self._best(_ranked(parts))[1] - self._best(self._worths())[1]

    def counts(self) -> list[tuple[TreeGrowth, int]]:
        """The nodes of each tree that are among the best of all, above their rows' price."""
        parts = [tree.worths() for tree in self.trees]
        order = np.argsort(-np.concatenate(parts), kind="stable")
        owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        taken = owners[order[: self._best(_ranked(parts))[0]]]
        numbers = np.bincount(taken, minlength=len(parts)).tolist()
        return list(zip(self.trees, numbers, strict=True))

    def _worths(self) -> FloatArray:
        return _ranked([tree.worths() for tree in self.trees])

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

"""StepTrees: the draft trees of one step. The target verifies all of them in one pass.

The cost of a row depends on the other rows of the pass, because kernels compute rows in tiles: the
first row of a tile costs much, and the rows that fill the tile cost nothing. So the nodes of all
trees are ranked together, and the best are taken as long as they bring more than their rows cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...core.interface.draft import Draft
from .tree_growth import Growing, TreeGrowth, TreeNodes
from .tree_template import Expectation, Numbered, TemplateRow, assign_rows, bases_of

FloatArray = NDArray[np.float64]
_Placed: TypeAlias = tuple[int, Growing]
_Offered: TypeAlias = dict[TreeGrowth, list[Growing]]


class StepTrees:
    """The trees of a step, which grow together.

    If the plan of a tree contains no prices, the tree grows to ``max_draft`` nodes.
    """

    def __init__(self, trees: Sequence[TreeGrowth]) -> None:
        self._trees = trees
        weighed = [tree for tree in trees if tree.plan.row_prices]
        others = [tree for tree in trees if not tree.plan.row_prices]
        self._groups = [_Group(each) for each in (weighed, others) if each]

    def open(self, level: int | None = None, *, takes_pass: bool = True) -> TreeNodes:
        """Choose the nodes to compute next, and assign slots for their KV."""
        found = self.frontiers(level, takes_pass=takes_pass)
        pairs = zip(self._trees, found, strict=True)
        return [(tree, node) for tree, nodes in pairs for node in tree.open(nodes)]

    def frontiers(self, level: int | None = None, *, takes_pass: bool = True) -> list[list[int]]:
        """Return the nodes of each tree to compute next; none if a pass costs more than it brings.

        ``level``: return nodes of this level only. ``takes_pass``: whether the proposer must run
        another pass to compute them.
        """
        found: _Offered = {}
        for group in self._groups:
            group.rank()
            offered = group.frontiers(level)
            found |= group.paying(offered) if takes_pass else offered
        return [[node for each in found[tree] for node in each.nodes] for tree in self._trees]

    def template(
        self, roots: Mapping[TreeGrowth, TemplateRow], *, by_level: bool = False
    ) -> list[list[TemplateRow]]:
        """Return the rows of the next passes, which are all launched before any result is read.

        ``roots``: rows of a first pass whose result was not read yet, by tree. The list is empty if
        no pass is expected to yield more than it costs. ``by_level``: whether pass n computes the
        nodes of level n alone; there must be a root for each tree then.
        """
        planned = [
            rows for group in self._groups for rows in group.template(roots, by_level) if rows
        ]
        return assign_rows(planned)

    def drafts(self, owed: Sequence[int] | None = None) -> list[Draft]:
        """Return the draft of each tree.

        ``owed``: number of tokens of each tree's request whose KV the proposer lacks.
        """
        counts: dict[TreeGrowth, int] = {}
        for group in self._groups:
            group.rank()
            counts |= group.counts()
        pairs = zip(self._trees, owed or [0] * len(self._trees), strict=True)
        return [tree.draft(counts[tree], lacking) for tree, lacking in pairs]


class _Group:
    """Trees with the same list of row prices. `rank` must be called after the trees grow."""

    def __init__(self, trees: Sequence[TreeGrowth]) -> None:
        self.trees = trees
        most = sum(tree.plan.max_draft for tree in trees)
        self._prices = _prices(trees[0].plan.row_prices, most)  # price of 0, 1, ... nodes
        self._worths, self._count, self._gain = list[list[float]](), 0, 0.0

    def rank(self) -> None:
        """Rank the current nodes of the trees."""
        self._worths = [tree.worths() for tree in self.trees]
        self._count, self._gain = self._best(_ranked(self._worths))

    def least(self) -> float:
        """Return the number of expected tokens above which one more node is worth its row.

        The price of the keys that the node attends to is not included.
        """
        prices, count, most = self._prices, self._count, len(self._prices) - 1
        worst = float(_ranked(self._worths)[count - 1]) if count else np.inf
        if count == most:
            return worst
        ahead = (prices[count + 1 :] - prices[count]) / np.arange(1, most - count + 1)
        return min(worst, float(ahead.min()))

    def frontiers(self, level: int | None) -> _Offered:
        """Return, for each tree, the nodes whose children may be among the best of the step."""
        least = self.least()
        return {tree: tree.frontier(least, level) for tree in self.trees}

    def paying(self, offered: _Offered) -> _Offered:
        """Return the offered nodes that one pass of the proposer should compute.

        Each row of the proposer's pass has a price. A node is computed if its best child is
        expected to bring more tokens than the price of this row and of a row of the target's pass
        together. If the whole pass costs more than it brings, no nodes are returned.
        """
        known = self.trees[0].plan.pass_prices
        if not known or not any(offered.values()):
            return offered
        ordered, gains = self._by_gain(offered)
        rows = np.array([len(each.nodes) for _, each in ordered]).cumsum()
        prices = _prices(known, int(rows[-1]))
        count = int((gains.cumsum() - prices[rows]).argmax()) + 1
        found: _Offered = {tree: [] for tree in self.trees}
        if self._added_net_gain(ordered[:count]) > prices[rows[count - 1]]:
            for at, each in ordered[:count]:
                found[self.trees[at]].append(each)
        return found

    def _by_gain(self, offered: _Offered) -> tuple[list[_Placed], FloatArray]:
        """Sort the offered nodes by gain per row of the proposer's pass, in descending order.

        Returns (index of the tree, nodes) pairs, and the gain of each pair in tokens.
        """
        placed, gains, for_a_row = list[_Placed](), list[float](), list[float]()
        least = self.least()
        for at, tree in enumerate(self.trees):
            last = np.inf
            for each in offered[tree]:
                gain = sum(max(0.0, worth - least) for worth in each.child_worths)
                # Nodes may need earlier nodes of their path, so those must be sorted first.
                last = min(last, gain / len(each.nodes))
                placed.append((at, each))
                gains.append(gain)
                for_a_row.append(last)
        order = np.argsort(-np.array(for_a_row), kind="stable").tolist()
        return [placed[at] for at in order], np.array(gains)[order]

    def _added_net_gain(self, placed: Sequence[_Placed]) -> float:
        """Return by how much a pass over these nodes would raise the step's net gain, in tokens.

        The net gain is the number of expected tokens minus the price of the target's rows.
        """
        worths = [[*each] for each in self._worths]
        for at, each in placed:
            worths[at] += each.child_worths
        for mine, tree in zip(worths, self.trees, strict=True):
            mine.sort(reverse=True)
            del mine[tree.plan.max_draft :]
        return self._best(_ranked(worths))[1] - self._gain

    def template(self, roots: Mapping[TreeGrowth, TemplateRow], by_level: bool) -> list[Numbered]:
        """Return the rows of each tree that are worth their cost, with the numbers of their passes.

        A row is worth its cost if its best child is expected to yield more tokens than the price of
        a row in the target's pass and of a row in the drafter's pass together.
        """
        self.rank()
        least = self.least()
        known = dict(zip(self.trees, self._worths, strict=True))
        bases = {
            tree: bases_of(tree, least, awaits_root=tree in roots, by_level=by_level)
            for tree in self.trees
        }
        found = {
            tree: Expectation(tree, mine, known[tree], roots.get(tree), by_level=by_level)
            for tree, mine in bases.items()
            if mine
        }
        if not found:
            return []
        self._worths = [found[tree].worths if tree in found else known[tree] for tree in self.trees]
        ranked = _ranked(self._worths)
        self._count, self._gain = self._best(ranked)
        if not self._count:
            return []
        passes = self.trees[0].plan.pass_prices
        row = (passes[-1] - passes[0]) / (len(passes) - 1) if len(passes) > 1 else 0.0
        # With as many nodes as allowed, a node need not be worth another row of the target's pass.
        more = self.least() if self._count < len(self._prices) - 1 else 0.0
        least = max(float(ranked[self._count - 1]), more + row)
        for each in found.values():
            each.choose(least)
        rows = [each.rows() for each in found.values()]
        if not passes:
            return rows
        last = min(
            self._last_pass([*known.values()], [*found.values()], rows),
            max([each.last_likely for each in found.values()]),
        )
        return [[pair for pair in mine if pair[0] <= last] for mine in rows]

    def _last_pass(
        self,
        known: Sequence[Sequence[float]],
        found: Sequence[Expectation],
        rows: Sequence[Numbered],
    ) -> int:
        """Return the number of the last pass that raises the expected net gain of all passes."""
        num_rows = np.bincount([number for mine in rows for number, _ in mine], minlength=1)
        chosen = [each.chosen() for each in found]
        worths = np.concatenate([*known, *[mine for mine, _ in chosen]])
        numbers = np.zeros(len(worths), np.int64)
        numbers[len(worths) - sum([len(mine) for mine, _ in chosen]) :] = np.concatenate(
            [mine for _, mine in chosen]
        )
        order = np.argsort(-worths)
        # [number of the last pass, node] whether one of the passes finds the node
        is_found = numbers[order] <= np.arange(len(num_rows))[:, None]
        counts = is_found.cumsum(axis=1)
        net = (worths[order] * is_found).cumsum(axis=1)
        most = len(self._prices) - 1
        net -= self._prices[np.minimum(counts, most)]
        net[counts > most] = 0.0
        prices = _prices(self.trees[0].plan.pass_prices, int(num_rows.max()))[num_rows]
        return int((net.max(axis=1) - prices.cumsum()).argmax())

    def counts(self) -> dict[TreeGrowth, int]:
        """Return the number of nodes that each tree has among the best nodes of the group."""
        order = np.argsort(-np.concatenate(self._worths), kind="stable")
        owners = np.repeat(np.arange(len(self.trees)), [len(each) for each in self._worths])
        numbers = np.bincount(owners[order[: self._count]], minlength=len(self.trees))
        return dict(zip(self.trees, numbers.tolist(), strict=True))

    def _best(self, worths: FloatArray) -> tuple[int, float]:
        """Return the number of best nodes with the highest net gain, and that gain in tokens.

        ``worths`` is in descending order. All numbers of nodes are compared, because the net gain
        may have several maxima: the price of rows rises in steps.
        """
        net = worths.cumsum() - self._prices[1 : len(worths) + 1]
        if not len(net) or net.max() <= 0.0:
            return 0, 0.0
        return int(net.argmax()) + 1, float(net.max())


def _ranked(parts: Sequence[Sequence[float]]) -> FloatArray:
    """Return the values of all parts in descending order."""
    return np.sort(np.concatenate(parts))[::-1]


def _prices(known: Sequence[float], most: int) -> FloatArray:
    """Return the price of 0, 1, ... ``most`` rows in tokens, [most + 1].

    Each row beyond the known prices costs as much as the last known row. Without known prices, all
    prices are 0.
    """
    if not known:
        return np.zeros(most + 1)
    step = known[-1] - (known[-2] if len(known) > 1 else 0.0)
    more = known[-1] + step * np.arange(1, most - len(known) + 1)
    return np.concatenate(([0.0], known[:most], more))

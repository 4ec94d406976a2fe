"""Templates of draft trees, whose nodes are computed before the host knows their tokens.

If the device chooses tokens itself, the host can launch several passes of a drafter before it reads
any tokens: each pass takes its tokens from the result words of the pass before it
(`DeviceTokens`). Positions, KV slots and the origin of each token must then be known before the
first pass. A template has them for each of its rows. A row computes either a node that the tree has
already, or the candidate of a given *rank* after another row, whatever its token will be.

The rows are chosen by expected probabilities. The candidates after a node are expected to have the
mean probabilities of their ranks (`GapModel.mean_chances`), so the tree expected below a node has
the same shape for every node (`ExpectedTree`), scaled by the probability of reaching the node. Once
the host has read the tokens, the trees have real nodes, and the next template begins with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.ops.batch import MOST_DRAWN_ROWS
from ...core.sampling.verifier import Best
from ..control.outcome import NUM_BEST
from .tree_growth import MOST_EXPANDED, ROOT, TreeGrowth

FloatArray: TypeAlias = NDArray[np.float64]
# A pass is launched before the results of earlier passes are read only if it computes a node with
# at least this survival: a useless pass costs more than to wait for results.
LEAST_LIKELY = 0.5
KNOWN = -1  # rank of a row whose token the host knows


class TemplateRow(msgspec.Struct, eq=False):
    """A row of a template, which computes one node of ``tree``.

    ``parent``: row of the node before it; None if that node was computed earlier. ``rank``: rank of
    the node's token among the candidates that are found after the parent, or `KNOWN`. ``slot`` and
    ``tail``: KV slot of the node, and the slots on its path that do not follow from the page table
    (`TreeGrowth.slots`).
    """

    tree: TreeGrowth
    level: int
    parent: TemplateRow | None = None
    rank: int = KNOWN
    node: int | None = None  # number of the node in the tree; None until its token is read
    on_trunk: bool = True
    slot: int | None = None
    tail: Sequence[int] = ()
    index: int = -1  # index of the row in its pass; -1: no pass computes it

    def source(self, num_best: int) -> int:
        """Return the index of the token's word in the result of the parent's pass.

        Return -1 for a known token. ``num_best``: number of words in the result for each row.
        """
        if self.rank == KNOWN or self.parent is None:
            return -1
        return self.parent.index * num_best + self.rank

    def read(self, best: Best) -> None:
        """Add the candidates that the pass found after this row to the tree.

        The parent must have been read before. Nothing is added if the parent has no candidate of
        this rank, or if another row has computed the same node.
        """
        tree, parent, rank = self.tree, self.parent, self.rank
        if rank != KNOWN and parent is not None and parent.node is not None:
            ranking = tree.rankings.get(parent.node)
            has_candidate = ranking is not None and rank < len(ranking.ranked)
            self.node = ranking.ranked[rank] if ranking is not None and has_candidate else None
        node = self.node
        if node is None or (node != ROOT and not tree.hold(node, self.slot, self.on_trunk)):
            return
        tree.expand(node, best)


Numbered: TypeAlias = Sequence[tuple[int, TemplateRow]]
"""Rows with the numbers of their passes. The first pass of a template has the number 1."""


class ExpectedTree:
    """The nodes below a node that are expected to be likeliest, in descending order of survival.

    ``chances``: expected probability of the token of each rank, in descending order. ``most``:
    maximum number of nodes. All lists have one entry per node.
    """

    def __init__(self, chances: Sequence[float], most: int) -> None:
        self.parents = list[int]()  # index of the parent; -1: the node above the expected tree
        self.ranks, self.levels = list[int](), list[int]()
        survival = list[float]()  # probability, if the node above the expected tree is accepted
        # Entries are (negative survival, parent, rank, level).
        heap = [(-chance, -1, rank, 1) for rank, chance in enumerate(chances) if chance]
        # Entry n lists in ascending order which of the first n nodes have children among them.
        self.inner = [list[int]()]
        self.deepest = [0]  # entry n: greatest level among the first n nodes
        while heap and len(survival) < most:
            negative, parent, rank, level = heappop(heap)
            node, inner = len(survival), self.inner[-1]
            for below, chance in enumerate(chances):
                if chance:
                    heappush(heap, (negative * chance, node, below, level + 1))
            survival.append(-negative)
            self.parents.append(parent)
            self.ranks.append(rank)
            self.levels.append(level)
            is_new = parent >= 0 and parent not in inner
            self.inner.append(sorted([*inner, parent]) if is_new else inner)
            self.deepest.append(max(level, self.deepest[-1]))
        self.survival: FloatArray = np.array(survival)


@lru_cache(maxsize=64)
def expected_tree(chances: tuple[float, ...], most: int) -> ExpectedTree:
    """Return an `ExpectedTree`, the same object for the same arguments."""
    return ExpectedTree(chances, most)


class Base(NamedTuple):
    """A node of a tree below which unknown nodes are expected."""

    node: int
    number: int  # number of the pass that computes the node; 0: an earlier pass
    chance: float  # probability that a child which the tree does not have yet is accepted
    first_rank: int  # rank of the best such child


def bases_of(tree: TreeGrowth, least: float, *, awaits_root: bool, by_level: bool) -> list[Base]:
    """Return the nodes of a tree below which a pass may find one of the best nodes of the step.

    ``least``: number of expected tokens above which a node is worth its row. ``awaits_root``:
    whether the first pass of the tree was launched, but its result was not read. Before the first
    pass is launched there are no bases, because KV of the request itself may be missing.
    ``by_level``: whether pass n computes the nodes of level n alone.
    """
    if not awaits_root and ROOT not in tree.rankings:
        return []
    least = (least + tree.plan.key_price) / (_mean_chances(tree)[0] or 1.0)
    nodes = tree.nodes
    found = [
        Base(
            node,
            nodes[node].level if by_level else 1,
            chance,
            int(chance < nodes[node].survival / 2.0),
        )
        for node, chance in enumerate(tree.left())
        if chance > least and tree.can_open(node)
    ]
    if awaits_root:
        chance = 1.0 - sum([each.survival for each in nodes if each.parent == ROOT])
        # If the tree probably has the best child from a look-up, expect the second best.
        found.append(Base(ROOT, 0, max(0.0, chance), int(chance < 0.5)))
    return found


class Expectation:
    """The nodes that passes are expected to find in one tree, below its ``bases``.

    The worth of a node is its expected number of tokens, minus the price of reading its keys.
    ``known``: worths of nodes that the tree has. ``root``: the row of the tree's first pass, if its
    result has not been read. ``by_level``: whether pass n computes the nodes of level n alone,
    which needs a ``root``. ``worths``: worths of the best known and expected nodes, at most
    ``max_draft``, in descending order.
    """

    def __init__(
        self,
        tree: TreeGrowth,
        bases: Sequence[Base],
        known: Sequence[float],
        root: TemplateRow | None,
        *,
        by_level: bool,
    ) -> None:
        self._tree, self._bases, self._root, plan = tree, bases, root, tree.plan
        self._by_level = by_level
        self._shape = expected_tree(_mean_chances(tree), plan.max_draft)
        self._chances: FloatArray = np.array([base.chance for base in bases])
        self._worths: FloatArray = self._chances[:, None] * self._shape.survival - plan.key_price
        found = self._worths[self._worths > 0.0].tolist()
        self.worths = sorted([*known, *found], reverse=True)[: plan.max_draft]
        self._is_chosen: NDArray[np.bool_] = self._worths < 0.0

    def choose(self, least: float) -> None:
        """Choose the expected nodes whose worth is at least ``least`` tokens."""
        if len(self.worths) == self._tree.plan.max_draft:
            least = max(least, self.worths[-1])
        self._is_chosen = self._worths >= least

    def chosen(self) -> tuple[FloatArray, NDArray[np.int64]]:
        """Return the worth of each chosen node, and the number of the pass that finds it."""
        first = np.array([base.number - 1 for base in self._bases])
        numbers: NDArray[np.int64] = np.add.outer(first, self._shape.levels)
        return self._worths[self._is_chosen], numbers[self._is_chosen]

    @property
    def last_likely(self) -> int:
        """Number of the last pass that computes a node of at least `LEAST_LIKELY` survival."""
        counts = (self._chances[:, None] * self._shape.survival >= LEAST_LIKELY).sum(axis=1)
        last, deepest = 1, self._shape.deepest  # pass 1 computes nodes that are known already
        for base, count in zip(self._bases, counts.tolist(), strict=True):
            if count and base.number + deepest[count] > last:
                last = base.number + deepest[count]
        return last

    def rows(self) -> Numbered:
        """Return the rows that find the chosen nodes; a node's row follows the rows of its path."""
        found: list[tuple[int, TemplateRow]] = []
        known: dict[int, TemplateRow] = {}
        for base, count in zip(self._bases, self._is_chosen.sum(axis=1).tolist(), strict=True):
            if count:
                top = self._root
                if base.node != ROOT:
                    top = self._known_row(base, known, found)
                assert top is not None
                self._add_below(base, top, count, found)
        return found

    def _known_row(
        self, base: Base, known: dict[int, TemplateRow], found: list[tuple[int, TemplateRow]]
    ) -> TemplateRow:
        """Return the row of a known node; add that row and the rows of its path if missing."""
        tree, row = self._tree, self._root if self._by_level else None
        for node in tree.path(base.node):
            each = tree.nodes[node]
            if each.is_open:
                continue
            if node not in known:
                known[node] = TemplateRow(tree, each.level, row, KNOWN, node, each.on_trunk)
                number = each.level if self._by_level else base.number
                found.append((number, known[node]))
            row = known[node]
        assert row is not None
        return row

    def _add_below(
        self, base: Base, top: TemplateRow, count: int, found: list[tuple[int, TemplateRow]]
    ) -> None:
        """Add the rows that find the ``count`` best nodes below a base, whose row is ``top``."""
        tree, shape, made = self._tree, self._shape, {-1: top}
        assert top.node is not None
        # The trunk continues with the first child that a node of the trunk gets.
        has_children = bool(tree.at(top.node).children)
        for at in shape.inner[count]:
            parent, rank = shape.parents[at], shape.ranks[at]
            if parent not in made:
                continue
            above = made[parent]
            on_trunk = above.on_trunk and not rank and not (above is top and has_children)
            if above is top:
                rank += base.first_rank
            # A row at the last level would find tokens that cannot be drafted.
            if rank < NUM_BEST and above.level + 1 < tree.most_levels:
                row = TemplateRow(tree, above.level + 1, above, rank, None, on_trunk)
                made[at] = row
                found.append((base.number + shape.levels[at], row))


def _mean_chances(tree: TreeGrowth) -> tuple[float, ...]:
    """Return the expected probability of each rank, rounded so that trees have equal shapes."""
    if not tree.wants_best:
        return (1.0,)
    return tree.gap_model.rounded_chances[: NUM_BEST if tree.is_tree else 1]


def assign_rows(planned: Sequence[Numbered]) -> list[list[TemplateRow]]:
    """Assign KV slots to rows, and return the rows of each pass.

    ``planned``: the rows of each tree. A row that gets no slot, or whose pass is full, is dropped
    with all rows below it.
    """
    most = min(MOST_EXPANDED, max(1, MOST_DRAWN_ROWS // max(1, len(planned))))
    last = max([number for rows in planned for number, _ in rows], default=0)
    passes = [list[TemplateRow]() for _ in range(last)]
    for rows in planned:
        counts = [0] * (last + 1)
        for number, row in rows:
            if counts[number] < most and _take_slot(row):
                counts[number] += 1
                mine = passes[number - 1]
                row.index = len(mine)
                mine.append(row)
    while passes and not passes[-1]:
        del passes[-1]
    return passes


def _take_slot(row: TemplateRow) -> bool:
    """Assign a KV slot to a row; return False if none is left, or if its parent was dropped."""
    tree, parent = row.tree, row.parent
    before: Sequence[int] = ()
    if parent is not None:
        if parent.index < 0:
            return False
        before = parent.tail
    elif row.node is not None:
        before = tree.slots(tree.nodes[row.node].parent)
    slot = row.slot = tree.take_slot(row.level, row.on_trunk)
    if slot is None:
        return False
    if before or not row.on_trunk:
        row.tail = (*before, slot)
    return True


def note_rows(rows: Sequence[TemplateRow]) -> None:
    """Record in each tree the number of its rows in this pass.

    The first pass of a tree is not recorded here, but by `TreeGrowth.expand`.
    """
    for tree, count in Counter([row.tree for row in rows if row.node != ROOT]).items():
        tree.pass_rows.append(count)

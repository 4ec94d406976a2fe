"""TreeGrowth: a draft tree that a model grows, expanding the likeliest nodes first.

The *survival* of a node is the probability that it and all nodes before it on its path are
accepted. A `GapModel` estimates the probability of each of the best tokens after a node.

A tree may begin with looked-up tokens. If the drafter guesses the same token, the higher survival
counts. If it guesses other tokens, the likelier guess keeps its survival, and the other guess gets
only the probability that is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from ...core.execution.step_layout import spare_slots, table_slots
from ...core.interface.draft import NO_DRAFT, Draft, DraftPlan
from ...core.interface.plan import ScheduledRequest
from ...core.sampling.verifier import Best
from ..control.outcome import DraftNote
from .gap_model import GapModel

MOST_EXPANDED = 6  # maximum number of nodes of one tree that a pass computes
ROOT = -1  # node number of the request's last token
ANY_LEVEL = 1 << 30  # value of ``most_levels`` without a limit


class _Node(Struct):
    """A token that may be drafted."""

    token_id: int
    parent: int
    level: int  # 1 for a node that follows the request's last token
    source: str
    survival: float  # probability that this node and all nodes before it are accepted
    own_survival: float  # survival by the drafter's estimate; 0 if the drafter found other tokens
    on_trunk: bool = False  # whether the node is on the trunk and so has its position's slot
    children: list[int] = []
    is_open: bool = False  # whether a pass computes or has computed this node
    slot: int | None = None  # slot of the node's KV, if the drafter keeps any


class _Ranking(NamedTuple):
    """The candidates that a pass found after a node."""

    ranked: list[int]  # nodes, the best first
    scores: tuple[float, ...]  # scores of the nodes; empty if the pass returned a single token


class Growing(NamedTuple):
    """Nodes of one path that may be computed together, in the order of the path.

    ``child_worths``: for each node, the expected tokens of its best child, minus the price of the
    keys that the child attends to. For a drafter that grows level by level, the best descendant
    counts if its value is higher.
    """

    nodes: list[int]
    child_worths: list[float]


@dataclass(slots=True, eq=False)
class TreeGrowth:
    """One request's growing draft tree.

    Without spare pages, the request gets a chain. `StepTrees` decides which nodes are worth their
    rows. ``source``: the drafter's name. ``page_size``: page size of the pool that holds the nodes'
    KV, in tokens; 0 if nodes have no KV. ``most_levels``: maximum number of tokens on a path.
    """

    scheduled: ScheduledRequest
    gap_model: GapModel
    source: str
    page_size: int = 0
    most_levels: int = ANY_LEVEL
    nodes: list[_Node] = field(default_factory=list)
    rankings: dict[int, _Ranking] = field(default_factory=dict)  # by node, ROOT included
    pass_rows: list[int] = field(default_factory=list)  # rows of each pass or level, in order
    plan: DraftPlan = field(init=False)
    is_tree: bool = field(init=False)  # whether nodes may have siblings
    # Whether passes must return several candidates per node, with scores. A looked-up chain
    # requires scores, too, because its survival is compared with the grown chain's.
    wants_best: bool = field(init=False)
    _root: _Node = field(init=False)
    _spare: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.plan = plan = self.scheduled.draft_plan
        self.is_tree = bool(len(self.scheduled.spare_page_ids))
        self.wants_best = bool(plan.row_prices or self.is_tree or plan.draft.survival)
        # A child of a node at the last level could not be verified, and has no slot.
        self.most_levels = min(self.most_levels, self.plan.max_draft)
        self._root = _Node(self.scheduled.tokens[-1], ROOT, 0, "", 1.0, 1.0, True)
        self._spare = spare_slots(self.scheduled, self.page_size)[::-1]
        if self.is_tree and self.plan.draft.survival:
            self._begin_with(self.plan.draft)

    def _begin_with(self, known: Draft) -> None:
        """Add the looked-up tokens."""
        parents = known.parents or range(-1, len(known.token_ids) - 1)
        fields = (known.token_ids, parents, known.sources, known.survival)
        for token_id, parent, source, survival in zip(*fields, strict=True):
            self._add(token_id, parent, source, survival, 0.0)

    def _add(
        self, token_id: int, parent: int, source: str, survival: float, own_survival: float
    ) -> int:
        before, index = self.at(parent), len(self.nodes)
        on_trunk = before.on_trunk and not before.children
        level = before.level + 1
        self.nodes.append(_Node(token_id, parent, level, source, survival, own_survival, on_trunk))
        before.children.append(index)
        return index

    def at(self, node: int) -> _Node:
        """Return a node by its number; ROOT stands for the request's last token."""
        return self._root if node == ROOT else self.nodes[node]

    def expand(self, node: int, best: Best) -> None:
        """Add the candidates that a pass found for the token after ``node``."""
        if node == ROOT:
            self.pass_rows.append(1)
        if not best.token_ids:
            return
        before = self._root if node == ROOT else self.nodes[node]
        chances = self.gap_model.chances(best.scores) if best.scores else [1.0]
        if not self.is_tree:
            chances[1:] = [0.0] * (len(chances) - 1)
        if before.children:
            ranked = self._merge(node, best.token_ids, chances)
        else:
            first = len(self.nodes)
            level, survival, own, source = (
                before.level + 1, before.survival, before.own_survival, self.source,
            )  # fmt: skip
            self.nodes += [
                _Node(token_id, node, level, source, survival * chance, own * chance)
                for token_id, chance in zip(best.token_ids, chances, strict=True)
            ]
            self.nodes[first].on_trunk = before.on_trunk
            ranked = [*range(first, len(self.nodes))]
            before.children += ranked
        self.rankings[node] = _Ranking(ranked, best.scores)

    def _merge(self, node: int, token_ids: Sequence[int], chances: Sequence[float]) -> list[int]:
        """Add the candidates after a node with looked-up children; return the numbers of all.

        A candidate that was looked up, too, has the higher survival.
        """
        before, ranked = self.at(node), list[int]()
        known = {self.nodes[index].token_id: index for index in before.children}
        for token_id, chance in zip(token_ids, chances, strict=True):
            survival, own = before.survival * chance, before.own_survival * chance
            if token_id in known:
                same = self.nodes[known[token_id]]
                same.survival, same.own_survival = max(same.survival, survival), own
                ranked.append(known[token_id])
            else:
                ranked.append(self._add(token_id, node, self.source, survival, own))
        self._share(before, set(known.values()), set(ranked))
        return ranked

    def _share(self, before: _Node, known: set[int], ranked: set[int]) -> None:
        """Limit the sum of the survival of a node's children to the node's own survival.

        Some children were looked up, and some were found by the drafter. The group that contains
        the likeliest child is unchanged, and the survival of the others is scaled to the rest.
        """
        if before.survival <= 0.0:
            return
        foreign, own = known - ranked, ranked - known
        side = max(known | ranked, key=lambda index: self.nodes[index].survival)
        losers, winners = (own, known) if side in foreign else (foreign, ranked)
        left = 1.0 - sum(self.nodes[index].survival for index in winners) / before.survival
        for index in losers:
            self._scale(index, max(0.0, left))

    def _scale(self, node: int, factor: float) -> None:
        self.nodes[node].survival *= factor
        for child in self.nodes[node].children:
            self._scale(child, factor)

    def frontier(self, least: float, level: int | None = None) -> list[Growing]:
        """Return the nodes to expand: their children may be among the best of the step.

        ``least``: number of expected tokens above which one more node is worth its row, without the
        price of its keys. ``level``: return nodes of this level only. The best nodes come first,
        each with the nodes before it on its path that are not computed yet. The list is empty
        before the first pass, because KV of the request itself may be missing.
        """
        least, chosen, found = least + self.plan.key_price, set[int](), list[Growing]()
        if ROOT not in self.rankings:
            return found
        if len(self.nodes) >= self.plan.max_draft:
            survival = sorted((node.survival for node in self.nodes), reverse=True)
            least = max(least, survival[self.plan.max_draft - 1])
        left = self.left()
        if level is not None:
            # A node counts as much as its best descendant, which is reached through it.
            for index in range(len(self.nodes) - 1, -1, -1):
                parent = self.nodes[index].parent
                if parent != ROOT:
                    left[parent] = max(left[parent], left[index])
        worth = [index for index, chance in enumerate(left) if chance > least]
        for index in sorted(worth, key=lambda each: -left[each]):
            node = self.nodes[index]
            if node.is_open or level not in (None, node.level) or not self.can_open(index):
                continue
            path = [i for i in self.path(index) if not self.nodes[i].is_open and i not in chosen]
            fits = 0 < len(path) <= MOST_EXPANDED - len(chosen)
            if fits and (level is None or path == [index]):
                chosen.update(path)
                chance, price = self.gap_model.mean_chances[0], self.plan.key_price
                found.append(Growing(path, [chance * left[each] - price for each in path]))
        return found

    def left(self) -> list[float]:
        """Return, for each node, the probability that an unknown child of it will be accepted.

        This is the node's survival minus the survival of its known children, or 0 for a computed
        node. The shape is [number of nodes].
        """
        left = [node.survival for node in self.nodes]
        for node in self.nodes:
            if node.parent != ROOT:
                left[node.parent] -= node.survival
        return [
            0.0 if node.is_open else chance for node, chance in zip(self.nodes, left, strict=True)
        ]

    def can_open(self, node: int) -> bool:
        """Whether a pass can compute a node: it gets a KV slot, and its child can be drafted."""
        each = self.nodes[node]
        has_slot = each.on_trunk or not self.page_size or bool(self._spare)
        return has_slot and each.level < self.most_levels

    def take_slot(self, level: int, on_trunk: bool) -> int | None:
        """Return a KV slot for a node of a level; None if no spare page has a free one."""
        if on_trunk:
            scheduled, size = self.scheduled, self.page_size
            at = len(scheduled.tokens) + level - 1 - scheduled.extras.num_packed_away
            return scheduled.page_ids[at // size] * size + at % size
        return self._spare.pop() if self._spare else None

    def hold(self, node: int, slot: int | None, on_trunk: bool) -> bool:
        """Record that a pass has computed a node in ``slot``, unless another row did so before.

        Returns whether this row is the first. ``on_trunk``: whether the node's position has this
        slot. A row with a spare slot may find a looked-up node of the trunk again.
        """
        each = self.nodes[node]
        if each.is_open:
            return False
        each.is_open, each.slot, each.on_trunk = True, slot, on_trunk
        return True

    def open(self, nodes: Sequence[int]) -> list[int]:
        """Assign slots for KV to nodes; return those that can be computed."""
        for index in nodes:
            node = self.nodes[index]
            is_reached = node.parent == ROOT or self.nodes[node.parent].is_open
            node.is_open = is_reached and self.can_open(index)
            if node.is_open and self.page_size:
                node.slot = self.take_slot(node.level, node.on_trunk)
        opened = [index for index in nodes if self.nodes[index].is_open]
        if opened:
            self.pass_rows.append(len(opened))
        return opened

    def worths(self) -> list[float]:
        """Return the expected tokens of the best ``max_draft`` nodes, minus the price of keys.

        The values are in descending order.
        """
        price = self.plan.key_price
        found = [node.survival - price for node in self.nodes if node.survival]
        return sorted(found, reverse=True)[: self.plan.max_draft]

    def path(self, node: int) -> list[int]:
        """Return the path from the first level to ``node``, which is included."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]

    def tail(self, node: int) -> list[int]:
        """Return the token ids on the path from the first level to ``node``."""
        return [self.nodes[index].token_id for index in self.path(node)]

    def slots(self, node: int) -> list[int]:
        """Return the KV slots on the path to ``node`` that do not follow from the page table.

        The first nodes of a path may have the slots of their positions; these slots are left out.
        """
        path = [self.nodes[index] for index in self.path(node)]
        away = next((at for at, each in enumerate(path) if not each.on_trunk), len(path))
        return [each.slot for each in path[away:] if each.slot is not None]

    def path_slots(self, node: int) -> list[int]:
        """Return the KV slots of all nodes on the path to ``node``; none if nodes have no KV."""
        slots = [self.nodes[index].slot for index in self.path(node)]
        return [slot for slot in slots if slot is not None]

    def draft(self, most: int, num_uncached: int = 0) -> Draft:
        """Return a draft of the best ``most`` nodes, depth first, the best child first.

        If nodes must not have siblings, the drafter's chain or the looked-up chain is returned,
        whichever is better. ``num_uncached``: tokens of the request whose KV the drafter lacks.
        """
        note = DraftNote(tuple(self.pass_rows), num_uncached)
        known = NO_DRAFT if self.is_tree else self.plan.draft.trunk()
        if known.survival and sum(known.survival) >= sum(node.survival for node in self.nodes):
            return replace(known, survival=[0.0] * len(known.survival), note=note)
        survival = [-node.survival for node in self.nodes]
        likely = [index for index, each in enumerate(survival) if each]
        best = sorted(likely, key=survival.__getitem__)[:most]
        children = defaultdict[int, list[int]](list)
        for node in reversed(best):
            children[self.nodes[node].parent].append(node)
        order, stack = list[int](), children[ROOT]
        while stack:
            order.append(node := stack.pop())
            stack += children[node]
        indices = {node: at for at, node in enumerate(order)} | {ROOT: -1}
        parents = [indices[self.nodes[node].parent] for node in order]
        return Draft(
            token_ids=[self.nodes[node].token_id for node in order],
            sources=tuple([self.nodes[node].source for node in order]),
            parents=() if parents == list(range(-1, len(order) - 1)) else parents,
            survival=[self.nodes[node].own_survival for node in order],
            note=note,
        )

    def judge(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Learn from the tokens that the target chose.

        Returns a (KV slot, slot of the position) pair for each accepted node that has KV.
        """
        found, node = list[tuple[int, int]](), ROOT
        for at, token_id in enumerate(token_ids, len(self.scheduled.tokens)):
            ranking, children = self.rankings.get(node), self.at(node).children
            right = next((i for i in children if self.nodes[i].token_id == token_id), None)
            if ranking is not None and ranking.scores:
                rank = ranking.ranked.index(right) if right in ranking.ranked else None
                self.gap_model.learn(ranking.scores, rank)
            if right is None:
                break
            node, slot = right, self.nodes[right].slot
            if slot is not None:
                (home,) = table_slots(self.scheduled, at, 1, self.page_size)
                found.append((slot, home))
        return found


TreeNodes: TypeAlias = Sequence[tuple[TreeGrowth, int]]
"""Nodes of trees; ROOT is the last token of a request."""

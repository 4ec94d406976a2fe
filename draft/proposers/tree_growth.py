"""TreeGrowth: a draft tree as a model grows it, the nodes that survive most likely first.

The *survival* of a node is the chance that it and all before it come true. A `GapModel` says how
likely each of the best tokens behind a node is.

A tree may begin with tokens that were looked up. Where the drafter guesses the same token, the
greater survival holds; where it guesses others, the less likely side has what the other one leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from ...core.execution.step_layout import spare_slots, table_slots
from ...core.interface.draft import NO_DRAFT, Draft, DraftPlan
from ...core.interface.plan import ScheduledRequest
from ...core.sampling.verifier import Best
from ..control.outcome import DraftNote
from .gap_model import GapModel

MOST_EXPANDED = 6  # nodes of one tree that a pass computes
ROOT = -1  # the last of the request's tokens
ANY_LEVEL = 1 << 30


@dataclass(slots=True)
class _Node:
    """A token that may be drafted."""

    token_id: int
    parent: int
    level: int  # 1 for those behind the request's last token
    source: str
    survival: float  # the chance that it and all before it come true
    own_survival: float  # the same, as the drafter alone would say; 0: it found other tokens
    is_first: bool  # whether it and all before it lie in the slots of their positions
    children: list[int] = field(default_factory=list)
    is_open: bool = False  # a pass computes it, or has
    slot: int | None = None  # of its KV, if the drafter keeps any


class _Ranking(NamedTuple):
    """The tokens that a pass found behind a node."""

    ranked: list[int]  # nodes, the best first
    scores: tuple[float, ...]  # of these; none where a token was drawn alone


class Growing(NamedTuple):
    """Nodes that may be computed together, each behind those before it on its path.

    ``followers``: what the node that is expected behind each brings beyond the price of its keys;
    where levels are computed one by one, behind the best of those that it leads to.
    """

    nodes: list[int]
    followers: list[float]


@dataclass(slots=True, eq=False)
class TreeGrowth:
    """One request's draft as it grows.

    A chain where the request has no spare page. `StepTrees` decides which nodes pay for their rows.
    ``source``: the drafter's name. ``page_size``: of its pool, where the KV of nodes lies; 0 if it
    keeps none. ``most_levels``: tokens of a path at most.
    """

    scheduled: ScheduledRequest
    gap_model: GapModel
    source: str
    page_size: int = 0
    most_levels: int = ANY_LEVEL
    nodes: list[_Node] = field(default_factory=list)
    rankings: dict[int, _Ranking] = field(default_factory=dict)  # by expanded node, ROOT among them
    pass_rows: list[int] = field(default_factory=list)  # of each level computed, one after another
    plan: DraftPlan = field(init=False)
    _root: _Node = field(init=False)
    _spare: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.plan = self.scheduled.draft_plan
        # What follows a node of the last level could not be verified, and has no slot.
        self.most_levels = min(self.most_levels, self.plan.max_draft)
        self._root = _Node(self.scheduled.tokens[-1], ROOT, 0, "", 1.0, 1.0, is_first=True)
        self._spare = spare_slots(self.scheduled, self.page_size)[::-1]
        if self.is_tree and self.plan.draft.survival:
            self._begin_with(self.plan.draft)

    def _begin_with(self, known: Draft) -> None:
        """The tokens that were looked up."""
        parents = known.parents or range(-1, len(known.token_ids) - 1)
        fields = (known.token_ids, parents, known.sources, known.survival)
        for token_id, parent, source, survival in zip(*fields, strict=True):
            self._add(token_id, parent, source, survival, 0.0)

    def _add(
        self, token_id: int, parent: int, source: str, survival: float, own_survival: float
    ) -> int:
        before, index = self.at(parent), len(self.nodes)
        is_first = before.is_first and not any(self.nodes[i].is_first for i in before.children)
        self.nodes.append(
            _Node(token_id, parent, before.level + 1, source, survival, own_survival, is_first)
        )
        before.children.append(index)
        return index

    def at(self, node: int) -> _Node:
        """Return a node, or what stands for the request's last token."""
        return self._root if node == ROOT else self.nodes[node]

    @property
    def is_tree(self) -> bool:
        """Whether nodes may have siblings."""
        return bool(len(self.scheduled.spare_page_ids))

    @property
    def wants_best(self) -> bool:
        """Whether the best few tokens behind a node are wanted, with their scores.

        A known chain is compared with the grown one by survival, which needs scores.
        """
        return bool(self.plan.row_prices or self.is_tree or self.plan.draft.survival)

    def expand(self, node: int, best: Best) -> None:
        """Note what a pass found behind ``node``."""
        if not best.token_ids:
            return
        if node == ROOT:
            self.pass_rows.append(1)
        before = self.at(node)
        known = {self.nodes[index].token_id: index for index in before.children}
        chances = self.gap_model.chances(best.scores) if best.scores else [1.0]
        kept = len(chances) if self.is_tree else 1
        ranked = []
        for rank, (token_id, chance) in enumerate(zip(best.token_ids, chances, strict=True)):
            survival, own = before.survival * chance, before.own_survival * chance
            if token_id in known:
                same = self.nodes[known[token_id]]
                same.survival, same.own_survival = max(same.survival, survival), own
                ranked.append(known[token_id])
            else:
                survival, own = (survival, own) if rank < kept else (0.0, 0.0)
                ranked.append(self._add(token_id, node, self.source, survival, own))
        self.rankings[node] = _Ranking(ranked, best.scores)
        if known:
            self._share(before, set(known.values()), set(ranked))

    def _share(self, before: _Node, known: set[int], ranked: set[int]) -> None:
        """Give the less likely side of tokens looked up and others what the likelier leaves."""
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
        """The nodes worth expanding: their children may be among the best of the step.

        ``least``: what one more node must bring, beyond the price of its keys. ``level``: those of
        one level alone. The best come first, each with those before it on its path that must be
        computed, too. None before the first pass: KV of the request itself may be missing.
        """
        least, chosen, found = least + self.plan.key_price, set[int](), list[Growing]()
        if ROOT not in self.rankings:
            return found
        if len(self.nodes) >= self.plan.max_draft:
            survival = sorted((node.survival for node in self.nodes), reverse=True)
            least = max(least, survival[self.plan.max_draft - 1])
        left = self._left()
        if level is not None:
            for index in range(len(self.nodes) - 1, -1, -1):  # what lies behind must be reached
                parent = self.nodes[index].parent
                if parent != ROOT:
                    left[parent] = max(left[parent], left[index])
        worth = [index for index, chance in enumerate(left) if chance > least]
        for index in sorted(worth, key=lambda each: -left[each]):
            node = self.nodes[index]
            if node.is_open or level not in (None, node.level) or not self._can_open(node):
                continue
            path = [i for i in self.path(index) if not self.nodes[i].is_open and i not in chosen]
            fits = 0 < len(path) <= MOST_EXPANDED - len(chosen)
            if fits and (level is None or path == [index]):
                chosen.update(path)
                chance, price = self.gap_model.mean_best, self.plan.key_price
                found.append(Growing(path, [chance * left[each] - price for each in path]))
        return found

    def _left(self) -> list[float]:
        """The chance that each node comes true and no token is known for what follows it."""
        left = [node.survival for node in self.nodes]
        for node in self.nodes:
            if node.parent != ROOT:
                left[node.parent] -= node.survival
        return [
            0.0 if node.is_open else chance for node, chance in zip(self.nodes, left, strict=True)
        ]

    def _can_open(self, node: _Node) -> bool:
        has_slot = node.is_first or not self.page_size or bool(self._spare)
        return has_slot and node.level < self.most_levels

    def open(self, nodes: Sequence[int]) -> list[int]:
        """Give nodes of the frontier slots for their KV; returns those that are computed."""
        for index in nodes:
            node = self.nodes[index]
            is_reached = node.parent == ROOT or self.nodes[node.parent].is_open
            node.is_open = is_reached and self._can_open(node)
            if not node.is_open or not self.page_size:
                continue
            if node.is_first:
                at = len(self.scheduled.tokens) + node.level - 1
                (node.slot,) = table_slots(self.scheduled, at, 1, self.page_size)
            else:
                node.slot = self._spare.pop()
        opened = [index for index in nodes if self.nodes[index].is_open]
        if opened:
            self.pass_rows.append(len(opened))
        return opened

    def worths(self) -> list[float]:
        """Return what each of the best ``max_draft`` nodes brings beyond the price of its keys.

        The greatest first.
        """
        price = self.plan.key_price
        found = [node.survival - price for node in self.nodes if node.survival]
        return sorted(found, reverse=True)[: self.plan.max_draft]

    def path(self, node: int) -> list[int]:
        """The nodes from the first level down to ``node``."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]

    def tail(self, node: int) -> list[int]:
        """Token ids down to ``node``."""
        return [self.nodes[index].token_id for index in self.path(node)]

    def slots(self, node: int) -> list[int]:
        """Slots of the nodes on the path to ``node`` from the first on that is not at home."""
        path = [self.nodes[index] for index in self.path(node)]
        away = next((at for at, each in enumerate(path) if not each.is_first), len(path))
        return [each.slot for each in path[away:] if each.slot is not None]

    def path_slots(self, node: int) -> list[int]:
        """Slots of all nodes on the path to ``node``, where the drafter keeps their KV."""
        slots = [self.nodes[index].slot for index in self.path(node)]
        return [slot for slot in slots if slot is not None]

    def draft(self, most: int, num_uncached: int = 0) -> Draft:
        """The best ``most`` nodes, depth first, the best child first.

        Where there is room for a chain alone: the better of the drafter's and the one looked up.
        """
        note = DraftNote(tuple(self.pass_rows), num_uncached)
        known = NO_DRAFT if self.is_tree else self.plan.draft.trunk()
        if known.survival and sum(known.survival) >= sum(node.survival for node in self.nodes):
            return replace(known, survival=[0.0] * len(known.survival), note=note)
        likely = [index for index, node in enumerate(self.nodes) if node.survival]
        best = sorted(likely, key=lambda index: -self.nodes[index].survival)[:most]
        kept, order = set(best), list[int]()
        stack = self._kept_children(self._root, kept)
        while stack:
            order.append(node := stack.pop())
            stack += self._kept_children(self.nodes[node], kept)
        indices = {node: at for at, node in enumerate(order)} | {ROOT: -1}
        parents = [indices[self.nodes[node].parent] for node in order]
        return Draft(
            token_ids=[self.nodes[node].token_id for node in order],
            sources=tuple(self.nodes[node].source for node in order),
            parents=() if parents == list(range(-1, len(order) - 1)) else parents,
            survival=[self.nodes[node].own_survival for node in order],
            note=note,
        )

    def _kept_children(self, node: _Node, kept: set[int]) -> list[int]:
        """The least likely first, for a stack."""
        children = [child for child in node.children if child in kept]
        return sorted(children, key=lambda child: self.nodes[child].survival)

    def judge(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Learn from the tokens that the target chose.

        Returns (slot of its KV, slot that its position has) of each of these that was computed.
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
"""Nodes of trees, ROOT for the last of a request's tokens."""

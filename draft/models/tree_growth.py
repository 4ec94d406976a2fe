"""TreeGrowth: a draft tree as a model grows it, best nodes first, by the gaps of Gumbel scores.

A drafter knows the noise with which the target will choose, so it knows how close its own choice
was. Of its best tokens, with scores s_0 >= s_1 >= ... and gaps d_j = s_0 - s_j, the target takes
rank j with the chance

    e^(-B d_j) / (sum_l e^(-B d_l) + e^(a - b d_1)),

and none of them otherwise. Looking at the noise is harmless where the verifier's token does not
depend on drafts. B, a and b are fitted as positions are judged.

A tree may begin with tokens that were looked up. Where the drafter guesses the same token, the
better odds hold; where it guesses others, the less likely side has what the other one leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from msgspec.structs import replace
from torch import Tensor

from ...core.execution.step_layout import spare_slots, table_slots
from ...core.interface.draft import NO_DRAFT, Draft, DraftPlan
from ...core.interface.plan import ScheduledRequest
from ...core.sampling.logits_processors import SampleRow
from ...core.sampling.rejection import SampledDraft, draw
from ...core.sampling.sampler import Columns, Sampler
from ...core.sampling.verifier import Best, SampledToken
from ..control.outcome import DraftNote

NUM_BEST = 4  # tokens behind a node that may become its children
MOST_EXPANDED = 6  # nodes of one tree that a pass computes
ROOT = -1  # the last of the request's tokens
MAX_GAP = 8.0  # that one judged position may claim
RATE = 0.02  # of a gradient step
LEAST = 0.05  # of B and b


class GapModel:
    """Which of a place's best tokens the target takes, by their scores: three fitted numbers.

    One for each drafter, for greedy and for sampled requests. The question comes up while a draft
    grows; those asked before it are in draft/control/estimators.py.
    """

    def __init__(self, falloff: float, rest: float, slope: float) -> None:
        self.falloff, self.rest, self.slope = falloff, rest, slope
        self.mean_best = 0.7  # chance of the best token of a place, lately

    def chances(self, scores: Sequence[float]) -> list[float]:
        """That the target takes each of a place's best tokens, by their falling ``scores``."""
        weights, rest = self._weights(scores)
        total = sum(weights) + rest
        return [weight / total for weight in weights]

    def learn(self, scores: Sequence[float], rank: int | None) -> None:
        """The target took the token of that rank, or (None) another: a step down the log loss."""
        if len(scores) < 2:
            return
        weights, rest = self._weights(scores)
        total = sum(weights) + rest
        self.mean_best += RATE * (weights[0] / total - self.mean_best)
        errors = [weight / total - (index == rank) for index, weight in enumerate(weights)]
        rest_error = rest / total - (rank is None)
        gaps = [min(MAX_GAP, scores[0] - score) for score in scores]
        self.falloff += RATE * sum(error * gap for error, gap in zip(errors, gaps, strict=True))
        self.rest -= RATE * rest_error
        self.slope += RATE * rest_error * gaps[1]
        self.falloff, self.slope = max(LEAST, self.falloff), max(LEAST, self.slope)

    def _weights(self, scores: Sequence[float]) -> tuple[list[float], float]:
        gaps = [scores[0] - score for score in scores]
        second = gaps[1] if len(gaps) > 1 else math.inf
        rest = math.exp(self.rest - self.slope * second)
        return [math.exp(-self.falloff * gap) for gap in gaps], rest


def default_gap_models() -> dict[bool, GapModel]:
    """Where the fit begins, by whether tokens are sampled: measured with the built-in pair."""
    return {False: GapModel(2.4, -1.0, 3.5), True: GapModel(1.6, -0.9, 1.4)}


@dataclass(slots=True)
class _Node:
    """A token that may be drafted."""

    token_id: int
    parent: int
    level: int  # 1 for those behind the request's last token
    source: str
    odds: float  # that it and all before it come true
    own_odds: float  # the same, as the drafter alone would say; 0: it found other tokens
    is_first: bool  # whether it and all before it lie in the slots of their positions
    children: list[int] = field(default_factory=list)
    is_open: bool = False  # a pass computes it, or has
    slot: int | None = None  # of its KV, if the drafter keeps any


class _Place(NamedTuple):
    """What a pass found behind a node."""

    ranked: list[int]  # nodes, the best first
    scores: tuple[float, ...]  # of these; none where a token was drawn alone


@dataclass(slots=True, eq=False)
class TreeGrowth:
    """One request's draft as it grows.

    A chain where the request has no spare page. Without prices all ``max_draft`` nodes are grown.
    ``source``: the drafter's name. ``page_size``: of its pool, where the KV of nodes lies; 0 if it
    keeps none. ``most_levels``: tokens of a path at most.
    """

    scheduled: ScheduledRequest
    gap_model: GapModel
    source: str
    page_size: int = 0
    most_levels: int = 1 << 30
    nodes: list[_Node] = field(default_factory=list)
    places: dict[int, _Place] = field(default_factory=dict)  # by expanded node, ROOT among them
    drawn_from: list[Tensor] = field(default_factory=list)  # [vocab] each, where it matters
    num_levels: int = 0  # that were computed, one after another
    plan: DraftPlan = field(init=False)
    _root: _Node = field(init=False)
    _spare: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.plan = self.scheduled.draft_plan
        self._root = _Node(self.scheduled.tokens[-1], ROOT, 0, "", 1.0, 1.0, is_first=True)
        self._spare = spare_slots(self.scheduled, self.page_size)[::-1]
        if self.is_tree and self.plan.draft.odds:
            self._begin_with(self.plan.draft)

    def _begin_with(self, known: Draft) -> None:
        """The tokens that were looked up."""
        parents = known.parents or range(-1, len(known.token_ids) - 1)
        columns = (known.token_ids, parents, known.sources, known.odds)
        for token_id, parent, source, odds in zip(*columns, strict=True):
            self._add(token_id, parent, source, odds, 0.0)

    def _add(self, token_id: int, parent: int, source: str, odds: float, own_odds: float) -> int:
        before, index = self._at(parent), len(self.nodes)
        is_first = before.is_first and not any(self.nodes[i].is_first for i in before.children)
        self.nodes.append(
            _Node(token_id, parent, before.level + 1, source, odds, own_odds, is_first)
        )
        before.children.append(index)
        return index

    def _at(self, node: int) -> _Node:
        return self._root if node == ROOT else self.nodes[node]

    @property
    def is_tree(self) -> bool:
        """Whether nodes may have siblings."""
        return bool(len(self.scheduled.spare_page_ids))

    @property
    def wants_best(self) -> bool:
        """Whether the best few tokens of a place are wanted, with their scores.

        A known chain is compared with the grown one by odds, which need scores.
        """
        return bool(self.plan.row_price or self.is_tree or self.plan.draft.odds)

    def expand(self, node: int, best: Best) -> None:
        """Note what a pass found behind ``node``."""
        if not best.token_ids:
            return
        self.num_levels += node == ROOT
        before = self._at(node)
        known = {self.nodes[index].token_id: index for index in before.children}
        chances = self.gap_model.chances(best.scores) if best.scores else [1.0]
        kept = len(chances) if self.is_tree else 1
        ranked = []
        for rank, (token_id, chance) in enumerate(zip(best.token_ids, chances, strict=True)):
            odds, own_odds = before.odds * chance, before.own_odds * chance
            if token_id in known:
                same = self.nodes[known[token_id]]
                same.odds, same.own_odds = max(same.odds, odds), own_odds
                ranked.append(known[token_id])
            else:
                odds, own_odds = (odds, own_odds) if rank < kept else (0.0, 0.0)
                ranked.append(self._add(token_id, node, self.source, odds, own_odds))
        self.places[node] = _Place(ranked, best.scores)
        if known:
            self._share(before, set(known.values()), set(ranked))

    def _share(self, before: _Node, known: set[int], ranked: set[int]) -> None:
        """Of tokens looked up and others, the less likely have what the likeliest side leaves."""
        if before.odds <= 0.0:
            return
        foreign, own = known - ranked, ranked - known
        side = max(known | ranked, key=lambda index: self.nodes[index].odds)
        losers, winners = (own, known) if side in foreign else (foreign, ranked)
        left = 1.0 - sum(self.nodes[index].odds for index in winners) / before.odds
        for index in losers:
            self._scale(index, max(0.0, left))

    def _scale(self, node: int, factor: float) -> None:
        self.nodes[node].odds *= factor
        for child in self.nodes[node].children:
            self._scale(child, factor)

    def frontier(self, level: int | None = None) -> list[int]:
        """The nodes worth expanding: their children may be among the best, above a row's price.

        A node comes behind those before it on its path. ``level``: those of one level alone.
        """
        least, chosen = self._least(), list[int]()
        left = [self._left(node) for node in self.nodes]
        if level is not None:
            for index in range(len(self.nodes) - 1, -1, -1):  # what lies behind must be reached
                parent = self.nodes[index].parent
                if parent != ROOT:
                    left[parent] = max(left[parent], left[index])
        for index in sorted(range(len(left)), key=lambda each: -left[each]):
            node = self.nodes[index]
            if left[index] <= least:
                break
            if node.is_open or level not in (None, node.level) or not self._can_open(node):
                continue
            path = [i for i in self.path(index) if not self.nodes[i].is_open and i not in chosen]
            if len(chosen) + len(path) <= MOST_EXPANDED and (level is None or path == [index]):
                chosen += path
        return chosen

    def _left(self, node: _Node) -> float:
        """The chance that the node comes true and no token is known for what follows it."""
        if node.is_open:
            return 0.0
        return node.odds - sum(self.nodes[child].odds for child in node.children)

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
        self.num_levels += bool(opened)
        return opened

    def _least(self) -> float:
        """The odds that one more node must exceed."""
        odds = sorted((node.odds for node in self.nodes if node.odds), reverse=True)
        if len(odds) < self.plan.max_draft:
            return self.plan.row_price
        return max(self.plan.row_price, odds[self.plan.max_draft - 1])

    def expected_gain(self, frontier: Sequence[int]) -> float:
        """Tokens that a pass over these nodes would bring, beyond the price of their rows."""
        mean_best, price = self.gap_model.mean_best, self.plan.row_price
        return sum(max(0.0, mean_best * self._left(self.nodes[node]) - price) for node in frontier)

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

    def draft(self, num_uncached: int = 0) -> Draft:
        """The best ``max_draft`` nodes above a row's price, depth first, the best child first.

        Where there is room for a chain alone: the better of the drafter's and the one looked up.
        """
        note = DraftNote(self.num_levels, num_uncached)
        known = NO_DRAFT if self.is_tree else self.plan.draft.trunk()
        if known.odds and sum(known.odds) >= sum(node.odds for node in self.nodes):
            return replace(known, odds=[0.0] * len(known.odds), note=note)
        worthy = [i for i, node in enumerate(self.nodes) if node.odds > self.plan.row_price]
        best = sorted(worthy, key=lambda index: -self.nodes[index].odds)[: self.plan.max_draft]
        kept, order = set(best), list[int]()
        stack = self._kept_children(self._root, kept)
        while stack:
            order.append(node := stack.pop())
            stack += self._kept_children(self.nodes[node], kept)
        places = {node: at for at, node in enumerate(order)} | {ROOT: -1}
        parents = [places[self.nodes[node].parent] for node in order]
        draft = Draft(
            token_ids=[self.nodes[node].token_id for node in order],
            sources=tuple(self.nodes[node].source for node in order),
            parents=() if parents == list(range(-1, len(order) - 1)) else parents,
            odds=[self.nodes[node].own_odds for node in order],
            note=note,
        )
        if self.drawn_from and order:
            probs = torch.stack(self.drawn_from[: len(order)])
            return SampledDraft(draft.token_ids, draft.sources, note=note, probs=probs)
        return draft

    def _kept_children(self, node: _Node, kept: set[int]) -> list[int]:
        """The least likely first, for a stack."""
        children = [child for child in node.children if child in kept]
        return sorted(children, key=lambda child: self.nodes[child].odds)

    def judge(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Learn from the tokens that the target chose.

        Returns (slot of its KV, slot that its position has) of each of these that was computed.
        """
        found, node = list[tuple[int, int]](), ROOT
        for at, token_id in enumerate(token_ids, len(self.scheduled.tokens)):
            place, children = self.places.get(node), self._at(node).children
            right = next((i for i in children if self.nodes[i].token_id == token_id), None)
            if place is not None and place.scores:
                rank = place.ranked.index(right) if right in place.ranked else None
                self.gap_model.learn(place.scores, rank)
            if right is None:
                break
            node, slot = right, self.nodes[right].slot
            if slot is not None:
                (home,) = table_slots(self.scheduled, at, 1, self.page_size)
                found.append((slot, home))
        return found


# -- several requests ------------------------------------------------------------------------------

Places: TypeAlias = Sequence[tuple[TreeGrowth, int]]
"""Nodes of trees, ROOT for the last of a request's tokens."""


def frontiers(
    trees: Sequence[TreeGrowth], level: int | None = None, *, takes_pass: bool = True
) -> list[list[int]]:
    """What to compute next of each tree; nothing where a pass for it would not pay for itself."""
    found = [tree.frontier(level) for tree in trees]
    growing = [(tree, nodes) for tree, nodes in zip(trees, found, strict=True) if nodes]
    price = max((tree.plan.pass_price for tree, _ in growing), default=0.0)
    is_worth = (
        not (price and takes_pass)
        or sum(tree.expected_gain(nodes) for tree, nodes in growing) > price
    )
    return found if is_worth else [[] for _ in trees]


def sample_rows(places: Places, num_ahead: int = 0) -> list[SampleRow]:
    """What the logits behind each node decide."""
    return [
        SampleRow(tree.scheduled.tokens, tree.scheduled.sampling, tree.tail(node), num_ahead)
        for tree, node in places
    ]


def choose(
    places: Places,
    logits: Tensor,
    rows: Sequence[SampleRow],
    sampler: Sampler,
    *,
    independent: bool = False,
    temperature_scale: float = 1.0,
    columns: Columns | None = None,
) -> list[Best]:
    """What may follow each node, by its logits; nothing where these are not sound.

    By the target's own sampler, or ``independent``, as rejection sampling wants it. ``columns``:
    the tokens of the logits' columns, unless they are the vocabulary.
    """
    wants_best = not independent and any(tree.wants_best for tree, _ in places)
    if wants_best:
        return sampler.best(
            logits, rows, NUM_BEST, temperature_scale=temperature_scale, columns=columns
        )
    if columns is not None and not independent:
        first = sampler.best(logits, rows, 1, temperature_scale=temperature_scale, columns=columns)
        return [Best(each.token_ids, (), each.error) for each in first]
    logits = logits.float() if columns is None else columns.widened(logits)
    if independent:
        choices, drawn_from = draw(logits, rows)
        for (tree, _), probs in zip(places, drawn_from, strict=True):
            tree.drawn_from.append(probs)
        return drawn_alone(choices)
    return drawn_alone(sampler.sample(logits, rows, temperature_scale=temperature_scale))


def drawn_alone(choices: Sequence[SampledToken]) -> list[Best]:
    """Tokens that were drawn alone, without others to compare them with."""
    return [Best((each.token_id,) if each.error is None else (), ()) for each in choices]

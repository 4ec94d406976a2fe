"""The loop by which all drafters grow trees, over passes that are looked up in a table."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest
from typing_extensions import override

from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.sampling.sampler import TorchSampler
from foretoken.core.sampling.verifier import Best
from foretoken.draft.control.outcome import NUM_BEST
from foretoken.draft.proposers.gap_model import default_gap_models
from foretoken.draft.proposers.tree_grower import Opened, TreeGrower
from foretoken.draft.proposers.tree_growth import ROOT, TreeGrowth, TreeNodes

MAX_DRAFT = 5


def best_behind(request_id: str, path: Sequence[int]) -> Best:
    """Look up the best tokens behind a path of a request, and their scores."""
    rng = random.Random(repr((request_id, list(path))))
    scores = sorted((rng.uniform(0.0, 2.0) for _ in range(NUM_BEST)), reverse=True)
    return Best(tuple(rng.sample(range(1000), NUM_BEST)), tuple(scores))


class TableGrower(TreeGrower):
    """Looks up what follows nodes, and notes how many nodes of which levels each pass has."""

    def __init__(self, tokens_per_pass: int) -> None:
        super().__init__("table", TorchSampler(), page_size=0, tokens_per_pass=tokens_per_pass)
        self.passes = list[list[int]]()
        self._computed = set[tuple[TreeGrowth, int]]()

    @override
    def compute(self, nodes: TreeNodes) -> Opened:
        for tree, node in nodes:
            assert (
                node == ROOT
                or tree.nodes[node].parent == ROOT
                or ((tree, tree.nodes[node].parent) in self._computed | set(nodes))
            ), "a node stands behind one that was computed"
        self._computed |= set(nodes)
        self.passes.append([tree.at(node).level for tree, node in nodes])
        behind = [best_behind(tree.scheduled.request_id, tree.tail(node)) for tree, node in nodes]
        return Opened(nodes, behind)


def drafted(grower: TreeGrower, *request_ids: str, **prices: object) -> list[Draft]:
    trees = [grower.tree(row_of(request_id, **prices)) for request_id in request_ids]
    grower.grow(trees, grower.compute([(tree, ROOT) for tree in trees]))
    return grower.drafts(trees)


def row_of(request_id: str, **prices: object) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request_id,
        tokens=array("q", range(6)),
        start=5,
        stop=6,
        page_ids=array("q", range(20)),
        sampling=SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=1),
        draft_plan=DraftPlan(max_draft=MAX_DRAFT, may_branch=True, **prices),  # type: ignore[arg-type]
        spare_page_ids=array("q", range(50, 53)),
    )


def best_paths(request_id: str) -> set[tuple[int, ...]]:
    """Return the likeliest paths of the whole tree, as deep as a draft may be."""
    model, level = default_gap_models()[True], [((), 1.0)]
    found = dict[tuple[int, ...], float]()
    for _ in range(MAX_DRAFT):
        deeper = []
        for path, survival in level:
            best = best_behind(request_id, path)
            chances = model.chances(best.scores)
            pairs = zip(best.token_ids, chances, strict=True)
            deeper += [((*path, token_id), survival * chance) for token_id, chance in pairs]
        found |= dict(deeper)
        level = deeper
    return set(sorted(found, key=lambda path: -found[path])[:MAX_DRAFT])


def paths_of(draft: Draft) -> set[tuple[int, ...]]:
    nodes = range(len(draft.token_ids))
    return {tuple(draft.token_ids[each] for each in draft.path(node)) for node in nodes}


@pytest.mark.parametrize("tokens_per_pass", [0, 1, 3])
def test_the_likeliest_nodes_are_drafted_however_passes_go_through_the_levels(
    tokens_per_pass: int,
) -> None:
    requests = [str(number) for number in range(20)]
    drafts = drafted(TableGrower(tokens_per_pass), *requests)
    assert [paths_of(draft) for draft in drafts] == [best_paths(each) for each in requests]
    assert len({draft.height for draft in drafts}) > 1


def test_a_drafter_of_levels_computes_one_level_after_another() -> None:
    grower = TableGrower(1)
    drafted(grower, "a", "b")
    assert [set(levels) for levels in grower.passes] == [{n} for n in range(len(grower.passes))]


def test_levels_of_one_pass_are_grown_though_no_other_pass_pays() -> None:
    dear = {"row_prices": (0.0,), "pass_prices": (100.0,)}
    for tokens_per_pass, num_levels in ((0, 1), (1, 1), (2, 2), (3, 3)):
        grower = TableGrower(tokens_per_pass)
        drafted(grower, "a", "b", **dear)
        assert len(grower.passes) == num_levels

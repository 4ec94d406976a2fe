"""Trees of a step: their nodes share the rows of the target's pass and of the drafter's."""

from __future__ import annotations

from array import array

from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.sampling.verifier import Best
from foretoken.draft.proposers.gap_model import default_gap_models
from foretoken.draft.proposers.step_trees import StepTrees
from foretoken.draft.proposers.tree_growth import ROOT, TreeGrowth

CLEAR = Best((1, 2, 3, 4), (9.0, 5.0, 4.0, 3.0))
CLOSE = Best((5, 6, 7, 8), (3.0, 2.9, 2.0, 1.5))
FREE = (0.0,)


def tree_of(found: Best, **plan: object) -> TreeGrowth:
    """Return a tree of which one pass has ``found`` what may follow."""
    scheduled = ScheduledRequest(
        request_id="a",
        tokens=array("q", range(6)),
        start=5,
        stop=6,
        page_ids=array("q", range(20)),
        sampling=SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=1),
        draft_plan=DraftPlan(max_draft=6, may_branch=True, **plan),  # type: ignore[arg-type]
        spare_page_ids=array("q", range(50, 53)),
    )
    tree = TreeGrowth(scheduled, default_gap_models()[True], "lm", 4)
    tree.expand(ROOT, found)
    return tree


def num_drafted(*trees: TreeGrowth) -> list[int]:
    return [len(draft.token_ids) for draft in StepTrees(trees).drafts()]


def num_opened(*trees: TreeGrowth) -> list[int]:
    return [len(nodes) for nodes in StepTrees(trees).frontiers()]


def test_the_likeliest_nodes_of_all_trees_take_the_rows_that_cost_nothing() -> None:
    tile = (0.0, 0.0, 0.0, 5.0)  # three rows are free, the fourth opens a tile
    for _ in range(2):
        assert num_drafted(tree_of(CLEAR, row_prices=tile), tree_of(CLOSE, row_prices=tile)) == [
            1,
            2,
        ]
    assert num_drafted(tree_of(CLOSE, row_prices=tile)) == [3], "alone it has all of them"


def test_nodes_of_several_trees_open_a_tile_together_that_none_would_alone() -> None:
    tile = (0.0, 0.8, 0.8, 9.0)  # the second row opens a tile of two
    alone = tree_of(CLOSE, row_prices=tile)
    second, third = (alone.nodes[at].survival for at in (1, 2))
    assert second + third < 0.8
    assert num_drafted(alone) == [1]
    assert num_drafted(*(tree_of(CLEAR, row_prices=tile) for _ in range(3))) == [1, 1, 1]


def test_a_node_of_a_longer_request_must_bring_more() -> None:
    near, far = (tree_of(CLOSE, row_prices=FREE, key_price=price) for price in (0.0, 0.3))
    assert far.nodes[1].survival > 0.3 > far.nodes[2].survival
    assert num_drafted(near, far) == [4, 2]
    assert num_opened(near, far)[0] > num_opened(near, far)[1] == 2


def test_a_node_is_computed_if_its_row_of_the_pass_pays() -> None:
    def opened(*passes: float) -> list[int]:
        trees = (tree_of(found, row_prices=FREE, pass_prices=passes) for found in (CLEAR, CLOSE))
        return num_opened(*trees)

    assert opened(0.0, 0.0, 9.0) == [1, 1], "the surest of each"
    assert opened(0.0, 9.0) == [1, 0]
    assert sum(opened(0.0)) > 4
    assert opened(9.0) == [0, 0]


def test_level_by_level_a_sure_known_chain_is_computed_to_its_tip() -> None:
    known = Draft(array("q", [9, 10, 11]), ("suffix",) * 3, survival=(0.95, 0.93, 0.9))
    prices = {"row_prices": (0.05, 0.1), "pass_prices": (0.2, 0.2)}
    tree = tree_of(CLOSE, draft=known, **prices)
    for level in (1, 2, 3):
        (nodes,) = StepTrees([tree]).frontiers(level)
        assert [tree.nodes[node].token_id for node in nodes] == [8 + level]
        for node in tree.open(nodes):
            tree.expand(node, Best((8 + level + 1, 1), (5.0, 1.0)))


def test_a_tree_without_prices_is_grown_whole_beside_others() -> None:
    dear = (9.0,) * 6
    weighed = tree_of(CLEAR, row_prices=dear, pass_prices=dear)
    assert num_drafted(weighed, tree_of(CLEAR)) == [0, 4]
    assert num_opened(weighed, tree_of(CLEAR)) == [0, 4]

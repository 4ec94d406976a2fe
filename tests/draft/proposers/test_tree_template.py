"""Templates: nodes of a tree that are computed before their tokens are known."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import pytest

from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.ops.batch import MOST_DRAWN_ROWS
from foretoken.core.sampling.verifier import Best
from foretoken.draft.control.outcome import NUM_BEST, DraftNote
from foretoken.draft.proposers.gap_model import default_gap_models
from foretoken.draft.proposers.step_trees import StepTrees
from foretoken.draft.proposers.tree_growth import MOST_EXPANDED, ROOT, TreeGrowth
from foretoken.draft.proposers.tree_template import (
    KNOWN,
    ExpectedTree,
    TemplateRow,
    assign_rows,
    expected_tree,
    note_rows,
)

PAGE_SIZE, NUM_TOKENS, NUM_SPARE = 4, 6, 3
Passes = Sequence[Sequence[TemplateRow]]
FREE: dict[str, Any] = {"row_prices": (0.01,), "pass_prices": (0.01, 0.011)}
FAILED = Best((), (), "not finite")


def row_of(
    request_id: str, max_draft: int = 8, num_spare: int = NUM_SPARE, **plan: Any
) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request_id,
        tokens=array("q", range(NUM_TOKENS)),
        start=NUM_TOKENS - 1,
        stop=NUM_TOKENS,
        page_ids=array("q", range(20)),
        sampling=SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=1),
        draft_plan=DraftPlan(max_draft=max_draft, may_branch=True, **plan),
        spare_page_ids=array("q", range(50, 50 + num_spare)),
    )


def tree_of(row: ScheduledRequest) -> TreeGrowth:
    model = default_gap_models()[True]
    model.rounded_chances = (0.9, 0.3, 0.1, 0.05)  # sure enough for several passes ahead
    return TreeGrowth(row, model, "lm", PAGE_SIZE)


def best_after(tree: TreeGrowth, path: Sequence[int]) -> Best:
    """Look up the best tokens after a path of a request; few tokens, so that look-ups meet them."""
    rng = random.Random(repr((tree.scheduled.request_id, list(path))))
    scores = sorted((rng.uniform(0.0, 3.0) for _ in range(NUM_BEST)), reverse=True)
    return Best(tuple(rng.sample(range(6), NUM_BEST)), tuple(scores))


def known_draft(request_id: str, trust: float) -> Draft:
    """A looked-up tree of two branches, whose survival is scaled by ``trust``."""
    rng = random.Random(request_id)
    first, second = rng.sample(range(6), 2)
    chain = [first, *(rng.randrange(6) for _ in range(3)), second]
    survival = [trust * chance for chance in (0.8, 0.7, 0.65, 0.6, 0.1)]
    rng.shuffle(chain[1:4])
    return Draft(chain, ("suffix",) * 5, [-1, 0, 1, 2, -1], survival)


def begun(trees: Sequence[TreeGrowth]) -> tuple[list[TemplateRow], Passes]:
    roots = [TemplateRow(tree, 0, node=ROOT, index=at) for at, tree in enumerate(trees)]
    return roots, StepTrees(trees).template({row.tree: row for row in roots})


def read(rows: Sequence[TemplateRow], failed: Sequence[int] = ()) -> None:
    """Read a pass; the rows at the indices ``failed`` find nothing."""
    note_rows(rows)
    for at, row in enumerate(rows):
        found = FAILED if at in failed else best_after(row.tree, token_path(row))
        row.read(found)


def token_path(row: TemplateRow) -> list[int]:
    """Return the tokens that a device would have computed the row with; garbage if it has none."""
    if row.rank == KNOWN:
        return [] if row.node == ROOT else row.tree.tail(row.node or 0)
    assert row.parent is not None
    before = token_path(row.parent)
    return [*before, best_after(row.tree, before).token_ids[row.rank]]


def grow(trees: Sequence[TreeGrowth]) -> list[Draft]:
    """Grow by templates until no pass pays, as `DecoderGrower` does."""
    roots, passes = begun(trees)
    read(roots)
    while passes:
        for rows in passes:
            read(rows)
        passes = StepTrees(trees).template({})
    return StepTrees(trees).drafts()


def by_loop(of: TreeGrowth) -> TreeGrowth:
    """Compute the same nodes in a new tree, one after another, as the loop does."""
    tree = tree_of(of.scheduled)
    tree.expand(ROOT, best_after(tree, []))
    paths = sorted((of.tail(node) for node in of.rankings if node != ROOT), key=len)
    for path in paths:
        (node,) = tree.open([node for node in range(len(tree.nodes)) if tree.tail(node) == path])
        tree.expand(node, best_after(tree, path))
    return tree


def plans() -> Iterator[ScheduledRequest]:
    for number in range(40):
        name = str(number)
        trust = number % 4 / 3  # none is looked up, or it is doubtful, or sure
        plan = FREE | ({"draft": known_draft(name, trust**4)} if trust else {})
        yield row_of(name, **plan)


# -- what is expected ------------------------------------------------------------------------------


def test_the_expected_tree_has_the_likeliest_paths_of_ranks() -> None:
    chances, most = (0.6, 0.25, 0.1), 12
    tree = ExpectedTree(chances, most)
    every = [prod(path) for length in range(1, 8) for path in product(chances, repeat=length)]
    assert tree.survival.tolist() == pytest.approx(sorted(every, reverse=True)[:most])
    for node, parent in enumerate(tree.parents):
        before = tree.survival[parent] if parent >= 0 else 1.0
        assert tree.survival[node] == pytest.approx(before * chances[tree.ranks[node]])
        assert tree.levels[node] == (tree.levels[parent] if parent >= 0 else 0) + 1
    assert tree.inner[most] == sorted({parent for parent in tree.parents if parent >= 0})
    assert tree.inner[1] == []


def test_equal_chances_share_one_expected_tree() -> None:
    assert expected_tree((0.5, 0.1), 6) is expected_tree((0.5, 0.1), 6)


# -- what the rows find ----------------------------------------------------------------------------


@pytest.mark.parametrize("row", [*plans()], ids=lambda row: row.request_id)
def test_a_template_drafts_what_the_loop_drafts_from_the_same_nodes(row: ScheduledRequest) -> None:
    tree = tree_of(row)
    (draft,) = grow([tree])
    loop = by_loop(tree)
    (expected,) = StepTrees([loop]).drafts()
    assert len(tree.rankings) > 2
    assert {tuple(tree.tail(n)): r.scores for n, r in tree.rankings.items()} == {
        tuple(loop.tail(n)): r.scores for n, r in loop.rankings.items()
    }
    for name in ("token_ids", "parents", "sources", "survival"):
        assert list(getattr(draft, name)) == list(getattr(expected, name))


@pytest.mark.parametrize("row", [*plans()], ids=lambda row: row.request_id)
def test_each_node_finds_its_ancestors_keys(row: ScheduledRequest) -> None:
    """Positions before a row's tail are in the pages; the tail and the slots are the path's."""
    tree = tree_of(row)
    roots, passes = begun([tree])
    read(roots)
    written: dict[int, list[int]] = {}
    while passes:
        for rows in passes:
            for each in rows:  # all rows of a pass write before any reads
                assert each.slot is not None
                path = token_path(each)
                assert written.get(each.slot, path) == path, "two nodes share a slot"
                written[each.slot] = path
            for each in rows:
                path = token_path(each)
                assert len(path) == each.level
                home = [NUM_TOKENS + at for at in range(each.level - len(each.tail))]
                for at, slot in enumerate([*home, *each.tail]):
                    assert written[slot] == path[: at + 1]
            read(rows)
        for node in range(len(tree.nodes)):  # the tree says the same
            if tree.nodes[node].is_open:
                found = tree.slots(node)
                home = [NUM_TOKENS + at for at in range(tree.nodes[node].level - len(found))]
                for at, slot in enumerate([*home, *found]):
                    assert written[slot] == tree.tail(node)[: at + 1]
        passes = StepTrees([tree]).template({})


def test_the_note_counts_every_row_that_was_computed() -> None:
    tree = tree_of(row_of("a", **FREE))
    roots, passes = begun([tree])
    for rows in (roots, *passes):
        read(rows)
    (draft,) = StepTrees([tree]).drafts()
    assert isinstance(draft.note, DraftNote)
    assert draft.note.pass_rows == (1, *map(len, passes))


def test_nothing_is_found_after_a_row_without_a_candidate() -> None:
    tree = tree_of(row_of("a", **FREE))
    roots, passes = begun([tree])
    assert len(passes) > 1
    read(roots)
    read(passes[0], failed=range(len(passes[0])))
    for rows in passes[1:]:
        read(rows)
    assert set(tree.rankings) == {ROOT}
    (draft,) = StepTrees([tree]).drafts()
    assert set(draft.depths()) == {1}


def test_a_tree_whose_first_pass_failed_is_not_grown() -> None:
    failed, other = tree_of(row_of("a", **FREE)), tree_of(row_of("b", **FREE))
    roots, passes = begun([failed, other])
    read(roots, failed=[0])
    for rows in passes:
        read(rows)
    assert not failed.rankings
    assert all(
        row.tree is other for rows in StepTrees([failed, other]).template({}) for row in rows
    )
    drafts = StepTrees([failed, other]).drafts()
    assert [bool(draft.token_ids) for draft in drafts] == [False, True]


def test_looked_up_tokens_are_rows_of_the_first_pass() -> None:
    draft = Draft((9, 10, 11), ("suffix",) * 3, survival=(0.9, 0.85, 0.8))
    tree = tree_of(row_of("a", draft=draft, **FREE))
    _, passes = begun([tree])
    known = [row for row in passes[0] if row.rank == KNOWN]
    assert [tree.nodes[row.node or 0].token_id for row in known] == [9, 10, 11]
    assert [row.source(NUM_BEST) for row in known] == [-1, -1, -1]


def test_looked_up_tokens_are_not_computed_without_the_requests_own_keys() -> None:
    draft = Draft((9, 10), ("suffix",) * 2, survival=(0.9, 0.85))
    assert StepTrees([tree_of(row_of("a", draft=draft, **FREE))]).template({}) == []


# -- how many --------------------------------------------------------------------------------------


def test_a_dear_pass_is_not_launched() -> None:
    lengths = []
    for price in (0.001, 0.2, 0.5, 5.0):
        prices: dict[str, Any] = {"row_prices": (0.01,), "pass_prices": (price, price)}
        lengths.append(len(begun([tree_of(row_of("a", **prices))])[1]))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] == 0


def test_passes_beyond_the_likely_nodes_wait_for_a_read() -> None:
    lengths = []
    for chance in (0.4, 0.75, 0.9):
        tree = tree_of(row_of("a", **FREE))
        tree.gap_model.rounded_chances = (chance, 0.05)
        lengths.append(len(begun([tree])[1]))
    assert lengths == [1, 2, 6]  # 0.75 ** 2 > 0.5 > 0.75 ** 3, and 0.9 ** 6 > 0.5 > 0.9 ** 7


def test_a_row_that_does_not_pay_is_not_computed() -> None:
    def widest(row: float) -> int:
        prices: dict[str, Any] = {"row_prices": (0.01,), "pass_prices": (0.001, 0.001 + row)}
        _, passes = begun([tree_of(row_of("a", max_draft=16, num_spare=4, **prices))])
        return max(map(len, passes))

    assert widest(0.0) > widest(0.3) == 1


@pytest.mark.parametrize("num_trees", [1, 4, 20, 60])
def test_no_pass_has_more_rows_than_choose_their_tokens_on_the_device(num_trees: int) -> None:
    rows = [row_of(str(at), max_draft=16, num_spare=4, **FREE) for at in range(num_trees)]
    _, passes = begun([tree_of(row) for row in rows])
    assert passes
    for each in passes:
        assert len(each) <= MOST_DRAWN_ROWS
        assert [row.index for row in each] == list(range(len(each)))
        assert all(row.parent is None or row.parent.index >= 0 for row in each)
        for row in rows:
            own = [one for one in each if one.tree.scheduled is row]
            assert len(own) <= MOST_EXPANDED


def test_rows_end_before_the_last_level_and_with_the_spare_slots() -> None:
    def rows_of(**row: int) -> list[TemplateRow]:
        _, passes = begun([tree_of(row_of("a", **row, **FREE))])
        return [each for rows in passes for each in rows]

    assert max(row.level for row in rows_of(max_draft=3)) == 2
    few = rows_of(max_draft=16, num_spare=1)
    assert sum(not row.on_trunk for row in few) <= PAGE_SIZE
    assert all(row.parent is None or row.parent.index >= 0 for row in few)


def test_a_row_behind_a_dropped_one_is_dropped() -> None:
    tree = tree_of(row_of("a"))
    root = TemplateRow(tree, 0, node=ROOT, index=0)
    first, second = (TemplateRow(tree, 1, root, rank, on_trunk=not rank) for rank in (0, 1))
    child = TemplateRow(tree, 2, second, 0, on_trunk=False)
    planned = [[(1, first), (1, second), (2, child)]]
    assert assign_rows(planned) == [[first, second], [child]]
    for row in (first, second, child):
        row.index = -1
    others: list[list[tuple[int, TemplateRow]]] = [[]] * (
        MOST_DRAWN_ROWS - 1
    )  # so many trees have one row each in a pass
    assert assign_rows([*planned, *others]) == [[first]]


def test_a_request_without_spare_pages_gets_a_chain() -> None:
    _, passes = begun([tree_of(row_of("a", num_spare=0, **FREE))])
    assert [len(rows) for rows in passes] == [1] * len(passes)
    assert all(row.on_trunk and row.rank == 0 for rows in passes for row in rows)

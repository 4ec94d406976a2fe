"""Several guesses for one request: a trunk, and branches that leave it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from foretoken.core.interface.draft import Draft
from foretoken.draft.sources.merge import common_len, merge
from foretoken.draft.sources.source import Guess


def guess(token_ids: Sequence[int], source: str) -> Guess:
    return Guess(array("q", token_ids), source, 0)


def laid_out(draft: Draft) -> list[tuple[int, int, str]]:
    """Return the token, the parent and the source of each node."""
    parents = draft.parents or range(-1, len(draft.token_ids) - 1)
    return list(zip(draft.token_ids, parents, draft.sources, strict=True))


def test_the_most_promising_guess_is_the_trunk() -> None:
    tree = merge(
        [guess([1, 2], "a"), guess([3, 4, 5], "b")], [np.array([0.9, 0.1]), np.full(3, 0.6)]
    )
    assert laid_out(tree.draft(2)) == [(3, -1, "b"), (4, 0, "b")]


def test_a_guess_along_the_trunk_is_no_branch_but_adds_confidence() -> None:
    tree = merge(
        [guess([1, 2, 3], "a"), guess([1, 2], "b")],
        [np.array([0.5, 0.4, 0.3]), np.array([0.8, 0.2])],
    )
    assert tree.survival.tolist() == [0.8, 0.4, 0.3]
    assert laid_out(tree.draft(9)) == [(1, -1, "a"), (2, 0, "a"), (3, 1, "a")]


def test_what_is_measured_of_a_source_is_left_as_it_is() -> None:
    curve = np.array([0.5, 0.4, 0.3])
    merge([guess([1, 2, 3], "a"), guess([1, 2], "b")], [curve, np.array([0.8, 0.2])])
    assert curve.tolist() == [0.5, 0.4, 0.3]


def test_a_branch_lives_on_what_the_trunk_leaves() -> None:
    tree = merge(
        [guess([1, 2, 3], "a"), guess([1, 7, 8], "b")],
        [np.array([0.9, 0.6, 0.5]), np.array([0.8, 0.4, 0.2])],
    )
    # The trunk goes on as it said in 0.6 of 0.9; the rest is the branch's to share.
    assert tree.survival.tolist() == pytest.approx(
        [0.9, 0.6, 0.5, 0.4 * 0.3 / 0.8, 0.2 * 0.3 / 0.8]
    )
    assert laid_out(tree.draft(5)) == [
        (1, -1, "a"), (2, 0, "a"), (3, 1, "a"), (7, 0, "b"), (8, 3, "b"),
    ]  # fmt: skip


def test_a_branch_of_a_branch_shares_what_that_leaves() -> None:
    tree = merge(
        [guess([1, 1], "a"), guess([2, 2], "b"), guess([2, 3], "c"), guess([4], "d")],
        [np.array([0.6, 0.5]), np.array([0.5, 0.4]), np.array([0.4, 0.3]), np.array([0.5])],
    )
    rest = 0.4 * 0.5  # of the first level, what "b" takes of it
    leaf = (rest - 0.4 * 0.4) / 0.4 * 0.3
    last = (0.4 - rest) * 0.5
    assert sorted(tree.survival) == pytest.approx(sorted([0.6, 0.5, rest, 0.4 * 0.4, leaf, last]))
    assert laid_out(tree.draft(6)) == [
        (1, -1, "a"), (1, 0, "a"), (2, -1, "b"), (2, 2, "b"), (3, 2, "c"), (4, -1, "d"),
    ]  # fmt: skip


def test_a_guess_that_goes_on_where_the_trunk_ends_lengthens_it() -> None:
    tree = merge(
        [guess([1], "a"), guess([1, 2, 3], "b")], [np.array([0.9]), np.array([0.4, 0.2, 0.1])]
    )
    assert tree.survival.tolist() == pytest.approx([0.9, 0.45, 0.225])
    assert laid_out(tree.draft(3)) == [(1, -1, "a"), (2, 0, "b"), (3, 1, "b")]
    assert tree.draft(3).runs == ((0, 3),)


def test_equal_branches_are_one() -> None:
    tree = merge(
        [guess([1, 2], "a"), guess([3, 4], "b"), guess([3, 4], "c"), guess([3], "d")],
        [np.full(2, 0.9), np.full(2, 0.5), np.full(2, 0.4), np.full(1, 0.1)],
    )
    assert [source for *_, source in laid_out(tree.draft(9))] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("seed", range(20))
def test_the_best_nodes_are_a_tree_for_every_number_of_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    guesses = [guess(rng.integers(0, 3, rng.integers(1, 7)).tolist(), str(i)) for i in range(5)]
    survivals = [np.cumprod(rng.uniform(0.2, 1.0, len(each.token_ids))) for each in guesses]
    tree = merge(guesses, survivals)
    paths = {tuple(each.token_ids[:n]) for each in guesses for n in range(1, 8)}
    assert len(tree.survival) == len(paths)
    for count in range(1, len(paths) + 1):
        draft = tree.draft(count)
        assert len(draft.token_ids) == count
        found = [[draft.token_ids[n] for n in draft.path(node)] for node in range(count)]
        assert {*map(tuple, found)} <= paths
        assert len({*map(tuple, found)}) == count, "siblings differ"
        parents = draft.parents or range(-1, count - 1)
        assert all(parent < node for node, parent in enumerate(parents))


@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("q", ids)])
@pytest.mark.parametrize(
    ("other", "length"), [([], 0), ([1, 2], 2), ([1, 2, 3], 3), ([1, 5, 3], 1), ([1, 2, 3, 4], 3)]
)
def test_sequences_of_any_kind_share_their_leading_items(
    kind: Callable[[list[int]], Sequence[int]], other: list[int], length: int
) -> None:
    assert common_len(array("q", [1, 2, 3]), kind(other)) == length
    assert common_len(kind(other), [1, 2, 3]) == length

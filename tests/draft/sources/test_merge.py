"""Several guesses for one request: a trunk, and branches that leave it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from foretoken.draft.sources.merge import common_len, merge
from foretoken.draft.sources.source import Guess


def guess(token_ids: Sequence[int], source: str) -> Guess:
    return Guess(array("q", token_ids), source, 0)


def test_the_most_promising_guess_is_the_trunk() -> None:
    paths = merge(
        [guess([1, 2], "a"), guess([3, 4, 5], "b")], [np.array([0.9, 0.1]), np.full(3, 0.6)]
    )
    assert [path.source for path in paths] == ["b", "a"]
    assert paths[0].draft(2).token_ids == array("q", [3, 4])
    assert paths[0].draft(2).sources == ("b", "b")


def test_a_guess_along_the_trunk_is_no_branch_but_adds_confidence() -> None:
    (trunk,) = merge(
        [guess([1, 2, 3], "a"), guess([1, 2], "b")],
        [np.array([0.5, 0.4, 0.3]), np.array([0.8, 0.2])],
    )
    assert trunk.source == "a"
    assert trunk.survival.tolist() == [0.8, 0.4, 0.3]


def test_what_is_measured_of_a_source_is_left_as_it_is() -> None:
    curve = np.array([0.5, 0.4, 0.3])
    merge([guess([1, 2, 3], "a"), guess([1, 2], "b")], [curve, np.array([0.8, 0.2])])
    assert curve.tolist() == [0.5, 0.4, 0.3]


def test_a_branch_lives_on_what_the_trunk_leaves() -> None:
    trunk, branch = merge(
        [guess([1, 2, 3], "a"), guess([1, 7, 8], "b")],
        [np.array([0.9, 0.6, 0.5]), np.array([0.8, 0.4, 0.2])],
    )
    assert (branch.fork, list(branch.token_ids)) == (1, [1, 7, 8])
    # The trunk goes on as it said in 0.6 of 0.9; the rest is the branch's to share.
    assert branch.survival.tolist() == pytest.approx([0.0, 0.4 * 0.3 / 0.8, 0.2 * 0.3 / 0.8])
    assert float(branch.survival.max()) + float(trunk.survival[1]) <= float(trunk.survival[0])


def test_equal_branches_are_one() -> None:
    paths = merge(
        [guess([1, 2], "a"), guess([3, 4], "b"), guess([3, 4], "c"), guess([3], "d")],
        [np.full(2, 0.9), np.full(2, 0.5), np.full(2, 0.4), np.full(1, 0.1)],
    )
    assert [path.source for path in paths] == ["a", "b"]


@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("q", ids)])
@pytest.mark.parametrize(
    ("other", "length"), [([], 0), ([1, 2], 2), ([1, 2, 3], 3), ([1, 5, 3], 1), ([1, 2, 3, 4], 3)]
)
def test_sequences_of_any_kind_share_their_leading_items(
    kind: Callable[[list[int]], Sequence[int]], other: list[int], length: int
) -> None:
    assert common_len(array("q", [1, 2, 3]), kind(other)) == length
    assert common_len(kind(other), [1, 2, 3]) == length

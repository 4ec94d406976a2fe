"""A request's row is followed along its draft, a chain or a tree, and cut to one of its paths."""

from __future__ import annotations

from array import array

import pytest

from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.sampling.drafted_row import DraftedRow

SAMPLING = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=1)
CHAIN = DraftedRow(array("q", [9, 9]), SAMPLING, (5, 6, 5))
#: 5 -> 6 -> 5, 5 -> 7, then 8 and 5 beside the trunk: the second 5 of a level is never reached.
TREE = DraftedRow(array("q", [9, 9]), SAMPLING, (5, 6, 5, 7, 8, 5), (-1, 0, 1, 0, -1, -1), 1)


@pytest.mark.parametrize(
    ("row", "node", "token_id", "child"),
    [
        (CHAIN, -1, 5, 0),
        (CHAIN, 0, 6, 1),
        (CHAIN, 0, 5, None),
        (CHAIN, 2, 5, None),
        (TREE, -1, 5, 0),
        (TREE, -1, 8, 4),
        (TREE, -1, 6, None),
        (TREE, 0, 7, 3),
        (TREE, 1, 5, 2),
        (TREE, 3, 5, None),
    ],
)
def test_a_child_is_the_node_behind_another_that_has_the_token(
    row: DraftedRow, node: int, token_id: int, child: int | None
) -> None:
    assert row.child(node, token_id) == child


@pytest.mark.parametrize(
    ("row", "token_ids", "path"),
    [
        (CHAIN, (), ()),
        (CHAIN, (5, 6, 5, 1), (0, 1, 2)),
        (CHAIN, (5, 5), (0,)),
        (CHAIN, (6, 6, 5), ()),
        (TREE, (5, 7, 5), (0, 3)),
        (TREE, (5, 6, 5), (0, 1, 2)),
        (TREE, (8,), (4,)),
        (TREE, (7,), ()),
    ],
)
def test_tokens_lead_along_the_nodes_that_have_them(
    row: DraftedRow, token_ids: tuple[int, ...], path: tuple[int, ...]
) -> None:
    assert row.follow(token_ids) == path


def test_a_row_to_sample_has_the_tokens_of_one_path_as_its_draft() -> None:
    for row, tails in (
        (CHAIN, [(), (5,), (5, 6), (5, 6, 5)]),
        (TREE, [(), (5,), (5, 6), (5, 6, 5), (5, 7), (8,), (5,)]),
    ):
        rows = [row.at(node) for node in range(-1, len(row.draft))]
        assert [tuple(each.draft) for each in rows] == tails
        assert not any(each.parents for each in rows)
        assert {each.num_ahead for each in rows} == {row.num_ahead}
        assert [each.position for each in rows] == [1 + row.num_ahead + len(t) for t in tails]


def test_a_row_with_nothing_drafted_is_sampled_as_it_is() -> None:
    plain = DraftedRow(array("q", [9, 9]), SAMPLING)
    assert plain.at(-1) is plain

"""Draft: a tree of guesses, of which a chain is the simplest."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from foretoken.core.interface.draft import NO_DRAFT, Draft

CHAIN = Draft((5, 6, 7), ("a", "a", "b"), note="mine")
#   5 -> 6 -> 7
#     -> 8 -> 9
#   4
TREE = replace(Draft.of((5, 6, 7, 8, 9, 4), "a"), note="mine", parents=(-1, 0, 1, 0, 3, -1))


def test_a_chain_may_leave_out_its_parents() -> None:
    said = replace(CHAIN, parents=(-1, 0, 1))
    assert said.trunk() == CHAIN.trunk() == CHAIN
    assert [said.path(node) for node in range(3)] == [CHAIN.path(node) for node in range(3)]
    assert CHAIN.path(2) == [0, 1, 2]


def test_the_trunk_of_a_tree_is_its_first_run_of_children() -> None:
    trunk = TREE.trunk()
    assert (trunk.token_ids, trunk.sources, trunk.parents) == ((5, 6, 7), ("a",) * 3, ())
    assert trunk.note == TREE.note


def test_a_path_leads_from_the_first_level_to_its_node() -> None:
    assert [TREE.path(node) for node in (0, 2, 4, 5)] == [[0], [0, 1, 2], [0, 3, 4], [5]]


@pytest.mark.parametrize("draft", [CHAIN, TREE])
def test_the_first_nodes_of_a_draft_are_a_draft(draft: Draft) -> None:
    for count in range(len(draft.token_ids) + 2):
        first = draft.first_nodes(count)
        assert list(first.token_ids) == list(draft.token_ids[:count])
        assert list(first.parents) == list(draft.parents[:count])
        assert len(first.sources) == len(first.token_ids)
    assert NO_DRAFT.first_nodes(3).trunk() == NO_DRAFT


@pytest.mark.parametrize("parents", [(0, 1), (3,), (-2, 0), (-1,)])
def test_parents_that_make_no_tree_leave_what_is_a_chain_of_it(parents: tuple[int, ...]) -> None:
    trunk = replace(CHAIN, parents=parents).trunk()
    assert trunk.parents == ()
    assert not replace(CHAIN, parents=parents).is_valid
    assert len(trunk.token_ids) == (parents == (-1,))


def test_levels_and_runs_of_a_tree() -> None:
    assert TREE.depths() == [1, 2, 3, 2, 3, 1]
    assert TREE.runs == ((0, 3), (3, 5), (5, 6))
    assert (TREE.height, TREE.trunk_len) == (3, 3)
    assert CHAIN.depths() == [1, 2, 3]
    assert [each.is_chain for each in (CHAIN, TREE, NO_DRAFT)] == [True, False, True]
    assert CHAIN.runs == replace(CHAIN, parents=(-1, 0, 1)).runs == ((0, 3),)
    assert (NO_DRAFT.height, NO_DRAFT.trunk_len, NO_DRAFT.runs) == (0, 0, ())

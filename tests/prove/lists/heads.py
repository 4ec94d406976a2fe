"""Mistakes in drafting by trained heads, and in the race for a place's best tokens."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "eagle-leaves-out-what-lies-before-a-page",
        "_seen",
        "for position in range(column.first, stop)",
        "for position in range(column.first + 1, stop)",
        ("test_the_columns_of_eagle_are_those_of_its_plain_pass",),
        "a column sees all columns from the first on",
    ),
    Mutation(
        "eagle-sees-its-own-token-alone",
        "TreeGrowth.path_slots",
        "for index in self.path(node)]",
        "for index in self.path(node)[-1:]]",
        ("test_the_nodes_of_a_tree_are_the_references_best_behind_their_paths",),
        "a column of a tree sees those before it on its path",
    ),
    Mutation(
        "pairs-of-tokens-that-are-not-known",
        "_Pairs.added",
        "found[ids < 0] = 0",
        "found[ids < 0] *= 1",
        ("test_pairs_are_the_markov_heads_and_unknown_tokens_have_none",),
        "a token that a head does not know says nothing of the next one",
    ),
    Mutation(
        "best-of-a-tie-in-any-order",
        "_ranked",
        "columns = best_ids(row, num_best).tolist()",
        "columns = best_ids(row, num_best).tolist()[::-1]",
        ("test_of_equal_scores_the_lowest_ids_are_the_best",),
        "ties go to the lowest id",
    ),
    Mutation(
        "race-forgets-the-last-tile",
        "merge_best_kernel",
        "mask=lanes < NUM_TILES * NUM_BEST, ",
        "mask=lanes < (NUM_TILES - 1) * NUM_BEST, ",
        ("test_the_best_are_torchs_by_any_tiles_and_the_first_is_drawn",),
        "the best few are those of the whole vocabulary",
    ),
    Mutation(
        "race-keeps-a-token-twice",
        "store_best",
        "words = tl.where(words == best, NO_WINNER, words)",
        "words = tl.where(words < best, words, words)",
        ("test_triton_sampler.py::test_the_best_of_a_greedy_row_are_its_greatest_logits",),
        "the best few of a place differ",
    ),
)

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
    Mutation(
        "heads-copy-all-requests-as-long-as-the-longest",
        "CopyingProposer._groups",
        "if groups[-1] and num_pages * self._page_bytes > self._most_copied:",
        "if False:",
        ("test_copies_are_bounded_and_one_long_request_pads_no_other",),
        "the copy of head KV of a pass is bounded",
    ),
    Mutation(
        "heads-group-requests-as-they-come",
        "CopyingProposer._groups",
        "sorted(starts, key=lambda start: len(start.scheduled.tokens))",
        "starts",
        ("test_copies_are_bounded_and_one_long_request_pads_no_other",),
        "a long request pads no others",
    ),
    Mutation(
        "heads-copy-as-much-after-memory-ran-out",
        "CopyingProposer._grow_all",
        "max(self._page_bytes, self._most_copied / 2)",
        "self._most_copied",
        ("test_where_memory_runs_out_less_is_copied_at_a_time_and_slowly_more_again",),
        "a head recovers from lack of memory",
    ),
    Mutation(
        "heads-are-lost-to-lack-of-memory",
        "ModelRunner._propose",
        "if is_out_of_memory(failure):",
        "if False:",
        ("test_a_head_whose_memory_ran_out_for_long_drafts_again_when_it_suffices",),
        "lack of memory is no failure of a proposer",
    ),
    Mutation(
        "health-check-leaves-head-kv",
        "HeadKV.is_live",
        "bool(verified.batch_rows and scheduled.request_id)",
        "bool(verified.batch_rows)",
        ("test_a_health_check_leaves_nothing_behind",),
        "a dummy step leaves nothing behind",
    ),
)

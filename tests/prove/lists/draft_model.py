"""Mistakes in drafting by a language model."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "lm-counts-kv-it-never-wrote",
        "TreeGrowth.judge",
        "if slot is not None:",
        "if node is not None:",
        ("test_a_model_that_drafts_for_itself_is_always_right",),
        "the last draft token has no KV",
    ),
    Mutation(
        "lm-sees-the-trunk-instead-of-its-path",
        "TreeGrowth.slots",
        "return [each.slot for each in path[away:] if each.slot is not None]",
        "return [each.slot for each in path[-1:] if each.slot is not None and away < len(path)]",
        ("test_trees_are_those_of_a_newcomer_whatever_path_was_taken_before",),
        "a node's draft KV is of its own path",
    ),
)

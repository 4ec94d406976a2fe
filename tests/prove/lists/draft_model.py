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
    Mutation(
        "lm-computes-known-tokens-behind-a-hole",
        "TreeGrowth.frontier",
        "if ROOT not in self.rankings:",
        "if False:",
        ("test_what_was_looked_up_is_not_computed_before_its_request_is_caught_up",),
        "draft KV has no holes",
    ),
    Mutation(
        "trees-do-not-share-their-rows",
        "StepTrees.__init__",
        "for each in (weighed, others) if each]",
        "for each in (*([tree] for tree in weighed), others) if each]",
        ("test_the_likeliest_nodes_of_all_trees_take_the_rows_that_cost_nothing",),
        "a tile of rows is filled by the best nodes of all",
    ),
    Mutation(
        "trees-forget-the-price-of-keys",
        "TreeGrowth.worths",
        "found = [node.survival - price for node in self.nodes if node.survival]",
        "found = [node.survival for node in self.nodes if node.survival]",
        ("test_a_node_of_a_longer_request_must_bring_more",),
        "a row of a long request attends to more keys",
    ),
    Mutation(
        "trees-compute-rows-that-do-not-pay",
        "_Group.paying",
        "count = int((gains.cumsum() - prices[rows]).argmax()) + 1",
        "count = len(paths)",
        ("test_a_node_is_computed_if_its_row_of_the_pass_pays",),
        "each row of a drafter's pass has a price",
    ),
)

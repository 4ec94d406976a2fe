"""Mistakes in the model's arithmetic: the KV pool, RoPE, attention, the runner."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "pool-hides-nan",
        "to_scaled",
        "largest = rows.abs().amax(dim=-1)",
        "largest = rows.nan_to_num().abs().amax(dim=-1)",
        ("test_a_vector_that_is_not_finite_stays_so_and_harms_no_other",),
        "a vector that is not finite stays so",
    ),
    Mutation(
        "pool-copies-the-wrong-way",
        "KVPool._copy_slots",
        "kept[blocks[1], offsets[1]] = kept[blocks[0], offsets[0]]",
        "kept[blocks[0], offsets[0]] = kept[blocks[1], offsets[1]]",
        ("test_known_trees_change_no_token",),
        "I7: the pages hold the KV of the path that won",
    ),
    Mutation(
        "attention-sees-the-future",
        "TorchPlan._seen",
        "seen = keys <= queries",
        "seen = keys <= queries + 1",
        ("test_attention_equals_the_formula",),
        "a row sees positions up to its own",
    ),
    Mutation(
        "attention-reads-stale-pages",
        "TorchPlan.read",
        "if block.void_rows is not None:",
        "if block.void_rows is None:",
        ("test_stale_nan_of_another_owner_never_reaches_a_row",),
        "I7: NaN of another owner never reaches a row",
    ),
    Mutation(
        "attention-exp-sum-is-not-rescaled",
        "_Softmax.merge",
        "self.exp_sum[span].mul_(keep).add_(",
        "self.exp_sum[span].add_(",
        ("test_attention_equals_the_formula",),
        "the online softmax",
    ),
    Mutation(
        "attention-hidden-values-weigh-a-little",
        "_weigh",
        "_masked(weights, block, block.seen).mul_(block.seen)",
        "_masked(weights, block, block.seen).mul(block.seen)",
        ("test_torch_ops.py::test_hidden_values_weigh_exactly_nothing",),
        "I5: what is hidden weighs exactly nothing",
    ),
    Mutation(
        "layout-shared-keys-are-another-layers",
        "PageLayout.of",
        "places.append(places[spec.kv_of])",
        "places.append(places[0])",
        ("test_logits_equal_transformers_over_200_positions",),
        "a layer that reads the keys of another has that one's place",
    ),
    Mutation(
        "runner-lets-unsound-chunks-pass",
        "_chunks_not_finite",
        "if not finite[slice(*span)].all()]",
        "if False]",
        ("test_kv_that_is_not_finite_reaches_nobody",),
        "NaN KV of a prompt reaches nobody",
    ),
    Mutation(
        "runner-takes-ids-outside-the-vocabulary",
        "ModelRunner._truncate_invalid",
        "lambda token_id: 0 <= token_id < vocab_size",
        "lambda token_id: token_id < vocab_size",
        ("test_a_draft_that_makes_no_sense_costs_nothing_but_itself",),
        "a draft's ids are checked, negative ones too",
    ),
    Mutation(
        "runner-reports-refused-rows",
        "StepLayout.kept_rows",
        "*(behind + node for node in path)",
        "*range(behind, behind + len(path) + 1)",
        ("test_the_rows_of_refused_draft_tokens_are_left_out",),
        "a head learns from committed positions alone",
    ),
    Mutation(
        "runner-fails-with-its-proposer",
        "ModelRunner._propose",
        '            return {}\n        self._breakers["propose"].record_success()',
        '            raise\n        self._breakers["propose"].record_success()',
        (
            "test_a_draft_that_makes_no_sense_costs_nothing_but_itself",
            "test_no_drafter_and_no_batch_changes_a_token",
        ),
        "a draft that raises costs its tokens alone",
    ),
)

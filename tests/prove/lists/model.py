"""Mistakes in the model's arithmetic: the KV pool, RoPE, attention, the runner."""

from __future__ import annotations

from ..mutation import Mutation

KV_POOL = "tests/core/test_kv_pool.py"
FAMILIES = "tests/core/test_model_families.py"
EXACTNESS = "tests/core/test_model_exactness.py"
TORCH_OPS = "tests/core/test_ops_torch.py"
LOADER = "tests/core/test_loader.py"

MUTATIONS = (
    Mutation(
        "pool-scale-beyond-int8",
        "core/kv_pool.py",
        "torch.int8: 127.0",
        "torch.int8: 160.0",
        (f"{KV_POOL}::test_a_vector_comes_back_to_half_a_step",),
        "a vector comes back to half a step",
    ),
    Mutation(
        "pool-hides-nan",
        "core/kv_pool.py",
        "largest = rows.abs().amax(dim=-1)",
        "largest = rows.nan_to_num().abs().amax(dim=-1)",
        (f"{KV_POOL}::test_a_vector_that_is_not_finite_stays_so_and_harms_no_other",),
        "a vector that is not finite stays so",
    ),
    Mutation(
        "pool-counts-keys-alone",
        "core/kv_pool.py",
        "return 2 * num_layers * num_kv_heads * block.num_bytes",
        "return num_layers * num_kv_heads * block.num_bytes",
        (f"{TORCH_OPS}::test_a_page_has_the_size_that_the_helper_says",),
        "the pool is as large as it was sized for",
    ),
    Mutation(
        "pool-copies-the-wrong-way",
        "core/kv_pool.py",
        "[pages[i] for i in targets], [pages[i] for i in sources]",
        "[pages[i] for i in sources], [pages[i] for i in targets]",
        ("tests/test_branches.py::test_a_branch_that_wins_changes_no_token",),
        "I7: a branch begins with its row's page",
    ),
    Mutation(
        "rope-llama3-slows-the-wrong-half",
        "core/model/rope.py",
        "(1 - smooth) * plain / spec.factor + smooth * plain",
        "smooth * plain / spec.factor + (1 - smooth) * plain",
        (f"{FAMILIES}::test_logits_equal_transformers_over_200_positions",),
        "logits equal those of transformers",
    ),
    Mutation(
        "rope-yarn-forgets-its-temperature",
        "core/model/rope.py",
        "return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0",
        "return 1.0",
        (f"{FAMILIES}::test_logits_equal_transformers_over_200_positions",),
        "logits equal those of transformers",
    ),
    Mutation(
        "rope-table-grows-by-its-first-positions",
        "core/model/rope.py",
        "torch.arange(start, start + _CHUNK,",
        "torch.arange(0, _CHUNK,",
        ("tests/core/test_rope.py",),
        "positions beyond the first piece of the table",
    ),
    Mutation(
        "rope-partial-rotation-is-ignored",
        "core/model/rope.py",
        'if fields.number("partial_rotary_factor", 1.0) != 1.0:',
        'if fields.number("partial_rotary_factor", 1.0) > 1.0:',
        (f"{LOADER}::test_unsupported_configs_are_refused_by_name",),
        "a config that is not supported is refused by name",
    ),
    Mutation(
        "attention-sees-the-future",
        "core/ops/torch_plan.py",
        "seen = keys <= queries",
        "seen = keys <= queries + 1",
        (f"{TORCH_OPS}::test_attention_equals_the_formula",),
        "a row sees positions up to its own",
    ),
    Mutation(
        "attention-window-one-wider",
        "core/ops/torch_plan.py",
        "seen & (keys > queries - window)",
        "seen & (keys >= queries - window)",
        (f"{TORCH_OPS}::test_attention_equals_the_formula",),
        "a window of so many positions",
    ),
    Mutation(
        "attention-skips-a-block-at-the-window",
        "core/ops/torch_plan.py",
        "seen &= lo + size - 1 > starts - window",
        "seen &= lo > starts - window",
        (f"{TORCH_OPS}::test_attention_equals_the_formula",),
        "every block of which a row sees something is read",
    ),
    Mutation(
        "attention-reads-stale-pages",
        "core/ops/torch_plan.py",
        "if block.void_rows is not None:",
        "if block.void_rows is None:",
        (f"{EXACTNESS}::test_stale_nan_of_another_owner_never_reaches_a_row",),
        "I7: NaN of another owner never reaches a row",
    ),
    Mutation(
        "attention-total-is-not-rescaled",
        "core/ops/torch_attention.py",
        "self.total[span].mul_(keep).add_(",
        "self.total[span].add_(",
        (f"{TORCH_OPS}::test_attention_equals_the_formula",),
        "the online softmax",
    ),
    Mutation(
        "attention-hidden-values-weigh-a-little",
        "core/ops/torch_attention.py",
        "_masked(weights, block, block.seen).mul_(block.seen)",
        "_masked(weights, block, block.seen).mul(block.seen)",
        (f"{TORCH_OPS}::test_hidden_values_weigh_exactly_nothing",),
        "I5: what is hidden weighs exactly nothing",
    ),
    Mutation(
        "ops-residual-is-lost",
        "core/ops/torch_ops.py",
        "return self.rms_norm(total, weight, eps), total",
        "return self.rms_norm(total, weight, eps), x",
        (f"{FAMILIES}::test_logits_equal_transformers_over_200_positions",),
        "logits equal those of transformers",
    ),
    Mutation(
        "runner-branch-is-not-adopted",
        "core/runner.py",
        "best = _furthest(outcomes) if row.branches else 0",
        "best = 0",
        ("tests/test_branches.py::test_a_branch_that_wins_changes_no_token",),
        "I7: the pages hold the KV of the branch that won",
    ),
    Mutation(
        "runner-lets-unsound-chunks-pass",
        "core/runner.py",
        "if not is_sound]",
        "if is_sound is None]",
        ("tests/core/test_runner.py::test_kv_that_is_not_finite_reaches_nobody",),
        "NaN KV of a prompt reaches nobody",
    ),
    Mutation(
        "runner-takes-ids-outside-the-vocabulary",
        "core/runner.py",
        "lambda token_id: 0 <= token_id < vocab_size",
        "lambda token_id: token_id < vocab_size",
        ("tests/core/test_runner.py::test_a_draft_that_makes_no_sense_costs_nothing_but_itself",),
        "a draft's ids are checked, negative ones too",
    ),
    Mutation(
        "runner-fails-with-its-proposer",
        "core/runner.py",
        "            return {}\n        self._num_failures = 0",
        "            raise\n        self._num_failures = 0",
        (
            "tests/core/test_runner.py::test_a_draft_that_makes_no_sense_costs_nothing_but_itself",
            "tests/test_stream_equality.py::test_no_drafter_and_no_batch_changes_a_token",
        ),
        "a draft that raises costs its tokens alone",
    ),
)

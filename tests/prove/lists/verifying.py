"""Mistakes in verifying drafts: the sampler, its noise, rejection sampling."""

from __future__ import annotations

from ..mutation import Mutation

VERIFY = "tests/core/test_verify.py"
REJECTION = "tests/core/test_rejection.py"
NOISE = "tests/core/test_noise.py"
CHOICES = "tests/core/gpu/test_triton_choices.py"
GRAPHS = "tests/core/gpu/test_graphs.py"

MUTATIONS = (
    Mutation(
        "verify-accepts-every-draft",
        "core/verify.py",
        "self._token_ids.append(choice.token_id)",
        "self._token_ids.append([*self._draft[depth:], choice.token_id][0])",
        (f"{VERIFY}::test_the_run_stops_at_the_first_mismatch_even_if_later_drafts_match",),
        "I6: the output never depends on the drafter",
    ),
    Mutation(
        "verify-counts-the-bonus-token",
        "core/verify.py",
        "len(token_ids) - (error is None)",
        "len(token_ids)",
        (f"{VERIFY}::test_a_wholly_accepted_draft_is_followed_by_the_bonus_token",),
        "accepted tokens leave out the recovered or bonus one",
    ),
    Mutation(
        "verify-forgets-the-draft-before-a-place",
        "core/verify.py",
        "SampleRow(self._row.tokens, self._row.sampling, tail)",
        "SampleRow(self._row.tokens, self._row.sampling)",
        (f"{VERIFY}::test_streams_equal_plain_decoding",),
        "law 4: noise and penalties belong to the position",
    ),
    Mutation(
        "verify-lets-nan-pass",
        "core/verify.py",
        "errors = _unfit(values, NOT_FINITE)",
        "errors: list[str | None] = [None] * len(values)",
        (f"{VERIFY}::test_logits_that_are_not_finite_fail_their_own_request_only",),
        "a NaN row fails its own request",
    ),
    Mutation(
        "verify-shifts-the-neighbours-of-a-bad-row",
        "core/verify.py",
        "values = values if len(sound) == len(rows) else values[sound]",
        "values = values[: len(sound)]",
        (f"{VERIFY}::test_logits_that_are_not_finite_fail_their_own_request_only",),
        "I5: neighbours of a NaN row are unchanged",
    ),
    Mutation(
        "verify-noise-ignores-the-position",
        "core/verify.py",
        "(row.sampling.seed, row.position)",
        "(row.sampling.seed, 0)",
        (f"{VERIFY}::test_every_output_position_has_noise_of_its_own",),
        "law 4: noise is keyed by seed and position",
    ),
    Mutation(
        "verify-tau-is-lost",
        "core/verify.py",
        "return argmax(noise.add_(scaled(values, rows, tau)))",
        "return argmax(noise.add_(scaled(values, rows)))",
        (f"{VERIFY}::test_tau_sharpens_what_a_drafter_draws",),
        "a drafter's sharpening",
    ),
    Mutation(
        "logprobs-of-a-gpu-take-any-of-equals",
        "core/logprobs.py",
        "ids).sort(-1).values",
        "ids)",
        ("tests/core/test_logprobs.py::test_a_gpus_way_gives_the_same_bits_ties_included",),
        "of tokens equally likely the lowest ids are told",
    ),
    Mutation(
        "verify-logprobs-wrap-round",
        "core/logprobs.py",
        "if not 0 <= token_id < size:",
        "if not token_id < size:",
        ("tests/core/test_logprobs.py::test_tokens_outside_the_vocabulary_are_refused",),
        "a token id of -1 silently wraps",
    ),
    Mutation(
        "verify-blocks-lose-a-row",
        "core/verify.py",
        "yield indices[start : start + step], edited, _DRAWS[kind]",
        "yield indices[start : start + max(1, step - 1)], edited, _DRAWS[kind]",
        (f"{VERIFY}::test_the_block_size_changes_nothing",),
        "every place is decided",
    ),
    Mutation(
        "noise-shared-by-neighbouring-positions",
        "core/noise.py",
        "_mix(stream_start(seed) + _GOLDEN * (position + 1))",
        "_mix(stream_start(seed) + _GOLDEN * (position // 2 + 1))",
        (f"{NOISE}::test_noise_equals_the_hash_written_in_plain_integers",),
        "law 4: every position has noise of its own",
    ),
    Mutation(
        "noise-siblings-are-neighbours",
        "core/noise.py",
        "return _mix(_mix(seed ^ _SIBLING) + _GOLDEN * index)",
        "return seed & _MASK",
        (f"{NOISE}::test_the_first_sibling_keeps_the_seed_and_the_others_differ",),
        "n answers to one prompt differ",
    ),
    Mutation(
        "noise-copies-the-sign",
        "core/noise.py",
        "return (words >> bits) & ((1 << (64 - bits)) - 1)",
        "return words >> bits",
        (f"{NOISE}::test_noise_equals_the_hash_written_in_plain_integers",),
        "noise is the hash that the kernels compute, too",
    ),
    Mutation(
        "noise-may-be-infinite",
        "core/noise.py",
        "minus_v.clamp_(min=2.0**-24 - 1.0, max=-(2.0**-63))",
        "minus_v.clamp_(min=2.0**-24 - 1.0)",
        (f"{NOISE}::test_extreme_words_give_finite_noise_and_an_exact_upper_tail",),
        "no word makes infinite noise",
    ),
    Mutation(
        "rejection-recovers-from-the-whole-target",
        "core/rejection.py",
        "torch.where(excess.amax(-1, keepdim=True) > 0, excess, target)",
        "target",
        (
            f"{REJECTION}::test_a_guess_is_accepted_by_its_probability_and_never_recovered_when_refused",
        ),
        "exact in distribution: recovered from what the target has more of",
    ),
    Mutation(
        "rejection-accepts-unknown-tokens",
        "core/rejection.py",
        "return [a and b for a, b in zip(",
        "return [a for a, _ in zip(",
        (f"{REJECTION}::test_a_draft_token_outside_the_vocabulary_is_never_accepted",),
        "a draft id outside the vocabulary is never accepted",
    ),
    Mutation(
        "rejection-drafts-with-the-verifiers-noise",
        "core/rejection.py",
        "seeds = [purpose_seed(row.sampling.seed, _DRAFT) for row in rows]",
        "seeds = [row.sampling.seed for row in rows]",
        (f"{REJECTION}::test_a_drafters_draws_are_not_the_verifiers",),
        "drawing and judging a draft are independent",
    ),
    Mutation(
        "rejection-judges-by-half",
        "core/rejection.py",
        "chance * drawn_from.gather(-1, index)",
        "0.5 * chance * drawn_from.gather(-1, index)",
        (
            f"{REJECTION}::test_a_guess_is_accepted_by_its_probability_and_never_recovered_when_refused",
        ),
        "accepted with probability min(1, p / q)",
    ),
    Mutation(
        "graph-chooses-for-edited-rows",
        "core/ops/triton/controls.py",
        "if wishes.is_edited or first < wishes.min_tokens:",
        "if first < wishes.min_tokens:",
        (f"{CHOICES}::test_beside_an_edited_row_all_are_chosen_behind_the_graph",),
        "law 4: the same token in a graph and out of it",
    ),
    Mutation(
        "graph-forgets-the-draft-before-a-place",
        "core/ops/triton/controls.py",
        "positions += range(first, first + count)",
        "positions += [first] * count",
        (f"{CHOICES}::test_drafts_and_branches_are_followed_by_what_the_graph_chose",),
        "I6: noise is keyed by the position on the path",
    ),
    Mutation(
        "graph-gives-up-with-its-head",
        "core/ops/triton/step.py",
        'logger.warning("no graph of %d rows that chooses, too", bucket, exc_info=True)',
        "raise",
        (
            f"{GRAPHS}::test_a_graph_that_fails_with_a_head_is_captured_without_one_and_so_are_others",
        ),
        "memory that is lacking for logits costs no graph",
    ),
    Mutation(
        "graph-cuts-nobodys-row",
        "core/ops/triton/cuts.py",
        "    if place < 0:\n        return\n",
        "",
        (f"{CHOICES}::test_nothing_is_chosen_where_there_is_nobody",),
        "a kernel writes within its buffers",
    ),
)

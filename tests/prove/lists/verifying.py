"""Mistakes in verifying drafts: the sampler and its noise."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "verify-accepts-every-draft",
        "_Walk.take",
        "self._token_ids.append(choice.token_id)",
        "self._token_ids.append([*self._request.draft[node + 1 :], choice.token_id][0])",
        ("test_the_run_stops_at_the_first_mismatch_even_if_later_drafts_match",),
        "I6: the output never depends on the drafter",
    ),
    Mutation(
        "verify-counts-the-bonus-token",
        "verified",
        "path = request.follow(token_ids if error is not None else token_ids[:-1])",
        "path = tuple(range(len(token_ids)))",
        ("test_a_wholly_accepted_draft_is_followed_by_the_bonus_token",),
        "accepted tokens leave out the recovered or bonus one",
    ),
    Mutation(
        "verify-forgets-the-draft-before-a-place",
        "_Walk.place",
        "self._request.at(node)",
        "self._request.at(-1)",
        ("test_streams_equal_plain_decoding",),
        "law 4: noise and penalties belong to the position",
    ),
    Mutation(
        "verify-lets-nan-pass",
        "processed",
        "errors = _unfit(values, NOT_FINITE)",
        "errors: list[str | None] = [None] * len(values)",
        ("test_verifier.py::test_logits_that_are_not_finite_fail_their_own_request_only",),
        "a NaN row fails its own request",
    ),
    Mutation(
        "verify-shifts-the-neighbours-of-a-bad-row",
        "_draw_sound",
        "values = values if len(sound) == len(rows) else values[sound]",
        "values = values[: len(sound)]",
        ("test_verifier.py::test_logits_that_are_not_finite_fail_their_own_request_only",),
        "I5: neighbours of a NaN row are unchanged",
    ),
    Mutation(
        "verify-noise-ignores-the-position",
        "_noise",
        "(row.sampling.seed, row.position)",
        "(row.sampling.seed, 0)",
        ("test_every_output_position_has_noise_of_its_own",),
        "law 4: noise is keyed by seed and position",
    ),
    Mutation(
        "verify-logprobs-wrap-round",
        "token_logprobs",
        "if not 0 <= token_id < size:",
        "if not token_id < size:",
        ("test_tokens_outside_the_vocabulary_are_refused",),
        "a token id of -1 silently wraps",
    ),
    Mutation(
        "graph-chooses-for-edited-rows",
        "write_plain_controls",
        "if first < own.edited_until]:",
        "if first < own.min_tokens]:",
        ("test_beside_an_edited_row_all_are_chosen_behind_the_graph",),
        "law 4: the same token in a graph and out of it",
    ),
    Mutation(
        "graph-forgets-the-draft-before-a-place",
        "write_plain_controls",
        "rows + offsets.repeat(counts)",
        "np.array(firsts).repeat(counts)",
        ("test_draft_trees_are_followed_by_what_the_graph_chose",),
        "I6: noise is keyed by the position on the path",
    ),
)

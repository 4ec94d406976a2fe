"""Mistakes in what parameters do to logits: penalties, bans, cuts."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "cuts-top-p-loses-the-token-that-crosses",
        "TopKTopP.keep",
        "(reached - mass < self._limit(",
        "(reached < self._limit(",
        ("test_any_mixture_of_parameters_equals_the_reference",),
        "top-p keeps the token that crosses",
    ),
    Mutation(
        "cuts-masses-overflow",
        "mass_unit",
        "vocab_size.bit_length() - 62",
        "vocab_size.bit_length() - 64",
        ("test_top_p_over_a_flat_row_of_many_tokens_is_the_same_alone",),
        "a whole row of masses sums below 2**62",
    ),
    Mutation(
        "sampling-position-without-the-tail",
        "DraftedRow.position",
        "+ self.num_ahead + len(self.draft) - self",
        "+ self.num_ahead - self",
        ("test_streams_equal_plain_decoding",),
        "law 4: the position counts drafted tokens",
    ),
    Mutation(
        "sampling-presence-counts-the-prompt",
        "_penalise",
        "output = _history(row, row.sampling.prompt_len, values)",
        "output = _history(row, 0, values)",
        ("test_any_mixture_of_parameters_equals_the_reference",),
        "presence and frequency count the output alone",
    ),
    Mutation(
        "sampling-bad-word-compares-its-end",
        "DraftedRow.banned_by_words",
        "self.ending(len(word) - 1) == word[:-1]",
        "self.ending(len(word) - 1) == word[1:]",
        ("test_any_mixture_of_parameters_equals_the_reference",),
        "the end of a bad word is banned behind its beginning",
    ),
    Mutation(
        "sampling-negative-ids-pass",
        "beyond_vocabulary",
        "if not ids or (min(ids) >= 0 and max(ids) < vocab_size):",
        "if not ids or max(ids) < vocab_size:",
        ("test_token_ids_outside_the_vocabulary_name_their_field",),
        "token ids are checked, negative ones too",
    ),
    Mutation(
        "sampling-allows-all",
        "_edit",
        "values.fill_(_NEVER)[allowed] = kept",
        "values[allowed] = kept",
        ("test_any_mixture_of_parameters_equals_the_reference",),
        "allowed_token_ids",
    ),
    Mutation(
        "sampling-ignores-the-grammar",
        "_edit",
        "values.masked_fill_(~torch.from_numpy(mask).to(values.device), _NEVER)",
        "values.masked_fill(~torch.from_numpy(mask).to(values.device), _NEVER)",
        ("test_the_mask_belongs_to_the_path_of_output_and_tail_without_the_prompt",),
        "an answer has the form that was asked for",
    ),
    Mutation(
        "sampling-repetition-rewards-negative-logits",
        "_penalise",
        "torch.where(seen > 0, seen / factor, seen * factor)",
        "seen / factor",
        ("test_any_mixture_of_parameters_equals_the_reference",),
        "a penalty never makes a token likelier",
    ),
    Mutation(
        "sampling-rules-of-another-vocabulary",
        "SamplingMetadata.cached",
        "key = (make, *args)",
        "key = (make,)",
        (
            "test_logits_processors.py::test_what_is_known_of_a_request_is_known_of_one_width_of_logits",
        ),
        "a draft model may have another width of logits",
    ),
)

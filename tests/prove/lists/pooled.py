"""Mistakes in embeddings and rerank, and in drafts of another tokenizer's model."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "embedding-has-any-length",
        "unit_vector",
        "or 1.0",
        "and 1.0",
        ("test_vectors_are_transformers_own_cold_and_cached",),
        "vectors have length 1",
    ),
    Mutation(
        "embedding-is-cut-when-it-has-length-1",
        "unit_vector",
        "np.square(vector).sum()",
        "np.square(np.frombuffer(numbers, np.float32)).sum()",
        ("test_dimensions_cut_before_the_length_becomes_1",),
        "dimensions cut before the length becomes 1",
    ),
    Mutation(
        "rerank-scores-are-of-no",
        "score_of",
        "no, yes = numbers",
        "yes, no = numbers",
        ("test_scores_are_those_of_transformers_recipe",),
        "a score is the probability of yes",
    ),
    Mutation(
        "rerank-shows-the-worst-first",
        "ranked",
        "-scores[index]",
        "scores[index]",
        ("test_scores_are_those_of_transformers_recipe",),
        "the best document comes first",
    ),
    Mutation(
        "text-draft-shares-kv-of-all-namespaces",
        "TextProposer._space",
        "str(self._num_spaces)",
        '"0"',
        ("test_a_second_request_finds_the_first_ones_kv_and_another_namespace_does_not",),
        "namespaces share no KV, nor that of drafts",
    ),
    Mutation(
        "text-draft-keeps-kv-of-other-tokens",
        "TextProposer._read",
        "del reading.computed[num_same + common_len(computed, now) :]",
        "pass",
        ("test_what_differs_from_the_draft_is_computed_anew",),
        "KV of text that turned out otherwise is computed anew",
    ),
    Mutation(
        "text-draft-ignores-the-grammar",
        "TextProposer._allowed",
        "constraint is None or not token_ids",
        "True",
        ("test_a_draft_ends_where_the_grammar_forbids_its_next_token",),
        "no token is drafted that the grammar forbids",
    ),
    Mutation(
        "text-draft-splits-characters",
        "_whole_characters",
        "lead < 0xF8 and length > size",
        "False",
        ("test_only_the_beginning_of_a_character_is_split_off",),
        "the beginning of a character waits for its end",
    ),
)

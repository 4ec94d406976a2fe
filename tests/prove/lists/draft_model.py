"""Mistakes in drafting by a language model."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "tau-judges-the-token-before",
        "TemperatureTuner.settle",
        "token_id == row.tokens[at] for token_id in drawn",
        "token_id == row.tokens[at - 1] for token_id in drawn",
        ("test_each_tau_is_judged_by_what_it_would_have_drawn",),
        "each tau is judged by what it would have drawn",
    ),
    Mutation(
        "tau-keeps-logits-that-change",
        "TemperatureTuner.keep",
        "len(row.tokens), logits.clone()",
        "len(row.tokens), logits",
        ("test_logits_that_change_later_do_not_matter",),
        "logits are lent for the call",
    ),
    Mutation(
        "tau-wins-and-losses-swapped",
        "TemperatureTuner.judge",
        "np.outer(right, ~right)",
        "np.outer(~right, right)",
        ("test_an_under_confident_draft_is_sharpened_and_accepted_more_often",),
        "an under-confident draft is sharpened",
    ),
    Mutation(
        "tau-remembers-who-left",
        "TemperatureTuner",
        "            self._kept.pop(request_id, None)\n\n    def judge",
        "            self._kept.get(request_id, None)\n\n    def judge",
        ("test_nothing_is_kept_of_requests_that_left_or_have_no_answer",),
        "nothing is kept of requests that left",
    ),
    Mutation(
        "lm-trusts-pages-that-changed-hands",
        "LmProposer.forget",
        "            self._ready[page_id] = 0\n",
        "            pass\n",
        ("test_pages_that_change_hands_lose_the_drafts_kv",),
        "law 3: a fresh page has no draft KV",
    ),
    Mutation(
        "lm-counts-kv-it-never-wrote",
        "LmProposer._learn",
        "right = min(agreed, len(chain.token_ids) - 1)",
        "right = agreed",
        ("test_a_model_that_drafts_for_itself_is_always_right",),
        "the last draft token has no KV",
    ),
    Mutation(
        "lm-keeps-kv-of-rejected-drafts",
        "LmProposer._learn",
        "right = min(agreed, len(chain.token_ids) - 1)",
        "right = min(len(committed), len(chain.token_ids)) - 1",
        ("test_kv_of_rejected_drafts_is_computed_anew",),
        "KV of rejected drafts is computed anew",
    ),
    Mutation(
        "lm-trusts-pages-behind-a-failed-step",
        "LmProposer._learn",
        "track.num_computed += min(right, self._num_kept(row, track, chain))",
        "track.num_computed += right",
        ("test_a_draft_whose_pages_went_to_others_behind_a_failed_step_is_not_believed",),
        "pages that changed hands hold no KV of a draft",
    ),
    Mutation(
        "lm-catches-up-at-once",
        "LmProposer._stops",
        "room, stops = self._window + len(rows), {}",
        "room, stops = 1 << 30, {}",
        ("test_missing_draft_kv_is_caught_up_a_window_at_a_time",),
        "catching up stays within a window",
    ),
    Mutation(
        "lm-drafts-beyond-its-context",
        "LmProposer._has_room",
        "return len(row.tokens) + row.max_draft <= self._decoder",
        "return len(row.tokens) <= self._decoder",
        (
            "test_a_draft_model_with_a_shorter_context_stops_drafting_there",
            "test_where_the_context_ends_there_is_no_backlog",
        ),
        "a shorter context stops drafting there",
    ),
    Mutation(
        "lm-draws-in-a-graph-without-tau",
        "LmProposer._forward",
        "SamplingPlan(sample_rows, [1] * len(sample_rows), self.temperature_scale)",
        "SamplingPlan(sample_rows, [1] * len(sample_rows))",
        ("test_a_draft_models_tokens_are_chosen_in_the_graph_as_sharp_as_behind_it",),
        "a draft is as sharp in a graph as out of it",
    ),
)

"""Mistakes in drafting by trained heads, and in the race for a place's best tokens."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "best-of-a-tie-in-any-order",
        "_ranked",
        "columns = best_ids(row, num_best).tolist()",
        "columns = best_ids(row, num_best).tolist()[::-1]",
        ("test_of_equal_scores_the_lowest_ids_are_the_best",),
        "ties go to the lowest id",
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
    Mutation(
        "mtp-reads-the-stream-before-the-norm",
        "MtpProposer.features",
        "return self._final_norm(taps.contiguous())",
        "return taps.contiguous()",
        ("test_the_logits_of_each_level_are_those_of_transformers",),
        "an MTP layer reads the output of the final norm",
    ),
    Mutation(
        "assistant-moves-on-with-its-drafts",
        "_AssistantDrafting._row",
        "PassRows((query.token_id,), anchor, (0,), seen, _NO_SLOTS)",
        "PassRows((query.token_id,), anchor + query.level, (0,), seen, _NO_SLOTS)",
        ("test_an_assistant_computes_at_each_level_what_its_modules_compute",),
        "queries of an assistant stand at the last known token",
    ),
    Mutation(
        "assistant-sees-a-window-short-of-a-position",
        "_reading",
        "layer.window + 1",
        "layer.window",
        ("test_an_assistant_computes_at_each_level_what_its_modules_compute",),
        "an assistant's window is that of transformers",
    ),
    Mutation(
        "self-drafts-go-over-the-end-of-a-page",
        "DecoderGrower.most_levels",
        "ANY_LEVEL if self._pool.states is None else self._page_size - in_page",
        "ANY_LEVEL",
        ("test_self_drafts_change_no_token_though_what_they_wrote_is_void",),
        "no draft is folded into a state",
    ),
    Mutation(
        "rows-begin-with-the-state-of-others",
        "fresh_state",
        "    states.reset(index)\n",
        "",
        ("test_the_loss_is_that_of_teacher_forced_hidden_states",),
        "a sequence begins with an empty state",
    ),
)

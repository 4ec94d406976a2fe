"""Mistakes in laying out a step: batches, draft rows, speculators."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "layout-tail-leaves-out-ancestors",
        "_runs_off_trunk",
        'tail=array("q", ancestors + own),',
        'tail=array("q", own),',
        ("test_random_steps_have_the_bytes_of_their_segments",),
        "I7: a node sees the KV of its own path",
    ),
    Mutation(
        "batch-pads-with-page-zero",
        "padded_rows",
        'mode="edge"',
        'mode="constant"',
        ("test_segments_are_laid_out_row_after_row",),
        "I7: padding rows write to nobody's page",
    ),
    Mutation(
        "batch-positions-are-not-the-segments",
        "build_batch",
        "positions = indices + (starts - first_rows)[rows]",
        "positions = indices + starts[rows]",
        ("test_segments_are_laid_out_row_after_row",),
        "positions begin anew with each segment",
    ),
    Mutation(
        "drafting-leaves-prompts-nothing",
        "draft_row_budget",
        "max(0, budget // 2 if others_wait else budget)",
        "max(0, budget)",
        ("test_half_of_the_budget_is_kept_for_prompts_that_wait",),
        "half of the budget is kept for those who wait",
    ),
    Mutation(
        "drafting-counts-cached-pages-as-free",
        "allocate_draft_pages",
        "room += cache.num_free_pages * cache.page_size",
        "room += cache.num_available_pages * cache.page_size",
        ("test_what_is_cached_is_never_evicted_for_a_draft",),
        "what is committed is never evicted for a guess",
    ),
    Mutation(
        "drafting-keeps-a-draft-without-pages",
        "allocate_draft_pages",
        "draft, max_draft = plan.draft.trunk().first_nodes(room), min(plan.max_draft, room)",
        "draft, max_draft = plan.draft, plan.max_draft",
        ("test_a_draft_is_cut_to_the_free_pages",),
        "a draft is cut to the pages that are free",
    ),
    Mutation(
        "speculation-follows-any-plan",
        "_check",
        "if depth > limit or num_rows > budget:",
        "if depth > limit:",
        ("test_a_plan_that_exceeds_what_was_offered_is_not_followed",),
        "a plan never exceeds the rows that were offered",
    ),
)

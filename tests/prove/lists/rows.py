"""Mistakes in laying out a step: batches, draft rows, speculators."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "batch-pads-with-page-zero",
        "_rows",
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
        "batch-one-logit-row-less",
        "build_batch",
        "indices >= (ends - wanted)[rows]",
        "indices > (ends - wanted)[rows]",
        ("test_segments_are_laid_out_row_after_row",),
        "logits of every row that is verified",
    ),
    Mutation(
        "batch-takes-too-few-pages",
        "_pages",
        "if len(segment.page_ids) < count:",
        "if len(segment.page_ids) < count - 1:",
        ("test_segments_that_cannot_be_computed_are_refused",),
        "rows without a page are refused",
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
        "drafting-branch-writes-the-shared-page",
        "_own_pages",
        "return lease.page_ids[:shared] + lease.page_ids[-count:]",
        "return lease.page_ids[: shared + 1] + lease.page_ids[len(lease.page_ids) - count + 1 :]",
        ("test_a_branch_shares_all_pages_before_the_last_token",),
        "law 2: a branch writes pages of its own",
    ),
    Mutation(
        "drafting-counts-cached-pages-as-free",
        "allocate_draft_pages",
        "room = (len(lease.page_ids) + cache.num_free_pages) * cache.page_size",
        "room = (len(lease.page_ids) + cache.num_available_pages) * cache.page_size",
        ("test_what_is_cached_is_never_evicted_for_a_draft",),
        "what is committed is never evicted for a guess",
    ),
    Mutation(
        "drafting-keeps-a-draft-without-pages",
        "_cut",
        "return DraftPlan(plan.draft.first(room), min(plan.max_draft, room))",
        "return plan",
        ("test_a_draft_is_cut_to_the_free_pages",),
        "a draft is cut to the pages that are free",
    ),
    Mutation(
        "drafting-takes-one-page-too-many",
        "_own_pages",
        "if count > cache.num_free_pages:",
        "if count > cache.num_free_pages + 1:",
        ("test_branches_are_dropped_when_no_page_is_free",),
        "branches are dropped when pages are short",
    ),
    Mutation(
        "speculation-follows-any-plan",
        "_check",
        "if longest > limit or num_rows > budget:",
        "if longest > limit:",
        ("test_a_plan_that_exceeds_what_was_offered_is_not_followed",),
        "a plan never exceeds the rows that were offered",
    ),
    Mutation(
        "speculation-asks-the-broken-for-ever",
        "GuardedSpeculator._count",
        "            self.inner = NO_SPECULATION\n",
        "            pass\n",
        ("test_a_speculator_that_always_fails_is_not_asked_for_ever",),
        "a speculator that fails again and again is let go",
    ),
)

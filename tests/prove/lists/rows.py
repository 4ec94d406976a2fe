"""Mistakes in laying out a step: batches, draft rows, speculators."""

from __future__ import annotations

from ..mutation import Mutation

SCHEDULER = "tests/core/test_scheduler.py"
DRAFTING = "tests/core/test_drafting.py"

MUTATIONS = (
    Mutation(
        "batch-pads-with-page-zero",
        "core/batch.py",
        'mode="edge"',
        'mode="constant"',
        ("tests/core/test_ops_batch.py",),
        "I7: padding rows write to nobody's page",
    ),
    Mutation(
        "batch-positions-are-not-the-segments",
        "core/batch.py",
        "positions = indices + (starts - first_rows)[rows]",
        "positions = indices + starts[rows]",
        ("tests/core/test_ops_batch.py",),
        "positions begin anew with each segment",
    ),
    Mutation(
        "batch-one-logit-row-less",
        "core/batch.py",
        "indices >= (ends - wanted)[rows]",
        "indices > (ends - wanted)[rows]",
        ("tests/core/test_ops_batch.py",),
        "logits of every row that is verified",
    ),
    Mutation(
        "batch-takes-too-few-pages",
        "core/batch.py",
        "if len(segment.page_ids) < count:",
        "if len(segment.page_ids) < count - 1:",
        ("tests/core/test_ops_batch.py",),
        "rows without a page are refused",
    ),
    Mutation(
        "drafting-leaves-prompts-nothing",
        "core/drafting.py",
        "max(0, budget // 2 if others_wait else budget)",
        "max(0, budget)",
        (DRAFTING,),
        "half of the budget is kept for those who wait",
    ),
    Mutation(
        "drafting-branch-writes-the-shared-page",
        "core/drafting.py",
        "return lease.page_ids[:shared] + lease.page_ids[-count:]",
        "return lease.page_ids[: shared + 1] + lease.page_ids[len(lease.page_ids) - count + 1 :]",
        (DRAFTING,),
        "law 2: a branch writes pages of its own",
    ),
    Mutation(
        "drafting-counts-cached-pages-as-free",
        "core/drafting.py",
        "room = (len(lease.page_ids) + cache.num_free_pages) * cache.page_size",
        "room = (len(lease.page_ids) + cache.num_available_pages) * cache.page_size",
        (DRAFTING,),
        "what is committed is never evicted for a guess",
    ),
    Mutation(
        "drafting-keeps-a-draft-without-pages",
        "core/drafting.py",
        "return DraftPlan(draft, min(plan.max_draft, room))",
        "return plan",
        (DRAFTING,),
        "a draft is cut to the pages that are free",
    ),
    Mutation(
        "drafting-takes-one-page-too-many",
        "core/drafting.py",
        "if count > cache.num_free_pages:",
        "if count > cache.num_free_pages + 1:",
        (DRAFTING, "tests/test_branches.py"),
        "branches are dropped when pages are short",
    ),
    Mutation(
        "speculation-follows-any-plan",
        "core/speculation.py",
        "if longest > limit or num_rows > budget:",
        "if longest > limit:",
        (DRAFTING,),
        "a plan never exceeds the rows that were offered",
    ),
    Mutation(
        "speculation-asks-the-broken-for-ever",
        "core/speculation.py",
        "            self.inner = NO_SPECULATION\n",
        "            pass\n",
        (DRAFTING,),
        "a speculator that fails again and again is let go",
    ),
)

"""Fixed drafting plans: chains or trees of the draft model alone, as baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ...core.interface.draft import NO_DRAFT_PLAN, DraftPlan
from ...core.interface.protocols import Speculator
from ...core.interface.request import Request


@dataclass(frozen=True)
class FixedDrafts(Speculator):
    """Gives every request the same plan in every step.

    Only the draft model or head drafts.
    """

    plan_: DraftPlan

    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:  # noqa: ARG002
        """Whether all requests have speculation switched off."""
        return all(request.depth == 0 for request in requests)

    def plan(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        *,
        budget: int,
        num_prefill: int,  # noqa: ARG002
    ) -> Sequence[DraftPlan]:
        """Return the plan, cut to each request's limit and to an equal share of the budget."""
        plan, share = self.plan_, budget // max(1, len(requests))
        return [
            replace(plan, max_draft=min(limit, share, plan.max_draft))
            if request.depth != 0 and min(limit, share) > 0
            else NO_DRAFT_PLAN
            for limit, request in zip(limits, requests, strict=True)
        ]


def chain(num_tokens: int) -> FixedDrafts:
    """Return a speculator that drafts chains of `num_tokens` tokens."""
    return FixedDrafts(DraftPlan(max_draft=num_tokens))


def tree(num_nodes: int) -> FixedDrafts:
    """Return a speculator that drafts trees of the `num_nodes` likeliest nodes."""
    return FixedDrafts(DraftPlan(max_draft=num_nodes, may_branch=True))

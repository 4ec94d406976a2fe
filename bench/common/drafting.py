"""Fixed ways to draft, to measure the controller against: chains and trees of the model alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ...core.interface.draft import NO_DRAFT_PLAN, DraftPlan
from ...core.interface.protocols import Speculator
from ...core.interface.request import Request


@dataclass(frozen=True)
class FixedDrafts(Speculator):
    """Every request drafts by the same plan in every step, by the draft model or head alone."""

    plan_: DraftPlan

    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:  # noqa: ARG002
        """Never, unless all requests ask for none."""
        return all(request.depth == 0 for request in requests)

    def plan(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        *,
        budget: int,
        num_prefill: int,  # noqa: ARG002
    ) -> Sequence[DraftPlan]:
        """The plan within the limits and an equal share of the budget."""
        plan, share = self.plan_, budget // max(1, len(requests))
        return [
            replace(plan, max_draft=min(limit, share, plan.max_draft))
            if request.depth != 0 and min(limit, share) > 0
            else NO_DRAFT_PLAN
            for limit, request in zip(limits, requests, strict=True)
        ]


def chain(num_tokens: int) -> FixedDrafts:
    """Chains of so many tokens."""
    return FixedDrafts(DraftPlan(max_draft=num_tokens))


def tree(num_nodes: int) -> FixedDrafts:
    """Trees of the likeliest nodes, so many."""
    return FixedDrafts(DraftPlan(max_draft=num_nodes, may_branch=True))

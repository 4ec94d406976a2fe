"""A speculator that lets the draft model guess as many tokens in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretoken.core.interface.draft import DraftPlan
from foretoken.core.interface.protocols import Speculator
from foretoken.core.interface.request import Request


class FixedDepth(Speculator):
    """Lets the proposer guess ``depth`` tokens for every request that does not say otherwise."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:
        """Never: requests may ask for a depth of their own."""
        return False

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        """The same depth for all, within an equal share of the budget."""
        share = budget // max(1, len(requests))
        return [
            DraftPlan(max_draft=min(limit, share, self._depth(request)))
            for request, limit in zip(requests, limits, strict=True)
        ]

    def _depth(self, request: Request) -> int:
        return request.depth if isinstance(request.depth, int) else self.depth

    def describe(self) -> Mapping[str, object]:
        """The depth."""
        return {"depth": self.depth}

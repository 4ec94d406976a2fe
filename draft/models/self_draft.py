"""SelfProposer: the target in 4 bits drafts for itself, on the target's own KV pages.

The pending token and the nodes of a draft write KV into slots that the verification pass
overwrites: those of their positions, and a tree's side nodes into spare pages. The history is the
target's own KV. So there is nothing to catch up, no KV of a draft, and nothing to move.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ...core.execution.proposer import VerifiedRequest
from ...core.interface.speculator import ProposerTraits
from ...core.interface.step import Draft, ScheduledRequest
from ...core.ops.batch import ForwardOutput, RaggedBatch, Segment
from .draft_model import LmProposer, _Opened
from .tree_growth import ROOT, TreeGrowth


class SelfProposer(LmProposer):
    """Drafts with a rough copy of the target's weights, on the target's pool."""

    @property
    def traits(self) -> ProposerTraits:
        """How it works: nothing is ever caught up."""
        return ProposerTraits(tokens_per_pass=1, catches_up=False, weighs=True)

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """Nothing is kept of a request."""

    def propose(self, requests: Sequence[ScheduledRequest]) -> list[Draft]:
        """Grow the drafts of requests of which all but the last token has KV."""
        self._trees = {}
        trees = [self._tree(scheduled) for scheduled in requests]
        begun = [tree for tree in trees if self._may_draft(tree.scheduled)]
        if begun:
            self._grow(begun, self._first(begun))
        self._trees = {tree.scheduled.request_id: tree for tree in begun if tree.places}
        return [tree.draft() for tree in trees]

    def _may_draft(self, scheduled: ScheduledRequest) -> bool:
        return self._has_room(scheduled) and scheduled.start == len(scheduled.tokens) - 1

    def _first(self, trees: Sequence[TreeGrowth]) -> _Opened:
        segments = [
            Segment(s.tokens[-1:], s.start, s.page_ids, 1) for s in (t.scheduled for t in trees)
        ]
        places = [(tree, ROOT) for tree in trees]
        output, rows = self._forward(segments, places)
        return self._choose(places, rows, output)

    def observe(
        self,
        batch: RaggedBatch,  # noqa: ARG002
        output: ForwardOutput,  # noqa: ARG002
        verified: Sequence[VerifiedRequest],
    ) -> None:
        """Learn from verified trees; the runner has moved the KV, which is the target's."""
        for each in verified:
            tree = self._trees.pop(each.scheduled.request_id, None)
            if tree is not None and each.scheduled.max_draft and each.output.error is None:
                tree.judge(each.output.token_ids)

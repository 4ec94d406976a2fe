"""SelfProposer: the target in 4 bits drafts for itself, on the target's own KV pages.

The pending token and the nodes of a draft write KV into slots that the verification pass writes
again: those of their positions, and for a tree's side nodes those of spare pages, all of them the
request's own. The history is the target's own KV, of full precision. So a draft has no prompt to
compute, no KV to keep, and nothing to move. Of recurrent layers the same holds for entries of the
request's log, as long as none of them is folded into its state: drafts end with the page.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ...core.execution.proposer import PageRows, VerifiedRequest
from ...core.interface.draft import Draft
from ...core.interface.plan import ScheduledRequest
from ...core.interface.protocols import ProposerTraits
from ...core.model.decoder import Decoder
from ...core.ops.batch import ForwardOutput, RaggedBatch, Segment, Taps
from ...core.ops.kv_pool import KVPool
from .step_trees import StepTrees
from .tree_grower import TreeGrower
from .tree_growth import ROOT, TreeGrowth, judge_trees

SOURCE = "self"


class SelfProposer:
    """Drafts with ``decoder``, a rough copy of the target, on the target's ``pool``."""

    source = SOURCE
    taps: Taps = ()

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self._grower = TreeGrower(decoder, pool, SOURCE)
        self._trees: dict[str, TreeGrowth] = {}  # of the step under way, by request

    @property
    def traits(self) -> ProposerTraits:
        """Traits for prices: there is nothing to catch up with."""
        return ProposerTraits(tokens_per_pass=1, catches_up=False, weighs=True)

    @property
    def stored(self) -> tuple[PageRows, ...]:
        """Nothing of its own: it drafts on the target's KV."""
        return ()

    def adopt(self, page_ids: array[int]) -> None:
        """Do nothing: it keeps nothing that could come back."""

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """Nothing of a request is kept."""

    def propose(self, requests: Sequence[ScheduledRequest]) -> list[Draft]:
        """Grow the drafts of requests of which all but the last token has KV."""
        self._trees = {}  # those of a step that failed are void
        trees = [self._grower.tree(scheduled) for scheduled in requests]
        begun = [tree for tree in trees if self._may_draft(tree.scheduled)]
        if begun:
            each_last = [
                Segment(
                    s.tokens[-1:], s.start, s.page_ids, 1, extras=self._grower.extras(s, s.start)
                )
                for s in (tree.scheduled for tree in begun)
            ]
            first = self._grower.compute(each_last, [(tree, ROOT) for tree in begun])
            self._grower.grow(begun, first)
        self._trees = {tree.scheduled.request_id: tree for tree in begun if tree.rankings}
        return StepTrees(trees).drafts()

    def _may_draft(self, scheduled: ScheduledRequest) -> bool:
        return self._grower.has_room(scheduled) and scheduled.start == len(scheduled.tokens) - 1

    def observe(
        self,
        batch: RaggedBatch,  # noqa: ARG002
        output: ForwardOutput,  # noqa: ARG002
        verified: Sequence[VerifiedRequest],
    ) -> None:
        """Learn from verified trees; the runner has moved the KV, which is the target's."""
        judge_trees(self._trees, verified)

"""DraftOutcome: the outcome of a verified draft for the proposer that took part in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...core.interface.draft import Draft

NUM_BEST = 4  # maximum number of children that a pass finds for a node


class DraftNote(msgspec.Struct, frozen=True, gc=False):
    """A proposer's `Draft.note`: the passes that it ran for the draft, and its missing KV."""

    pass_rows: tuple[int, ...] = ()  # rows of each level that the proposer computed, in order
    num_uncached: int = 0  # tokens of the request whose KV the proposer lacks


NO_NOTE = DraftNote()


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """A verified draft of a request for which a proposer was asked.

    The draft may consist of looked-up tokens only. ``path``: the accepted nodes.
    """

    draft: Draft
    path: Sequence[int]

    @property
    def note(self) -> DraftNote:
        """The proposer's note, or an empty note if the proposer was not called."""
        return self.draft.note if isinstance(self.draft.note, DraftNote) else NO_NOTE

    @property
    def num_ranked(self) -> int:
        """Number of nodes that the proposer found; nodes that were only looked up do not count."""
        survival = self.draft.survival
        return sum(map(bool, survival)) if survival else len(self.draft.token_ids)

    @property
    def accepted_ranks(self) -> Sequence[int]:
        """Ranks of the accepted nodes among the nodes that the proposer found; 0 is the best.

        Nodes are ranked by the proposer's estimate of survival. Without estimates, their order in
        the draft is the rank.
        """
        survival = self.draft.survival
        if not survival:
            return self.path
        negated = [-each for each in survival]
        order = sorted(range(len(negated)), key=negated.__getitem__)
        ranks = {node: rank for rank, node in enumerate(order)}
        return tuple([ranks[node] for node in self.path if survival[node]])

"""DraftOutcome: what a verified draft tells about the proposer that took part in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...core.interface.draft import Draft

NUM_BEST = 4  # tokens behind a node that may become its children


class DraftNote(msgspec.Struct, frozen=True, gc=False):
    """A proposer's `Draft.note`: the work that it did for the draft, or has left to do."""

    pass_rows: tuple[int, ...] = ()  # of each level that it computed, one after another
    num_uncached: int = 0  # tokens of the request whose KV it lacks


NO_NOTE = DraftNote()


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """A draft in which a proposer took part, or that was verified in its place.

    ``path``: the accepted nodes.
    """

    draft: Draft
    path: Sequence[int]

    @property
    def note(self) -> DraftNote:
        """The proposer's note; an empty one if the proposer was not called."""
        return self.draft.note if isinstance(self.draft.note, DraftNote) else NO_NOTE

    @property
    def num_ranked(self) -> int:
        """Nodes that the proposer found itself."""
        survival = self.draft.survival
        return sum(map(bool, survival)) if survival else len(self.draft.token_ids)

    @property
    def accepted_ranks(self) -> Sequence[int]:
        """Ranks of accepted nodes among those that the proposer found, best is 0.

        They are ranked by its estimate of survival, or by their order if it made none.
        """
        survival = self.draft.survival
        if not survival:
            return self.path
        order = sorted(range(len(survival)), key=lambda node: -survival[node])
        return tuple(order.index(node) for node in self.path if survival[node])

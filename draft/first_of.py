"""FirstOf: several proposers in order of trust; the first that has a draft for a row wins."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ..core.proposer import DraftRow, Proposer
from ..core.step import Draft


class FirstOf:
    """Asks each proposer for the rows that those before it left without a draft."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """One draft for each row, each from a single proposer."""
        drafts = [Draft()] * len(rows)
        for proposer in self._proposers:
            left = [index for index, draft in enumerate(drafts) if not draft.token_ids]
            proposed = proposer.propose([rows[index] for index in left]) if left else ()
            for index, draft in zip(left, proposed, strict=True):
                drafts[index] = draft
        return drafts

    def forget(self, request_ids: Sequence[str], fresh_pages: array[int]) -> None:
        """Passed on to each."""
        for proposer in self._proposers:
            proposer.forget(request_ids, fresh_pages)

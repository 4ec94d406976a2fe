"""The protocol of everything that guesses.

A proposer runs in the model thread, just before the target's forward pass. What it proposes can
never change the output (see verify.py), only how many tokens a step yields, so it may fail,
guess wildly or return nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .step import PlanRow

DraftRow = PlanRow
"""A row as a proposer sees it: it may propose at most ``max_draft`` tokens after ``tokens``."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens guessed to follow a request's ``tokens``, and the source of each."""

    token_ids: Sequence[int] = ()
    sources: Sequence[str] = ()

    @classmethod
    def of(cls, token_ids: Sequence[int], source: str) -> Draft:
        """A draft whose tokens all come from one source."""
        return cls(token_ids, (source,) * len(token_ids))


class Proposer(Protocol):
    """Guesses the next tokens of a batch of requests."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Draft]:
        """One draft for each row, in order; each at most ``row.max_draft`` tokens long."""

    def forget(self, request_ids: Sequence[str], fresh_pages: array[int]) -> None:
        """Drop what is known of requests that left and of pages that were handed out anew."""

"""The protocol of what guesses with a model of its own.

A proposer runs in the model thread, just before the target's forward pass. What it proposes can
never change the output (see verify.py), only how many tokens a step yields, so it may fail,
guess wildly or return nothing. What guesses from token ids alone is a source of the `Speculator`
on the event loop's side (see speculation.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from .step import Draft, PlanRow

DraftRow = PlanRow
"""A row as a proposer sees it: it may propose at most ``max_draft`` tokens after ``tokens``."""


class Proposer(Protocol):
    """Guesses the next tokens of a batch of requests."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Draft]:
        """One draft for each row, in order; each at most ``row.max_draft`` tokens long."""

    def forget(self, request_ids: Sequence[str], fresh_pages: array[int]) -> None:
        """Drop what is known of requests that left and of pages that were handed out anew."""

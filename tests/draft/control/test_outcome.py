"""DraftOutcome: what of a verified draft was the proposer's, and how it ranked it."""

from __future__ import annotations

from foretoken.core.interface.draft import NO_DRAFT, Draft
from foretoken.draft.control.outcome import NO_NOTE, DraftNote, DraftOutcome

# The second node was looked up, and the proposer did not find it.
MIXED = Draft((5, 6, 7, 8), ("lm", "suffix", "lm", "lm"), survival=(0.5, 0.0, 0.2, 0.4))


def test_nodes_are_ranked_among_those_that_the_proposer_found() -> None:
    outcome = DraftOutcome(MIXED, (0, 1, 2))
    assert outcome.num_ranked == 3
    assert list(outcome.accepted_ranks) == [0, 2]


def test_without_odds_the_order_of_the_nodes_ranks_them() -> None:
    outcome = DraftOutcome(Draft.of((5, 6, 7), "lm"), (0, 1))
    assert (outcome.num_ranked, list(outcome.accepted_ranks)) == (3, [0, 1])


def test_a_draft_without_a_note_tells_of_no_work() -> None:
    assert DraftOutcome(NO_DRAFT, ()).note == NO_NOTE == DraftNote((), 0)
    noted = Draft(note=DraftNote((1, 2), num_uncached=3))
    assert DraftOutcome(noted, ()).note.num_uncached == 3

"""Prompt look-up."""

from __future__ import annotations

from array import array

from foretoken.core.params import SamplingParams
from foretoken.core.proposer import DraftRow
from foretoken.core.step import RowSampling
from foretoken.draft.ngram import NgramProposer


def draft_for(tokens: list[int], max_draft: int = 4, **options: int) -> list[int]:
    row = DraftRow(
        request_id="a",
        tokens=array("q", tokens),
        start=len(tokens) - 1,
        stop=len(tokens),
        page_ids=array("q"),
        sampling=RowSampling(params=SamplingParams(), seed=0, prompt_len=len(tokens)),
        max_draft=max_draft,
    )
    (draft,) = NgramProposer(**options).propose([row])
    assert len(draft.sources) == len(draft.token_ids)
    return list(draft.token_ids)


def test_what_followed_before_is_proposed_again() -> None:
    assert draft_for([1, 2, 3, 4, 5, 9, 1, 2, 3]) == [4, 5, 9, 1]


def test_the_most_recent_occurrence_wins() -> None:
    assert draft_for([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], max_draft=1) == [8]


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    tokens = [5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3]
    assert draft_for(tokens, max_draft=1) == [7]


def test_nothing_repeats_nothing_is_proposed() -> None:
    assert draft_for([1, 2, 3, 4, 5, 6]) == []
    assert draft_for([1, 2]) == []


def test_matches_shorter_than_the_least_are_ignored() -> None:
    assert draft_for([1, 2, 9, 1, 2], min_len=3) == []
    assert draft_for([1, 2, 9, 1, 2], min_len=2) == [9, 1, 2]


def test_a_match_must_be_aligned_to_whole_tokens() -> None:
    # 256 * k holds the bytes of k one position later: a search in bytes must not be fooled.
    tokens = [256, 512, 768, 99, 1, 2, 3]
    assert draft_for(tokens) == []


def test_a_loop_is_continued_up_to_the_end_of_what_is_known() -> None:
    assert draft_for([7, 8, 7, 8, 7, 8, 7], max_draft=6) == [8, 7]

"""Prompt look-up in the request's own tokens."""

from __future__ import annotations

import pytest

from foretoken.core.request import Request
from foretoken.draft.ngram import NgramSource


@pytest.fixture
def draft_for(make_request, index_all):
    def draft_for(tokens: list[int], most: int = 4) -> list[int]:
        ngram, request = NgramSource(num_slots=2**12), make_request(tokens)
        index_all(ngram, request)
        return drafted(ngram, request, most)

    return draft_for


def drafted(ngram: NgramSource, request: Request, most: int = 4) -> list[int]:
    guess = ngram.propose(request, most)
    assert guess is None or guess.source == "ngram"
    return [] if guess is None else list(guess.token_ids)


def test_what_followed_before_is_proposed_again(draft_for) -> None:
    assert draft_for([1, 2, 3, 4, 5, 9, 1, 2, 3]) == [4, 5, 9, 1]


def test_the_most_recent_occurrence_wins(draft_for) -> None:
    assert draft_for([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1) == [8]


def test_the_longest_match_wins_over_a_more_recent_one(draft_for) -> None:
    assert draft_for([5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3], 1) == [7]


def test_nothing_repeats_nothing_is_proposed(draft_for) -> None:
    assert draft_for([1, 2, 3, 4, 5, 6]) == []
    assert draft_for([1, 2]) == []
    assert draft_for([1, 2, 9, 1, 2]) == []


def test_a_loop_is_continued_for_as_long_as_asked(draft_for) -> None:
    assert draft_for([7, 8, 7, 8, 7, 8, 7], 6) == [8, 7, 8, 7, 8, 7]


def test_the_cached_part_of_the_prompt_is_looked_up_too(make_request, index_all) -> None:
    ngram = NgramSource(num_slots=2**12)
    request = make_request([*range(60), 5, 6, 7], cached=48)
    index_all(ngram, request)
    assert drafted(ngram, request) == [8, 9, 10, 11]


@pytest.mark.parametrize("num_slots", [2, 2**12], ids=["all collide", "none collide"])
def test_no_request_sees_another_even_of_the_same_namespace(
    make_request, index_all, num_slots: int
) -> None:
    ngram = NgramSource(num_slots=num_slots)
    other = make_request([1, 2, 3], [4, 5])
    index_all(ngram, other)
    assert drafted(ngram, make_request([1, 2, 3])) == []
    ngram.leave(other)
    ngram.flush()
    assert drafted(ngram, make_request([1, 2, 3])) == []


def test_leaving_unseen_is_no_error(make_request) -> None:
    NgramSource(num_slots=2).leave(make_request([1]))

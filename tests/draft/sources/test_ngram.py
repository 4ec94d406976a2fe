"""Prompt look-up: the suffix index in the request's own tokens alone."""

from __future__ import annotations

import pytest

from foretoken.core.interface.request import Request
from foretoken.draft.sources.suffix import ORDERS, SuffixSource


def ngram(num_slots: int = 2**12) -> SuffixSource:
    return SuffixSource(num_slots=num_slots, own_only=True)


def drafted(source: SuffixSource, request: Request, most: int = 4) -> list[int]:
    guesses = source.propose(request, most)
    return list(guesses[0].token_ids) if guesses else []


def test_what_followed_before_is_guessed_again_under_its_own_name(make_request, index_all) -> None:
    source, request = ngram(), make_request([1, 2, 3, 4, 5, 9, 1, 2, 3], cached=5)
    index_all(source, request)
    (guess,) = source.propose(request, 4)
    assert (list(guess.token_ids), guess.source) == ([4, 5, 9, 1], "ngram")
    assert guess.kind == ORDERS.index(3)


@pytest.mark.parametrize("num_slots", [2, 2**12], ids=["all collide", "none collide"])
def test_no_request_sees_another_even_of_the_same_namespace(
    make_request, index_all, num_slots: int
) -> None:
    source = ngram(num_slots)
    other = make_request([1, 2, 3, 4], [5, 6])
    index_all(source, other)
    assert drafted(source, make_request([1, 2, 3, 4])) == []
    source.leave(other)
    source.flush()
    assert drafted(source, make_request([1, 2, 3, 4])) == []


def test_nothing_outlives_a_request(make_request, index_all) -> None:
    source = ngram()
    for _ in range(5):
        request = make_request([1, 2, 3], [4, 1, 2, 3])
        index_all(source, request)
        assert drafted(source, request, 1) == [4]
        source.leave(request)
    assert not source._index.histories
    assert not source._live
    assert source._num_kept == 0


def test_leaving_unseen_is_no_error(make_request) -> None:
    ngram().leave(make_request([1]))

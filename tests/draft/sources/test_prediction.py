"""Following the caller's own guess at the answer."""

from __future__ import annotations

import pytest

from foretoken.core.interface.request import Request
from foretoken.draft.sources.prediction import PredictionSource

PROMPT = [1, 2, 3]
IN_SYNC, RESYNCED = 0, 1


@pytest.fixture
def predicted(make_request):
    def predicted(*prediction: int) -> Request:
        return make_request(PROMPT, prediction=prediction)

    return predicted


def drafted(source: PredictionSource, request: Request, most: int = 3) -> list[int]:
    guesses = source.propose(request, most)
    return list(guesses[0].token_ids) if guesses else []


def test_it_starts_at_the_beginning_and_follows(predicted) -> None:
    source, request = PredictionSource(), predicted(10, 11, 12, 13, 14)
    (guess,) = source.propose(request, 3)
    assert (list(guess.token_ids), guess.kind, guess.source) == ([10, 11, 12], 0, "prediction")
    request.tokens.extend([10, 11])
    assert drafted(source, request) == [12, 13, 14]
    assert drafted(source, request, 1) == [12]
    request.tokens.extend([12, 13, 14])
    assert drafted(source, request) == []


@pytest.mark.parametrize("prediction", [None, []])
def test_without_a_prediction_nothing_is_proposed(prediction, make_request) -> None:
    request = make_request(PROMPT, prediction=prediction)
    assert not PredictionSource().propose(request, 4)


def test_a_departure_is_lost_until_two_tokens_are_found_again(predicted) -> None:
    source, request = PredictionSource(), predicted(*range(10, 40))
    request.tokens.extend([10, 11, 12, 99])
    assert drafted(source, request) == []
    request.tokens.append(14)
    assert drafted(source, request) == []
    request.tokens.append(15)
    (guess,) = source.propose(request, 3)
    assert (list(guess.token_ids), guess.kind) == ([16, 17, 18], RESYNCED)


def test_it_is_trusted_again_after_a_while_in_sync(predicted) -> None:
    source, request = PredictionSource(), predicted(*range(10, 90))
    request.tokens.extend([99, 20, 21])
    kinds = []
    for at in range(22, 60, 4):
        (guess,) = source.propose(request, 3)
        kinds.append(guess.kind)
        request.tokens.extend(range(at, at + 4))
    assert kinds[0] == RESYNCED
    assert kinds[-1] == IN_SYNC
    assert kinds == sorted(kinds, reverse=True)


def test_the_next_place_is_taken_before_an_earlier_one(predicted) -> None:
    source, request = PredictionSource(), predicted(5, 6, 70, 10, 11, 5, 6, 71, 5, 6, 72)
    request.tokens.extend([5, 6, 70, 10, 99, 5, 6])
    assert drafted(source, request, 1) == [71]


def test_what_stands_only_earlier_is_found_too(predicted) -> None:
    source, request = PredictionSource(), predicted(5, 6, 7, 8, 9, 10)
    request.tokens.extend([5, 6, 7, 8, 9])
    assert drafted(source, request) == [10]
    request.tokens.extend([5, 6])
    assert drafted(source, request) == [7, 8, 9]


def test_a_longer_run_of_equal_tokens_is_surer_than_a_nearer_one(predicted) -> None:
    source, request = PredictionSource(), predicted(1, 2, 3, 4, 50, 3, 4, 60, 1, 2, 3, 4, 70)
    request.tokens.extend([9, 1, 2, 3, 4])
    assert drafted(source, request, 1) == [50]
    request.tokens.extend([99, 1, 2, 3, 4])
    assert drafted(source, request, 1) == [70]


def test_the_prompt_does_not_help_to_find_the_place(predicted) -> None:
    source, request = PredictionSource(), predicted(50, 2, 3, 9, 60)
    request.tokens.append(9)
    assert drafted(source, request) == []


def test_a_place_is_aligned_to_whole_tokens(predicted) -> None:
    source, request = PredictionSource(), predicted(256, 512, 768, 1024)
    request.tokens.extend([1, 2])
    assert drafted(source, request) == []


def test_each_request_has_its_own_place(predicted) -> None:
    source, one, two = PredictionSource(), predicted(10, 11, 12), predicted(10, 11, 12)
    one.tokens.append(10)
    assert drafted(source, one) == [11, 12]
    assert drafted(source, two) == [10, 11, 12]
    assert source.index(one) == 0
    source.leave(one)
    source.leave(one)
    source.flush()
    assert drafted(source, two) == [10, 11, 12]


def test_a_text_made_to_be_searched_for_ever_is_given_up(make_request) -> None:
    # In bytes, 256 holds the pattern of 1 between any two of its tokens.
    request = make_request([9], [1, 1, 1], prediction=[256] * 4000)
    assert not PredictionSource().propose(request, 4)

"""Simulated acceptance."""

from __future__ import annotations

import pytest

from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.request import Request
from foretoken.draft.sources.oracle import OracleSource
from foretoken.draft.sources.source import Priors

PROMPT = [1, 2, 3]
ANSWER = list(range(100, 1100))


def oracle(accuracy: float = 1.0, **options: int) -> OracleSource:
    return OracleSource(accuracy, 1100, **options)


def drafted(source: OracleSource, request: Request, most: int = 3) -> list[int]:
    guesses = source.propose(request, most)
    return list(guesses[0].token_ids) if guesses else []


def test_the_answer_to_the_same_prompt_is_replayed(make_request) -> None:
    source = oracle()
    assert drafted(source, make_request(PROMPT)) == []
    source.leave(make_request(PROMPT, [4, 5, 6, 7]))
    request = make_request(PROMPT)
    (guess,) = source.propose(request, 3)
    assert (list(guess.token_ids), guess.source, guess.kind) == ([4, 5, 6], "oracle:1.0", 0)
    request.tokens.extend([4, 5])
    assert drafted(source, request) == [6, 7]
    assert drafted(source, make_request([1, 2])) == []


def test_it_goes_on_by_position_whatever_was_said(make_request) -> None:
    source = oracle()
    source.leave(make_request(PROMPT, [4, 5, 6, 7]))
    assert drafted(source, make_request(PROMPT, [99, 98])) == [6, 7]
    assert drafted(source, make_request(PROMPT, [4, 5, 6, 7, 8])) == []


def test_the_share_of_right_tokens_is_the_accuracy(make_request) -> None:
    source = oracle(0.8)
    source.leave(make_request(PROMPT, ANSWER))
    right = [
        token == answer
        for seed in range(10)
        for token, answer in zip(
            drafted(source, make_request(PROMPT, seed=seed), 1000), ANSWER, strict=True
        )
    ]
    assert 0.78 < sum(right) / len(right) < 0.82
    assert source.name == "oracle:0.8"
    assert source.priors == Priors.constant(0.8)


def test_the_spoilt_tokens_depend_on_the_seed_and_the_position_alone(make_request) -> None:
    source = oracle(0.5)
    source.leave(make_request(PROMPT, ANSWER))
    whole = drafted(source, make_request(PROMPT, seed=2**64 - 1), 1000)
    assert drafted(source, make_request(PROMPT, ANSWER[:500], seed=2**64 - 1), 500) == whole[500:]
    assert drafted(source, make_request(PROMPT, seed=7), 1000) != whole


def test_an_oracle_that_is_always_wrong_stays_in_the_vocabulary(make_request) -> None:
    source = oracle(0.0)
    source.leave(make_request(PROMPT, ANSWER))
    tokens = drafted(source, make_request(PROMPT), 1000)
    assert all(token != right for token, right in zip(tokens, ANSWER, strict=True))
    assert all(0 <= token < 1100 for token in tokens)


def test_the_last_answer_and_the_own_namespace_count(make_request) -> None:
    source = oracle()
    for namespace, token in ((None, 4), ("a", 5), (None, 6)):
        source.leave(make_request(PROMPT, [token], namespace=namespace))
    assert drafted(source, make_request(PROMPT)) == [6]
    assert drafted(source, make_request(PROMPT, namespace="a")) == [5]
    assert drafted(source, make_request(PROMPT, namespace="b")) == []
    source.flush("a")
    assert drafted(source, make_request(PROMPT, namespace="a")) == []
    assert drafted(source, make_request(PROMPT)) == [6]


def test_the_bound_drops_the_answer_used_least_recently(make_request) -> None:
    source = oracle(max_tokens=5)
    source.leave(make_request([1], [11, 12]))
    source.leave(make_request([2], [21, 22]))
    assert drafted(source, make_request([1])) == [11, 12]
    source.leave(make_request([3], [31, 32]))
    assert drafted(source, make_request([2])) == []
    assert drafted(source, make_request([1])) == [11, 12]
    assert drafted(source, make_request([3])) == [31, 32]


def test_the_same_answer_said_again_takes_no_more_room(make_request) -> None:
    source = oracle(max_tokens=5)
    for prompt in ([1], [2], [2], [2]):
        source.leave(make_request(prompt, [11, 12]))
    assert drafted(source, make_request([1])) == [11, 12]


@pytest.mark.parametrize("accuracy", [-0.1, 1.1, float("nan")])
def test_an_accuracy_that_is_no_probability_is_refused(accuracy) -> None:
    with pytest.raises(InvalidRequest) as error:
        oracle(accuracy)
    assert error.value.param == "draft"


def test_a_flush_reaches_answers_that_are_being_replayed(make_request) -> None:
    source = OracleSource(1.0, 100)
    source.leave(make_request([1, 2], [3, 4, 5], namespace="a"))
    live = make_request([1, 2], namespace="a")
    assert source.propose(live, 3)
    source.flush("a")
    assert not source.propose(live, 3)

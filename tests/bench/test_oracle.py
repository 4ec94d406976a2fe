"""Simulated acceptance."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from foretoken.bench.common.oracle import OracleSource
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.draft.sources.source import Priors

PROMPT = [1, 2, 3]
ANSWER = list(range(1000))


def oracle(accuracy: float = 1.0, **options: int) -> OracleSource:
    return OracleSource(accuracy, **options)


def make_request(
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    seed: int = 0,
    namespace: str | None = None,
) -> Request:
    sampling = SamplingMetadata(params=TokenSamplingParams(), seed=seed, prompt_len=len(prompt))
    tokens = array("q", [*prompt, *output])
    return Request(request_id="r", tokens=tokens, sampling=sampling, namespace=namespace)


def drafted(source: OracleSource, request: Request, most: int = 3) -> list[int]:
    guesses = source.propose(request, most)
    return list(guesses[0].token_ids) if guesses else []


def test_the_answer_to_the_same_prompt_is_replayed() -> None:
    source = oracle()
    assert drafted(source, make_request(PROMPT)) == []
    source.leave(make_request(PROMPT, [4, 5, 6, 7]))
    request = make_request(PROMPT)
    (guess,) = source.propose(request, 3)
    assert (list(guess.token_ids), guess.kind) == ([4, 5, 6], 0)
    assert guess.source == "oracle:1.0 (simulated)"
    request.tokens.extend([4, 5])
    assert drafted(source, request) == [6, 7]
    assert drafted(source, make_request([1, 2])) == []


def test_it_goes_on_by_position_whatever_was_said() -> None:
    source = oracle()
    source.leave(make_request(PROMPT, [4, 5, 6, 7]))
    assert drafted(source, make_request(PROMPT, [99, 98])) == [6, 7]
    assert drafted(source, make_request(PROMPT, [4, 5, 6, 7, 8])) == []


def test_the_share_of_right_tokens_is_the_accuracy() -> None:
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
    assert source.name == "oracle:0.8 (simulated)"
    assert source.priors == Priors.constant(0.8)


def test_the_spoilt_tokens_depend_on_the_seed_and_the_position_alone() -> None:
    source = oracle(0.5)
    source.leave(make_request(PROMPT, ANSWER))
    whole = drafted(source, make_request(PROMPT, seed=2**64 - 1), 1000)
    assert drafted(source, make_request(PROMPT, ANSWER[:500], seed=2**64 - 1), 500) == whole[500:]
    assert drafted(source, make_request(PROMPT, seed=7), 1000) != whole


def test_an_oracle_that_is_always_wrong_stays_in_the_vocabulary() -> None:
    source = oracle(0.0)
    source.leave(make_request(PROMPT, ANSWER))
    tokens = drafted(source, make_request(PROMPT), 1000)
    assert all(token != right for token, right in zip(tokens, ANSWER, strict=True))
    assert all(0 <= token < 1000 for token in tokens)


def test_the_last_answer_and_the_own_namespace_count() -> None:
    source = oracle()
    for namespace, token in ((None, 4), ("a", 5), (None, 6)):
        source.leave(make_request(PROMPT, [token], namespace=namespace))
    assert drafted(source, make_request(PROMPT)) == [6]
    assert drafted(source, make_request(PROMPT, namespace="a")) == [5]
    assert drafted(source, make_request(PROMPT, namespace="b")) == []
    source.flush("a")
    assert drafted(source, make_request(PROMPT, namespace="a")) == []
    assert drafted(source, make_request(PROMPT)) == [6]


def test_the_bound_drops_the_answer_used_least_recently() -> None:
    source = oracle(max_tokens=5)
    source.leave(make_request([1], [11, 12]))
    source.leave(make_request([2], [21, 22]))
    assert drafted(source, make_request([1])) == [11, 12]
    source.leave(make_request([3], [31, 32]))
    assert drafted(source, make_request([2])) == []
    assert drafted(source, make_request([1])) == [11, 12]
    assert drafted(source, make_request([3])) == [31, 32]


def test_the_same_answer_said_again_takes_no_more_room() -> None:
    source = oracle(max_tokens=5)
    for prompt in ([1], [2], [2], [2]):
        source.leave(make_request(prompt, [11, 12]))
    assert drafted(source, make_request([1])) == [11, 12]


def test_a_flush_reaches_answers_that_are_being_replayed() -> None:
    source = OracleSource(1.0)
    source.leave(make_request([1, 2], [3, 4, 5], namespace="a"))
    live = make_request([1, 2], namespace="a")
    assert source.propose(live, 3)
    source.flush("a")
    assert not source.propose(live, 3)

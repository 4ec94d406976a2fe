"""The suffix index: what followed the last tokens before, in whatever request of the namespace."""

from __future__ import annotations

import random
from array import array

import pytest

from foretoken.core.request import Request
from foretoken.draft.source import INDEX_CHUNK
from foretoken.draft.suffix import ORDERS, PRIORS, SuffixSource

NUM_SLOTS = 2**16


def source(**options: int) -> SuffixSource:
    return SuffixSource(**{"num_slots": NUM_SLOTS, **options})


def random_tokens(seed: int, number: int, vocab: int = 50_000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(number)]


def drafted(suffix: SuffixSource, request: Request, most: int = 4) -> list[int]:
    guess = suffix.propose(request, most)
    return [] if guess is None else list(guess.token_ids)


# -- what is found ------------------------------------------------------------------------------


def test_what_followed_in_the_request_itself_follows_again(make_request, index_all) -> None:
    suffix, request = source(), make_request([1, 2, 3, 4, 5, 9, 1, 2, 3])
    index_all(suffix, request)
    assert drafted(suffix, request) == [4, 5, 9, 1]


def test_what_followed_in_another_live_request_follows_again(make_request, index_all) -> None:
    suffix, request = source(), make_request([7, 1, 2, 3])
    other = make_request([0, 1, 2, 3], [4, 5])
    index_all(suffix, other)
    assert drafted(suffix, request) == [4, 5]  # no more is known yet
    other.tokens.extend([6, 8, 9])
    assert drafted(suffix, request) == [4, 5, 6, 8]


def test_what_an_ended_request_said_follows_again(make_request) -> None:
    suffix = source()
    suffix.leave(make_request([1, 2, 3], [4, 5, 6]))
    assert drafted(suffix, make_request([9, 2, 3, 4])) == [5, 6]


def test_the_longest_match_wins_over_a_more_recent_one(make_request, index_all) -> None:
    suffix, request = source(), make_request([5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3])
    index_all(suffix, request)
    guess = suffix.propose(request, 1)
    assert guess is not None
    assert (list(guess.token_ids), ORDERS[guess.kind]) == ([7], 4)


def test_of_equal_matches_the_most_recent_wins(make_request, index_all) -> None:
    suffix, request = source(), make_request([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3])
    index_all(suffix, request)
    assert drafted(suffix, request, 1) == [8]


@pytest.mark.parametrize("kind", range(len(ORDERS)))
def test_the_kind_says_how_many_tokens_were_equal(kind, make_request, index_all) -> None:
    suffix, text = source(), random_tokens(0, 100)
    index_all(suffix, make_request(text))
    guess = suffix.propose(make_request([-1, *text[50 - ORDERS[kind] : 50]]), 3)
    assert guess is not None
    assert (guess.kind, list(guess.token_ids), guess.source) == (kind, text[50:53], "suffix")
    assert len(PRIORS) == len(ORDERS)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6]])
def test_nothing_repeats_nothing_is_proposed(tokens, make_request, index_all) -> None:
    suffix, request = source(), make_request(tokens)
    index_all(suffix, request)
    assert suffix.propose(request, 4) is None


def test_a_loop_goes_round_beyond_what_is_known(make_request, index_all) -> None:
    suffix, request = source(), make_request([7, 8, 7, 8, 7, 8, 7])
    index_all(suffix, request)
    assert drafted(suffix, request, 6) == [8, 7, 8, 7, 8, 7]


def test_a_long_prompt_is_taken_in_by_chunks_and_found_everywhere(make_request, index_all) -> None:
    suffix, text = source(num_slots=2**20), random_tokens(1, 3 * INDEX_CHUNK + 17)
    request = make_request(text)
    assert suffix.index(request) == INDEX_CHUNK
    index_all(suffix, request)
    assert suffix.index(request) == 0
    for at in range(30, len(text) - 4, 97):
        found = drafted(suffix, make_request(text[at - 30 : at]))
        assert found in ([], text[at : at + 4])  # overwritten now and then
        if at % 5 == 0:
            assert found


@pytest.mark.parametrize("step", [1, 2, 7, 40, 300])
def test_growing_in_small_steps_or_large_ones_is_the_same(step, make_request, index_all) -> None:
    text = random_tokens(2, 600, vocab=4)
    whole, grown = source(), source()
    request = make_request(text[:5])
    for start in range(5, len(text), step):
        request.tokens.extend(text[start : start + step])
        drafted(grown, request)
        index_all(grown, request)
    index_all(whole, make_request(text))
    for at in range(100, 600, 3):
        asked = text[at - 40 : at]
        assert drafted(grown, make_request(asked)) == drafted(whole, make_request(asked))


def test_a_wide_token_id_is_not_taken_for_its_neighbour(make_request, index_all) -> None:
    suffix = source()
    index_all(suffix, make_request([256, 512, 768, 99]))
    assert drafted(suffix, make_request([1, 2, 3])) == []


# -- what is not found --------------------------------------------------------------------------


def test_another_namespace_learns_nothing(make_request, index_all) -> None:
    suffix, text = source(), random_tokens(3, 60)
    index_all(suffix, make_request(text, namespace="a"))
    suffix.leave(make_request(text, [1], namespace="b"))
    assert drafted(suffix, make_request(text[:40])) == []
    assert drafted(suffix, make_request(text[:40], namespace="c")) == []
    assert drafted(suffix, make_request(text[:40], namespace="a")) == text[40:44]


@pytest.mark.parametrize("num_slots", [2, 16, 2**14])
def test_every_guess_is_what_followed_in_its_namespace(num_slots, make_request) -> None:
    """Random actors over a table so small that nearly every entry belongs to someone else."""
    rng, suffix = random.Random(num_slots), source(num_slots=num_slots, max_tokens=400)
    live: list[Request] = []
    said: dict[str | None, list[list[int]]] = {None: [], "a": [], "b": []}
    num_guesses = 0
    for turn in range(3000):
        if len(live) < 4:
            namespace = rng.choice([None, "a", "b"])
            cached = rng.randrange(20) if rng.random() < 0.5 else 0
            prompt = [rng.randrange(3) for _ in range(rng.randrange(cached + 1, 60))]
            live.append(make_request(prompt, namespace=namespace, cached=cached))
        request = rng.choice(live)
        request.tokens.extend(rng.randrange(3) for _ in range(rng.randrange(1, 20)))
        guess = suffix.propose(request, 5)
        if guess is not None:
            num_guesses += 1
            last = list(request.tokens[-ORDERS[guess.kind] :])
            run = [*last, *guess.token_ids]
            seen = [list(r.tokens) for r in live if r.namespace == request.namespace]
            own = [*request.tokens, *guess.token_ids]  # a loop goes round its own end
            assert any(holds(text, run) for text in [*seen, *said[request.namespace], own[:-1]])
        suffix.index(request)
        if rng.random() < 0.1:
            live.remove(request)
            suffix.leave(request)
            said[request.namespace].append(list(request.tokens))
        if turn % 1000 == 999:
            suffix.flush("a")
            said["a"].clear()
    assert num_guesses > 50


def holds(text: list[int], run: list[int]) -> bool:
    return any(text[at : at + len(run)] == run for at in range(len(text) - len(run) + 1))


def test_cached_tokens_are_not_taken_in_again(make_request, index_all) -> None:
    suffix, text = source(), random_tokens(4, 100)
    assert index_all(suffix, make_request(text, cached=80)) == 20
    assert drafted(suffix, make_request(text[:60])) == []
    assert drafted(suffix, make_request(text[:80])) == text[80:84]


# -- what is kept -------------------------------------------------------------------------------


def test_the_answer_outlives_its_request_without_the_shared_prompt(make_request) -> None:
    suffix, prompt = source(max_tokens=40), random_tokens(5, 1000)
    suffix.leave(make_request(prompt, [1, 2, 3, 4, 5], cached=990))  # 24 + 10 + 5 tokens are kept
    assert drafted(suffix, make_request(prompt)) == [1, 2, 3, 4]


def test_the_least_recently_used_answers_are_dropped_first(make_request) -> None:
    suffix = source(max_tokens=12)
    suffix.leave(make_request([1, 2, 3], [4, 5]))
    suffix.leave(make_request([11, 12, 13], [14, 15]))
    assert drafted(suffix, make_request([1, 2, 3])) == [4, 5]  # used now
    suffix.leave(make_request([21, 22, 23], [24, 25]))
    assert drafted(suffix, make_request([11, 12, 13])) == []
    assert drafted(suffix, make_request([1, 2, 3])) == [4, 5]
    assert drafted(suffix, make_request([21, 22, 23])) == [24, 25]


def test_an_answer_longer_than_the_bound_is_not_kept(make_request) -> None:
    suffix = source(max_tokens=4)
    suffix.leave(make_request([1, 2, 3], [4, 5]))
    assert drafted(suffix, make_request([1, 2, 3])) == []


def test_a_flush_forgets_the_answers_of_the_named_namespaces(make_request) -> None:
    suffix = source()
    for namespace in ("a", "b", None):
        suffix.leave(make_request([1, 2, 3], [4], namespace=namespace))
    suffix.flush("a")
    assert drafted(suffix, make_request([1, 2, 3], namespace="a")) == []
    assert drafted(suffix, make_request([1, 2, 3], namespace="b")) == [4]
    suffix.flush()
    assert drafted(suffix, make_request([1, 2, 3], namespace="b")) == []
    assert drafted(suffix, make_request([1, 2, 3])) == []


def test_requests_that_said_nothing_leave_nothing(make_request) -> None:
    suffix = source()
    suffix.leave(make_request([1, 2, 3, 4]))
    assert drafted(suffix, make_request([1, 2, 3])) == []


def test_the_request_is_only_read(make_request, index_all) -> None:
    suffix, request = source(), make_request([1, 2, 3], [4, 1, 2, 3])
    index_all(suffix, request)
    drafted(suffix, request)
    suffix.leave(request)
    request.tokens.append(9)  # its array was lent, and is free again
    assert request.tokens == array("q", [1, 2, 3, 4, 1, 2, 3, 9])
    assert drafted(suffix, make_request([1, 2, 3]), 5) == [4, 1, 2, 3]  # a copy was kept

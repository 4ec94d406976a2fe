"""Continuing the most recent request that began with the very same tokens."""

from __future__ import annotations

import random
from array import array

import pytest

from foretoken.core.interface.request import Request
from foretoken.draft.sources.prefix import PrefixSource
from foretoken.radix_cache import RadixTree

PROMPT = [1, 2, 3]
SINGLE, FORKED = 0, 1
BOUNDS = (50, 200, 1000, 10_000)  # tokens


def drafted(radix: PrefixSource, request: Request, most: int = 4) -> list[int]:
    guesses = radix.propose(request, most)
    return list(guesses[0].token_ids) if guesses else []


@pytest.fixture
def after(make_request):
    """A source that has seen these answers to PROMPT, in this order."""

    def after(*answers: list[int], **options: int) -> PrefixSource:
        radix = PrefixSource(**options)
        for answer in answers:
            radix.leave(make_request(PROMPT, answer))
        return radix

    return after


def test_the_same_prompt_drafts_the_earlier_answer_from_its_first_token(
    after, make_request
) -> None:
    radix, request = after([4, 5, 6, 7, 8, 9]), make_request(PROMPT)
    (guess,) = radix.propose(request, 4)
    assert (list(guess.token_ids), guess.source, guess.kind) == ([4, 5, 6, 7], "radix", SINGLE)
    request.tokens.extend([4, 5, 6])
    assert drafted(radix, request) == [7, 8, 9]
    request.tokens.extend([7, 8, 9])
    assert drafted(radix, request) == []


def test_the_whole_prefix_must_be_equal(after, make_request) -> None:
    radix = after([4, 5, 6])
    assert drafted(radix, make_request([9, 2, 3])) == []
    assert drafted(radix, make_request([2, 3])) == []


def test_a_request_that_left_the_tree_drafts_nothing(after, make_request) -> None:
    radix, request = after([4, 5, 6, 7]), make_request(PROMPT, [4])
    assert drafted(radix, request) == [5, 6, 7]
    request.tokens.append(9)
    assert drafted(radix, request) == []
    request.tokens.extend([6, 7])
    assert drafted(radix, request) == []


def test_a_request_that_left_comes_back_when_another_went_its_way(after, make_request) -> None:
    radix, request = after([4, 5, 6, 7]), make_request(PROMPT, [4, 9])
    assert drafted(radix, request) == []
    radix.leave(make_request(PROMPT, [4, 9, 10, 11]))
    assert drafted(radix, request) == [10, 11]


def test_a_longer_conversation_is_followed_where_a_shorter_one_ended(after, make_request) -> None:
    radix, request = after([4, 5]), make_request(PROMPT, [4, 5])
    assert drafted(radix, request) == []
    radix.leave(make_request([*PROMPT, 4, 5, 6], [7]))
    assert drafted(radix, request) == [6, 7]


def test_a_request_that_came_before_all_others_looks_again_after_a_while(make_request) -> None:
    radix, request = PrefixSource(), make_request(PROMPT)
    assert drafted(radix, request) == []
    radix.leave(make_request(PROMPT, range(100, 200)))
    for token in range(100, 150):
        request.tokens.append(token)
        found = drafted(radix, request)
    assert found == [150, 151, 152, 153]


def test_at_a_fork_the_most_recent_answer_is_continued(after, make_request) -> None:
    radix, request = after([4, 5, 6], [4, 8, 9]), make_request(PROMPT)
    (guess,) = radix.propose(request, 4)
    assert (list(guess.token_ids), guess.kind) == ([4, 8, 9], FORKED)
    radix.leave(make_request(PROMPT, [4, 5, 6]))  # said again
    assert drafted(radix, request) == [4, 5, 6]


def test_the_kind_remembers_a_fork_of_the_answer_but_not_of_the_prompt(make_request) -> None:
    radix = PrefixSource()
    for prompt, answer in (([1, 2], [4, 5, 6, 7]), ([1, 2], [4, 8]), ([1, 3], [9])):
        radix.leave(make_request(prompt, answer))
    (guess,) = radix.propose(make_request([1, 3]), 4)
    assert guess.kind == SINGLE
    request = make_request([1, 2])
    radix.propose(request, 4)
    request.tokens.extend([4, 5])
    for asked in (request, make_request([1, 2], [4, 5])):  # a cursor that moved, one that searched
        (guess,) = radix.propose(asked, 4)
        assert (list(guess.token_ids), guess.kind) == ([6, 7], FORKED)


def test_a_prompt_that_joins_the_tree_late_passes_no_fork_of_the_answer(make_request) -> None:
    radix, request = PrefixSource(), make_request([1, 2, 3])
    radix.leave(make_request([1], [9]))
    assert drafted(radix, request) == []
    radix.leave(make_request([1, 2, 3], [4]))
    (guess,) = radix.propose(request, 4)
    assert (list(guess.token_ids), guess.kind) == ([4], SINGLE)


def test_namespaces_are_apart(make_request) -> None:
    radix = PrefixSource()
    radix.leave(make_request(PROMPT, [4, 5], namespace="a"))
    assert drafted(radix, make_request(PROMPT)) == []
    assert drafted(radix, make_request(PROMPT, namespace="b")) == []
    assert drafted(radix, make_request(PROMPT, namespace="a")) == [4, 5]


def test_a_flush_forgets_under_way(make_request) -> None:
    radix, request = PrefixSource(), make_request(PROMPT, namespace="a")
    for namespace in ("a", "b"):
        radix.leave(make_request(PROMPT, [4, 5], namespace=namespace))
    assert drafted(radix, request) == [4, 5]
    radix.flush("a")
    assert drafted(radix, request) == []
    assert drafted(radix, make_request(PROMPT, namespace="b")) == [4, 5]
    radix.flush()
    assert drafted(radix, make_request(PROMPT, namespace="b")) == []


def test_the_bound_drops_what_was_used_least_recently(make_request) -> None:
    radix = PrefixSource(max_tokens=100)
    for first in range(0, 200, 20):
        radix.leave(make_request([first], range(first + 1, first + 20)))
    assert drafted(radix, make_request([180])) == [181, 182, 183, 184]
    assert drafted(radix, make_request([0])) == []


def test_short_requests_have_no_more_nodes_than_the_bound(make_request) -> None:
    radix = PrefixSource(max_nodes=10)
    for first in range(0, 100, 4):
        radix.leave(make_request([first], range(first + 1, first + 4)))
        assert radix._tree.num_nodes <= 10
    assert drafted(radix, make_request([96])) == [97, 98, 99]
    assert drafted(radix, make_request([0])) == []


def test_requests_that_said_nothing_leave_nothing(make_request) -> None:
    radix = PrefixSource()
    radix.leave(make_request([1, 2, 3, 4]))
    assert drafted(radix, make_request([1, 2])) == []


@pytest.mark.parametrize("seed", range(8))
def test_cursors_stay_true_while_the_tree_is_cut_and_dropped(seed, make_request) -> None:
    """Random actors: what is proposed is in the tree, from the first token of the request on."""
    rng, radix = random.Random(seed), PrefixSource(max_tokens=BOUNDS[seed % 4])
    live: list[Request] = []
    num_guesses = 0
    for _ in range(1500):
        if len(live) < 5:
            live.append(make_request([rng.randrange(2) for _ in range(3)], namespace="a"))
        request = rng.choice(live)
        for guess in radix.propose(request, 6):
            num_guesses += 1
            assert known(radix, [*request.tokens, *guess.token_ids])
            followed = rng.randrange(len(guess.token_ids) + 1)
            request.tokens.extend(guess.token_ids[:followed])
        request.tokens.append(rng.randrange(2))
        if rng.random() < 0.1:
            live.remove(request)
            radix.leave(request)
        if rng.random() < 0.002:
            radix.flush("a")
    assert num_guesses > 40


@pytest.mark.parametrize("seed", range(4))
def test_without_a_bound_a_cursor_finds_all_that_a_search_would(seed, make_request) -> None:
    rng, radix = random.Random(seed), PrefixSource()
    radix.leave(make_request([0], [0]))
    live = [make_request([0]) for _ in range(40)]
    while live:
        request = rng.choice(live)
        fresh = make_request([0], request.tokens[1:])
        assert drafted(radix, request) == drafted(radix, fresh)
        request.tokens.extend(rng.randrange(2) for _ in range(rng.randrange(1, 4)))
        if len(request.tokens) > 14:
            live.remove(request)
            radix.leave(request)


def known(radix: PrefixSource, tokens: list[int]) -> bool:
    tree: RadixTree = radix._tree
    return tree.match(array("q", tokens), namespace="a").num_tokens == len(tokens)

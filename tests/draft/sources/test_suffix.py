"""The suffix index: what followed the last tokens before, in this request or in others."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from foretoken.core.interface.request import Request
from foretoken.draft.sources.source import BUCKETS, INDEX_CHUNK, GuardedSource, Guess, SourceIndexer
from foretoken.draft.sources.suffix import (
    FIRST_KIND,
    FIRST_ORDERS,
    NUM_SHARED,
    ORDERS,
    PRIORS,
    SHARED_KIND,
    SuffixIndex,
    SuffixSource,
)

NUM_SLOTS = 2**16
OLDEST_OF_4, OLDEST_OF_2 = FIRST_KIND, FIRST_KIND + 1


def source(**options: int) -> SuffixSource:
    return SuffixSource(**{"num_slots": NUM_SLOTS, **options})


def random_tokens(seed: int, number: int, vocab: int = 50_000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(number)]


def guessed(suffix: SuffixSource, request: Request, most: int = 4) -> dict[int, list[int]]:
    """The tokens of each guess, by kind."""
    guesses = suffix.propose(request, most)
    assert all(guess.source == "suffix" for guess in guesses)
    return {guess.kind: list(guess.token_ids) for guess in guesses}


def drafted(suffix: SuffixSource, request: Request, most: int = 4) -> list[int]:
    """The first guess."""
    return next(iter(guessed(suffix, request, most).values()), [])


def order_of(kind: int) -> int:
    """Number of last tokens that are equal in a guess of this kind."""
    if kind >= SHARED_KIND:
        return ORDERS[kind - SHARED_KIND]
    return ORDERS[FIRST_ORDERS[kind - FIRST_KIND]] if kind >= FIRST_KIND else ORDERS[kind]


def test_every_kind_has_a_prior() -> None:
    assert ORDERS == (16, 8, 4, 3, 2, 1)
    assert (FIRST_KIND, SHARED_KIND) == (6, 8)
    for kinds in (PRIORS.greedy, PRIORS.sampled):
        assert len(kinds) == SHARED_KIND + NUM_SHARED
        assert {len(chances) for chances in kinds} == {len(BUCKETS)}


# -- in the request's own tokens ----------------------------------------------------------------


def test_what_followed_before_follows_again(make_request, index_all) -> None:
    suffix, request = source(), make_request([1, 2, 3, 4, 5, 9, 1, 2, 3])
    index_all(suffix, request)
    assert guessed(suffix, request) == {ORDERS.index(3): [4, 5, 9, 1]}


@pytest.mark.parametrize("kind", range(len(ORDERS)))
def test_the_kind_is_the_number_of_equal_tokens(kind, make_request, index_all) -> None:
    text, order = random_tokens(0, 40), ORDERS[kind]
    request = make_request([*text, -1, *text[20 - order : 20]])
    suffix = source()
    index_all(suffix, request)
    assert guessed(suffix, request, 3) == {kind: text[20:23]}


def test_the_newest_place_of_the_most_equal_tokens_is_guessed(make_request, index_all) -> None:
    suffix = source()
    request = make_request([5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3])
    index_all(suffix, request)
    assert next(iter(guessed(suffix, request, 1).items())) == (ORDERS.index(4), [7])
    request = make_request([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3])
    index_all(suffix, request)
    assert next(iter(guessed(suffix, request, 1).items())) == (ORDERS.index(3), [8])


@pytest.mark.parametrize(("run", "kind"), [([1, 2, 3, 4], OLDEST_OF_4), ([3, 4], OLDEST_OF_2)])
def test_the_oldest_place_is_guessed_beside_the_newest(run, kind, make_request, index_all) -> None:
    suffix = source()
    request = make_request([*run, 70, *run, 80, *run, 90, *run])
    index_all(suffix, request)
    assert guessed(suffix, request, 1) == {ORDERS.index(len(run)): [90], kind: [70]}


def test_a_place_that_is_both_oldest_and_newest_is_guessed_once(make_request, index_all) -> None:
    suffix, request = source(), make_request([1, 2, 3, 4, 70, 1, 2, 3, 4])
    index_all(suffix, request)
    assert guessed(suffix, request, 1) == {ORDERS.index(4): [70]}


def test_the_oldest_place_of_four_tokens_goes_before_that_of_two(make_request, index_all) -> None:
    suffix = source()
    request = make_request([3, 4, 60, 1, 2, 3, 4, 70, 1, 2, 3, 4, 80, 1, 2, 3, 4])
    index_all(suffix, request)
    assert guessed(suffix, request, 1) == {ORDERS.index(4): [80], OLDEST_OF_4: [70]}


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6]])
def test_nothing_repeats_nothing_is_guessed(tokens, make_request, index_all) -> None:
    suffix, request = source(), make_request(tokens)
    index_all(suffix, request)
    assert guessed(suffix, request) == {}


def test_a_loop_goes_round_beyond_what_is_known(make_request, index_all) -> None:
    suffix, request = source(), make_request([9, 7, 8, 7, 8, 7, 8, 7])
    index_all(suffix, request)
    for tokens in guessed(suffix, request, 6).values():
        assert tokens == [8, 7, 8, 7, 8, 7]
    request = make_request([5, 6, 1, 2, 3, 1, 2, 3])
    index_all(suffix, request)
    assert drafted(suffix, request, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_cached_tokens_of_a_prompt_are_its_own_too(make_request, index_all) -> None:
    suffix, text = source(), random_tokens(4, 100)
    request = make_request([*text, *text[30:34]], cached=80)
    assert index_all(suffix, request) == 104
    assert drafted(suffix, request) == text[34:38]


# -- in other requests --------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(NUM_SHARED))
def test_the_kind_tells_what_others_said_by_the_number_of_equal_tokens(
    number, make_request, index_all
) -> None:
    suffix, text = source(), random_tokens(0, 60)
    index_all(suffix, make_request(text))
    request = make_request([-1, *text[30 - ORDERS[number] : 30]])
    assert guessed(suffix, request, 3) == {SHARED_KIND + number: text[30:33]}


def test_fewer_than_four_tokens_are_not_looked_up_in_others(make_request, index_all) -> None:
    suffix, text = source(), random_tokens(0, 60)
    index_all(suffix, make_request(text))
    assert guessed(suffix, make_request([-1, *text[27:30]])) == {}


def test_another_live_request_is_followed_as_it_grows(make_request, index_all) -> None:
    suffix, request = source(), make_request([7, 1, 2, 3, 4])
    other = make_request([0, 1, 2, 3, 4], [5, 6])
    index_all(suffix, other)
    assert drafted(suffix, request) == [5, 6]  # no more is known yet
    other.tokens.extend([8, 9, 10])
    assert drafted(suffix, request) == [5, 6, 8, 9]


def test_what_an_ended_request_said_follows_again(make_request) -> None:
    suffix = source()
    suffix.leave(make_request([1, 2, 3], [4, 5, 6]))
    assert drafted(suffix, make_request([9, 1, 2, 3, 4])) == [5, 6]


def test_others_are_asked_beside_the_own_tokens_by_no_fewer_tokens(make_request, index_all) -> None:
    suffix = source()
    index_all(suffix, make_request([1, 2, 3, 4, 90]))
    request = make_request([3, 4, 60, 1, 2, 3, 4])
    index_all(suffix, request)
    assert guessed(suffix, request, 1) == {ORDERS.index(2): [60], SHARED_KIND + 2: [90]}
    own = [1, 2, 3, 4, 5, 6, 7, 8, 60, 1, 2, 3, 4, 5, 6, 7, 8]  # eight tokens are surer than four
    request = make_request(own)
    index_all(suffix, request)
    index_all(suffix, make_request([0, 5, 6, 7, 8, 90]))
    assert guessed(suffix, request, 1) == {ORDERS.index(8): [60]}


@pytest.mark.parametrize(("said", "asked"), [(None, "b"), ("a", "b"), ("a", None)])
def test_another_namespace_sees_nothing(said, asked, make_request, index_all) -> None:
    suffix, text = source(), random_tokens(3, 60)
    index_all(suffix, make_request(text, namespace=said))
    suffix.leave(make_request(text, [1], namespace=said))
    assert guessed(suffix, make_request(text[:40], namespace=asked)) == {}
    assert drafted(suffix, make_request(text[:40], namespace=said)) == text[40:44]


def test_cached_tokens_are_not_indexed_for_others_again(make_request, index_all) -> None:
    suffix, text = source(), random_tokens(4, 100)
    index_all(suffix, make_request(text, cached=80))
    assert drafted(suffix, make_request(text[:60])) == []
    assert drafted(suffix, make_request(text[:80])) == text[80:84]


# -- indexing -----------------------------------------------------------------------------------


def test_a_long_prompt_is_indexed_by_chunks_and_found_everywhere(make_request, index_all) -> None:
    suffix, text = source(num_slots=2**20), random_tokens(1, 2 * INDEX_CHUNK + 17)
    request = make_request(text)
    assert suffix.index(request) == INDEX_CHUNK
    index_all(suffix, request)
    assert suffix.index(request) == 0
    num_found = 0
    for at in range(30, len(text) - 4, 97):
        found = drafted(suffix, make_request(text[at - 30 : at]))
        assert found in ([], text[at : at + 4])  # overwritten now and then
        num_found += bool(found)
    assert num_found > 0.9 * len(range(30, len(text) - 4, 97))


@pytest.mark.parametrize("cached", [0, 37])
@pytest.mark.parametrize("step", [1, 7, 12, 13, 300])
def test_growing_by_few_tokens_or_by_many_is_the_same(step: int, cached: int, make_request) -> None:
    """A few tokens are hashed and indexed one by one, many at once: the tables must be equal."""
    text = random_tokens(2, 600, vocab=4)
    grown, whole = SuffixIndex(2**18), SuffixIndex(2**18)
    tokens = array("q", text[:cached])
    history = grown.open(tokens, scope=None, shared_salt=5, shared_from=cached)
    for start in range(cached, len(text), step):
        tokens.extend(text[start : start + step])
        grown.find(history)
        grown.index(history, INDEX_CHUNK)
    at_once = whole.open(array("q", text), scope=None, shared_salt=5, shared_from=cached)
    assert whole.index(at_once, INDEX_CHUNK) == len(text)
    assert history.hashes == at_once.hashes
    differ = np.count_nonzero(grown._table != whole._table)
    assert differ <= 10, "but for places that two writers claim"
    assert np.count_nonzero(whole._table) > 2500


@pytest.mark.parametrize("chunk", [1, 9, 50, 700])
def test_the_newest_and_the_oldest_places_are_the_same_in_whatever_order_they_are_indexed(
    chunk: int,
) -> None:
    """Cached tokens are indexed behind the new ones, from their end to their start."""
    text = random_tokens(3, 600, vocab=4)
    forwards, backwards = SuffixIndex(2**18), SuffixIndex(2**18)
    expected = forwards.open(array("q", text), scope=None, shared_salt=None)
    found = backwards.open(array("q", text), scope=None, shared_salt=None, shared_from=500)
    assert forwards.index(expected, INDEX_CHUNK) == len(text)
    while backwards.index(found, chunk):
        pass
    assert np.count_nonzero(forwards._table != backwards._table) <= 10


def agent_turn(make_request) -> tuple[list[int], list[int], Request]:
    """A long cached conversation, what this turn adds, and the turn's request."""
    cached, new = random_tokens(4, 30_000, vocab=40_000), random_tokens(5, 1_000, vocab=40_000)
    request = make_request([*cached, *new])
    request.usage.cached_tokens = len(cached)
    return cached, new, request


def test_what_a_turn_adds_to_a_long_cached_conversation_is_found_by_others(make_request) -> None:
    """In four steps: the cached tokens, which others have indexed, must not use up their time."""
    suffix = source()
    indexer = SourceIndexer([GuardedSource(suffix)])
    _, new, request = agent_turn(make_request)
    indexer.join(make_request([1, 2, 3]))  # while any runs, indexing is bounded
    indexer.join(request)
    for token in (7, 8, 9, 10):
        request.tokens.append(token)
        indexer.work()
    indexer.leave(request)
    indexer.work()
    for at in (20, 500, 990):
        assert drafted(suffix, make_request(new[at - 18 : at])) == new[at : at + 4]


def test_a_long_prompt_that_ends_soon_is_indexed_to_its_end_a_chunk_at_a_time(make_request) -> None:
    suffix = source()
    indexer = SourceIndexer([GuardedSource(suffix)])
    text = random_tokens(6, 10 * INDEX_CHUNK, vocab=40_000)
    request, other = make_request([*text, 1]), make_request([1, 2, 3])
    request.tokens.append(2)
    indexer.join(other)
    indexer.join(request)
    indexer.leave(request)
    for _ in range(12):
        indexer.work()
    at = len(text) - 40
    assert drafted(suffix, make_request(text[at - 18 : at])) == text[at : at + 4]


def test_the_newest_tokens_of_a_long_cached_prompt_are_found_first(make_request) -> None:
    """The request's own look-ups find its cached part later, its end before its start."""
    suffix = source(num_slots=2**22)
    cached, new, request = agent_turn(make_request)
    suffix.index(request)
    request.tokens.extend(new[100:103])
    assert drafted(suffix, request) == new[103:107]
    request.tokens.extend(cached[-50:-47])
    assert drafted(suffix, request) == cached[-47:-43]
    request.tokens.extend(cached[50:53])
    assert drafted(suffix, request) != cached[53:57]
    while suffix.index(request):
        pass
    assert drafted(suffix, request) == cached[53:57]


def test_a_wide_token_id_is_not_taken_for_its_neighbour(make_request, index_all) -> None:
    suffix = source()
    index_all(suffix, make_request([256, 512, 768, 1024, 99]))
    assert drafted(suffix, make_request([1, 2, 3, 4])) == []


@pytest.mark.parametrize("num_slots", [2, 16, 2**14])
def test_every_guess_is_what_followed_in_its_namespace(num_slots, make_request) -> None:
    """Random actors over a table so small that nearly every entry belongs to another request."""
    rng, suffix = random.Random(num_slots), source(num_slots=num_slots, max_tokens=400)
    live: list[Request] = []
    ended: dict[str | None, list[list[int]]] = {None: [], "a": [], "b": []}
    kinds: set[int] = set()
    for turn in range(2000):
        if len(live) < 4:
            namespace = rng.choice([None, "a", "b"])
            cached = rng.randrange(20) if rng.random() < 0.5 else 0
            prompt = [rng.randrange(3) for _ in range(rng.randrange(cached + 1, 60))]
            live.append(make_request(prompt, namespace=namespace, cached=cached))
        request = rng.choice(live)
        request.tokens.extend(rng.randrange(3) for _ in range(rng.randrange(1, 20)))
        for guess in suffix.propose(request, 5):
            kinds.add(guess.kind)
            others = [each for each in live if each.namespace == request.namespace]
            texts = [list(each.tokens) for each in others if each is not request]
            assert was_said(guess, request, [*texts, *ended[request.namespace]])
        suffix.index(request)
        if rng.random() < 0.1:
            live.remove(request)
            suffix.leave(request)
            ended[request.namespace].append(list(request.tokens))
        if turn % 1000 == 999:
            suffix.flush("a")
            ended["a"].clear()
    assert len(kinds) >= (9 if num_slots > 16 else 3)


def was_said(guess: Guess, request: Request, others: list[list[int]]) -> bool:
    """Whether the last tokens and the guess stand in a text of the namespace.

    The request's own text goes round at its end. In a table this small its slots are claimed by
    others now and then, whose tokens may be the same; what is labelled as theirs must be theirs.
    """
    run = [*request.tokens[-order_of(guess.kind) :], *guess.token_ids]
    own = [*request.tokens, *guess.token_ids][:-1]
    is_shared = guess.kind >= SHARED_KIND
    return any(_holds(text, run) for text in (others if is_shared else [own, *others]))


def _holds(text: list[int], run: list[int]) -> bool:
    return any(text[at : at + len(run)] == run for at in range(len(text) - len(run) + 1))


# -- what is kept -------------------------------------------------------------------------------


def test_an_answer_outlives_its_request_without_the_shared_prompt(make_request) -> None:
    suffix, prompt = source(max_tokens=31), random_tokens(5, 1000)
    suffix.leave(make_request(prompt, [1, 2, 3, 4, 5], cached=990))  # 16 + 10 + 5 tokens are kept
    assert drafted(suffix, make_request(prompt)) == [1, 2, 3, 4]
    assert suffix._num_kept == 31
    suffix.leave(make_request([6], [7]))
    assert drafted(suffix, make_request(prompt)) == []


def test_the_least_recently_used_answers_are_dropped_first(make_request) -> None:
    suffix = source(max_tokens=14)
    suffix.leave(make_request([1, 2, 3, 4], [5, 6]))
    suffix.leave(make_request([11, 12, 13, 14], [15, 16]))
    assert drafted(suffix, make_request([1, 2, 3, 4])) == [5, 6]  # used now
    suffix.leave(make_request([21, 22, 23, 24], [25, 26]))
    assert drafted(suffix, make_request([11, 12, 13, 14])) == []
    assert drafted(suffix, make_request([1, 2, 3, 4])) == [5, 6]
    assert drafted(suffix, make_request([21, 22, 23, 24])) == [25, 26]


def test_memory_stays_within_its_bound_whatever_comes(make_request) -> None:
    suffix, rng = source(max_tokens=500), random.Random(0)
    table = suffix._index._table
    for number in range(300):
        suffix.leave(make_request(random_tokens(number, rng.randrange(1, 90)), [1, 2, 3]))
        kept = sum(len(history.tokens) for history in suffix._ended.values())
        assert kept == suffix._num_kept <= 500
    assert set(suffix._index.histories) == set(suffix._ended)
    assert suffix._index._table is table
    assert not suffix._live
    suffix.leave(make_request(random_tokens(0, 600), [1]))
    assert suffix._num_kept <= 500, "an answer longer than the bound is not kept"


def test_of_short_requests_no_more_than_the_bound_are_kept(make_request) -> None:
    suffix = source(max_requests=10)
    for number in range(25):
        suffix.leave(make_request(random_tokens(number, 20), [1]))
    assert len(suffix._ended) == len(suffix._index.histories) == 10
    assert drafted(suffix, make_request(random_tokens(24, 20))) == [1]
    assert drafted(suffix, make_request(random_tokens(14, 20))) == []


def test_a_flush_forgets_the_answers_of_the_named_namespaces(make_request) -> None:
    suffix = source()
    for namespace in ("a", "b", None):
        suffix.leave(make_request([1, 2, 3, 4], [5], namespace=namespace))
    suffix.flush("a")
    assert drafted(suffix, make_request([1, 2, 3, 4], namespace="a")) == []
    assert drafted(suffix, make_request([1, 2, 3, 4], namespace="b")) == [5]
    suffix.flush()
    assert drafted(suffix, make_request([1, 2, 3, 4], namespace="b")) == []
    assert drafted(suffix, make_request([1, 2, 3, 4])) == []
    assert (suffix._num_kept, len(suffix._ended)) == (0, 0)


def test_a_flush_lets_live_requests_go_on(make_request, index_all) -> None:
    suffix, request = source(), make_request([1, 2, 3, 4, 5, 1, 2, 3, 4])
    index_all(suffix, request)
    suffix.flush()
    assert drafted(suffix, request, 1) == [5]


def test_requests_that_said_nothing_leave_nothing(make_request) -> None:
    suffix = source()
    suffix.leave(make_request([1, 2, 3, 4, 5]))
    assert drafted(suffix, make_request([1, 2, 3, 4])) == []


def test_the_request_is_only_read(make_request, index_all) -> None:
    suffix, request = source(), make_request([1, 2, 3, 4], [5, 1, 2, 3, 4])
    index_all(suffix, request)
    drafted(suffix, request)
    suffix.leave(request)
    request.tokens.append(9)  # its array was lent, and is free again
    assert request.tokens == array("q", [1, 2, 3, 4, 5, 1, 2, 3, 4, 9])
    assert drafted(suffix, make_request([1, 2, 3, 4]), 6) == [5, 1, 2, 3, 4]  # a copy was kept

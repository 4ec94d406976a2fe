"""Tokens that a constraint forces are drafted, however late; tokens that it forbids are not."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from foretoken.core.interface.draft import NO_DRAFT_PLAN
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import ConstraintFailed, Mask
from foretoken.draft.control.controller import Controller
from foretoken.draft.control.cost_model import CostModel, StepProfile
from foretoken.draft.control.estimators import AcceptanceModel
from foretoken.draft.sources.grammar import GrammarSource
from foretoken.draft.sources.source import Guess, Priors, Source
from foretoken.draft.speculator import DraftSpeculator

CHEAP = StepProfile({1: 0.1, 64: 0.1001, 256: 0.101}, {1: 0.0001, 64: 0.0002})


class Script:
    """Forces ``script`` from each of some places on, and never allows a 9."""

    def __init__(self, script: dict[int, Sequence[int]], fails_at: int = -1) -> None:
        self.script, self.fails_at, self.calls = script, fails_at, 0
        self.forks: list[Script] = []

    def allowed(self, tokens: array[int], start: int, tail: Sequence[int]) -> Mask | None:
        return np.ones(10, dtype=np.bool_).data

    def forced(self, tokens: array[int], start: int, most: int) -> Sequence[int]:
        self.calls += 1
        at = len(tokens) - start
        if at == self.fails_at:
            raise ConstraintFailed("broken")
        return list(self.script.get(at, ()))[:most]

    def count_allowed(self, tokens: array[int], start: int, guess: Sequence[int]) -> int:
        return next((i for i, token_id in enumerate(guess) if token_id == 9), len(guess))

    def fork(self) -> Script:
        self.forks.append(Script(self.script, self.fails_at))
        return self.forks[-1]


class Parrot:
    """Always guesses the same."""

    name, priors = "parrot", Priors.constant(0.9)

    def __init__(self, *token_ids: int) -> None:
        self.token_ids, self.num_asked = array("q", token_ids), 0

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        self.num_asked += 1
        return (Guess(self.token_ids[:most], self.name, 0),) if self.token_ids else ()

    def index(self, request: Request, *, for_others: bool = False) -> int:
        return 0

    def leave(self, request: Request) -> None: ...

    def flush(self, *namespaces: str | None) -> None: ...


@pytest.fixture
def constrained(make_request):
    def make(script: Script, output: Sequence[int] = ()) -> Request:
        request = make_request([1, 2], output)
        request.sampling = replace(request.sampling, constraint=script)
        request.max_len = 1000
        return request

    return make


def make_speculator(
    *sources: Source, depth: Literal["auto"] | int = "auto", overlaps: bool = False
) -> DraftSpeculator:
    return DraftSpeculator(
        sources,
        Controller(CostModel(CHEAP)),
        AcceptanceModel(),
        depth=depth,
        overlaps=overlaps,
        clock=lambda: 0.0,
    )


def drafted(speculator: DraftSpeculator, *requests: Request) -> list[tuple[list[int], set[str]]]:
    for request in requests:
        if not request.num_computed:
            speculator.join(request)
        request.num_computed = len(request.tokens) - 1  # it decodes
    plans = speculator.plan(requests, [20] * len(requests), budget=200, num_prefill=0)
    return [(list(plan.draft.token_ids), set(plan.draft.sources)) for plan in plans]


# -- the source -----------------------------------------------------------------------------------


def test_the_run_that_is_forced_is_proposed_by_a_matcher_of_the_loops_own(constrained) -> None:
    script, source = Script({0: [5, 6, 7]}), GrammarSource()
    request = constrained(script)
    assert source.propose(request, 2) == (Guess(array("q", [5, 6]), "grammar", 0),)
    assert source.propose(request, 9) == (Guess(array("q", [5, 6, 7]), "grammar", 0),)
    assert script.calls == 0
    assert [fork.calls for fork in script.forks] == [2]


def test_the_same_place_is_not_looked_at_twice(constrained) -> None:
    script, source = Script({0: [5], 1: [6]}), GrammarSource()
    request = constrained(script)
    assert source.propose(request, 9) == source.propose(request, 9)
    assert script.forks[0].calls == 1
    request.tokens.append(5)
    assert source.propose(request, 9) == (Guess(array("q", [6]), "grammar", 0),)


def test_without_a_constraint_or_where_it_is_free_nothing_is_proposed(
    constrained, make_request
) -> None:
    source = GrammarSource()
    assert not source.propose(make_request([1]), 9)
    assert not source.propose(constrained(Script({3: [5]})), 9)


def test_what_ended_is_forgotten(constrained) -> None:
    source = GrammarSource()
    request = constrained(Script({0: [5]}))
    source.propose(request, 9)
    source.leave(request)
    assert not source._followers
    assert source.index(request) == 0
    source.flush()


def test_a_constraint_that_fails_is_asked_no_more(constrained) -> None:
    script, source = Script({0: [5], 1: [6]}, fails_at=0), GrammarSource()
    request = constrained(script)
    guess = Guess(array("q", [9]), "x", 0)
    assert not source.propose(request, 9)
    request.tokens.append(5)
    assert not source.propose(request, 9)
    assert source.trim(request, guess) is guess
    assert script.forks[0].calls == 1


@pytest.mark.parametrize(
    ("guess", "left"),
    [
        ([5, 6, 1], [5, 6, 1]), ([5], [5]), ([5, 7, 1], [5]), ([7], None), ([5, 6, 9, 1], [5, 6]),
        ([5, 6, 1, 9], [5, 6, 1]), ([9], None),
    ],
)  # fmt: skip
def test_guesses_are_cut_where_they_cannot_come_true(constrained, guess, left) -> None:
    source, request = GrammarSource(), constrained(Script({0: [5, 6]}))
    source.propose(request, 9)
    cut = source.trim(request, Guess(array("q", guess), "x", 3))
    assert cut == (None if left is None else Guess(array("q", left), "x", 3))


# -- the speculator -------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", ["auto", 4])
def test_a_forced_run_is_drafted_though_another_guess_looked_better(constrained, depth) -> None:
    speculator = make_speculator(GrammarSource(), Parrot(*[3] * 9), depth=depth)
    assert drafted(speculator, constrained(Script({0: [5, 6]}))) == [([5, 6], {"grammar"})]


def test_guesses_of_others_are_cut_where_the_grammar_refuses_them(
    constrained, make_request
) -> None:
    speculator = make_speculator(GrammarSource(), Parrot(3, 3, 9, 3), depth=4)
    plans = drafted(speculator, constrained(Script({})), make_request([1]))
    assert plans == [([3, 3], {"parrot"}), ([3, 3, 9, 3], {"parrot"})]


def test_without_the_source_nothing_is_cut(constrained) -> None:
    speculator = make_speculator(Parrot(3, 9), depth=4)
    assert drafted(speculator, constrained(Script({0: [5]}))) == [([3, 9], {"parrot"})]


def test_a_forced_run_is_found_however_long_nothing_was_drafted(constrained, make_request) -> None:
    """Look-ups of others back off; a grammar may force a run at any token."""
    speculator = make_speculator(GrammarSource(), parrot := Parrot(), overlaps=True)
    request, other = constrained(Script({11: [5, 6]})), make_request([1, 2])
    found = []
    for _ in range(12):
        found.append(drafted(speculator, request, other))
        for each in (request, other):
            each.tokens.append(4)
    assert found[:11] == [[([], set())] * 2] * 11
    assert found[11] == [([5, 6], {"grammar"}), ([], set())]
    assert not speculator.drafts_nothing([request])
    assert parrot.num_asked < 2 * 12, "the other one was silent at times"


def test_a_request_that_wants_no_drafts_gets_none_that_are_forced(constrained) -> None:
    speculator = make_speculator(GrammarSource())
    request = constrained(Script({0: [5, 6]}))
    request.depth = 0
    (plan,) = speculator.plan([request], [20], budget=200, num_prefill=0)
    assert plan is NO_DRAFT_PLAN

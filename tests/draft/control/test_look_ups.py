"""Look-ups of many requests at once find what look-ups of each request alone find."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.draft.control.draft_state import DraftState
from foretoken.draft.control.estimators import AcceptanceModel, GuessClass
from foretoken.draft.control.look_ups import LookUps, survival_table
from foretoken.draft.sources.merge import GuessTree
from foretoken.draft.sources.source import GuardedSource, Guess, Priors, Source

STOP, IMAGE = 1, -1
NUM_KINDS = 2


class Random(Source):
    """A source with zero to two guesses for a request; they depend on its id and length only."""

    def __init__(self, name: str) -> None:
        self.name, self.priors = name, Priors.constant(0.9, 0.6)

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        rng = random.Random(f"{self.name} {request.request_id} {len(request.tokens)}")
        return [
            Guess(array("q", self._token_ids(rng, most)), self.name, rng.randrange(NUM_KINDS))
            for _ in range(rng.randrange(3))
        ]

    def _token_ids(self, rng: random.Random, most: int) -> list[int]:
        # few token ids, so that guesses share their first tokens; some stop and some are images
        choices = [5, 5, 5, 6, 7, STOP, IMAGE if rng.random() < 0.1 else 5]
        return rng.choices(choices, k=rng.randrange(most + 1))


def requests_of(rng: random.Random, count: int) -> list[Request]:
    return [
        Request(
            request_id=str(index),
            tokens=array("q", range(10, 20 + index)),
            sampling=SamplingMetadata(
                params=TokenSamplingParams(temperature=rng.choice([0.0, 1.0])),
                seed=0,
                prompt_len=10,
            ),
            stop_ids=frozenset(rng.choice([(), (STOP,)])),
        )
        for index in range(count)
    ]


def learnt(rng: random.Random, sources: Sequence[Source], count: int) -> AcceptanceModel:
    """Return a model in which some requests have a hazard of their own for some sources."""
    made = AcceptanceModel()
    for source in sources:
        made.register(source.name, source.priors)
    for _ in range(5 * count):
        made.score(
            rng.choice(sources).name,
            rng.randrange(NUM_KINDS),
            str(rng.randrange(2 * count)),
            rng.randrange(6),
            missed=rng.random() < 0.5,
            sampled=rng.random() < 0.5,
        )
    return made


def described(tree: GuessTree | None) -> object:
    if tree is None:
        return None
    draft = tree.draft(99)
    return list(draft.token_ids), draft.sources, draft.parents, tree.survival.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_all_requests_at_once_get_the_trees_of_each_alone(seed: int) -> None:
    rng = random.Random(seed)
    sources, count = [Random(name) for name in "abc"], rng.randrange(1, 20)
    requests = requests_of(rng, count)
    look_ups = LookUps([GuardedSource(each) for each in sources], None, learnt(rng, sources, count))
    most = [rng.choice([0, 1, 8, 24]) for _ in requests]
    together, alone = [DraftState(each) for each in requests], [DraftState(e) for e in requests]
    trees = look_ups.find(together, most)
    singly = [look_ups.find([state], [each])[0] for state, each in zip(alone, most, strict=True)]
    assert [described(tree) for tree in trees] == [described(tree) for tree in singly]
    assert [each.unscored for each in together] == [each.unscored for each in alone]
    assert [tree is None for tree, each in zip(trees, most, strict=True) if not each] == [
        True for each in most if not each
    ]
    table = survival_table(trees)
    sizes = [0 if tree is None else len(tree.survival) for tree in trees]
    assert table.shape == (count, max(sizes))
    for row, tree, size in zip(table, trees, sizes, strict=True):
        assert row[:size].tolist() == ([] if tree is None else tree.survival.tolist())
        assert not row[size:].any()


def test_the_survival_of_many_guesses_is_that_of_each_one() -> None:
    rng, names = random.Random(3), "ab"
    made = learnt(rng, [Random(name) for name in names], 8)
    classes = [
        GuessClass(name, kind, str(request), sampled=sampled)
        for name in names
        for kind in range(NUM_KINDS)
        for request in range(20)
        for sampled in (False, True)
    ]
    table = made.survivals(classes, 24)
    assert len(np.unique(table[:, 0])) > 20  # requests have hazards of their own
    for row, each in zip(table, classes, strict=True):
        assert row.tolist() == made.survivals([each], 24)[0].tolist()


def test_a_request_for_which_a_source_fails_leaves_the_guesses_of_others() -> None:
    class Choosy(Random):
        def propose(self, request: Request, most: int) -> Sequence[Guess]:
            if request.request_id == "1":
                raise RuntimeError("propose")
            return (Guess(array("q", [5] * most), self.name, 0),)

    source = Choosy("a")
    model = AcceptanceModel()
    model.register(source.name, source.priors)
    states = [DraftState(each) for each in requests_of(random.Random(0), 3)]
    trees = LookUps([GuardedSource(source)], None, model).find(states, [2, 2, 2])
    assert [tree is None for tree in trees] == [False, True, False]


def test_without_sources_nothing_is_found() -> None:
    states = [DraftState(each) for each in requests_of(random.Random(0), 3)]
    assert LookUps([], None, AcceptanceModel()).find(states, [4, 0, 4]) == [None] * 3

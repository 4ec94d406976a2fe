"""Probabilities of labels of several tokens: as counted over all answers of a small model."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Sequence

import pytest

from foretoken.api.runtime.decisions.decider import PromptLengths
from foretoken.api.runtime.decisions.labels import MAX_READS, Ids, LabelTree
from foretoken.core.interface.request import Usage

VOCAB = range(3)
LENGTH = 4


class Model:
    """A random distribution of the next token for every beginning of an answer."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._known: dict[Ids, list[float]] = {}

    def next(self, prefix: Ids) -> list[float]:
        if prefix not in self._known:
            weights = [self._random.expovariate(1) for _ in VOCAB]
            self._known[prefix] = [each / sum(weights) for each in weights]
        return self._known[prefix]

    def answer(self, ids: Ids) -> float:
        """Probability of an answer of `LENGTH` tokens."""
        return math.prod(self.next(ids[:at])[token] for at, token in enumerate(ids))

    def read(self, tree: LabelTree) -> list[list[float]]:
        return [
            [math.log(self.next(read.prefix)[token]) for token in read.token_ids]
            for read in tree.reads
        ]


def counted(model: Model, labels: Sequence[Ids]) -> list[float]:
    """The share of each label: answers count for the longest label that they begin with."""
    mass = dict.fromkeys(labels, 0.0)
    for answer in itertools.product(VOCAB, repeat=LENGTH):
        begun = [label for label in labels if answer[: len(label)] == label]
        if begun:
            mass[max(begun, key=len)] += model.answer(answer)
    return [each / sum(mass.values()) for each in mass.values()]


EVERY = [ids for size in range(1, LENGTH + 1) for ids in itertools.product(VOCAB, repeat=size)]


@pytest.mark.parametrize("seed", range(40))
def test_labels_have_the_share_of_the_answers_that_begin_with_them(seed: int) -> None:
    chosen = random.Random(seed).sample(EVERY, 2 + seed % 9)
    tree, model = LabelTree(chosen), Model(seed)
    assert tree.probabilities(model.read(tree)) == pytest.approx(counted(model, chosen))


def test_a_label_inside_two_others_has_what_they_leave() -> None:
    tree = LabelTree([(0,), (0, 1), (0, 1, 2), (1,)])
    assert [read.prefix for read in tree.reads] == [(), (0,), (0, 1)]
    half, tenth = math.log(0.5), math.log(0.1)
    found = tree.probabilities([[half, half], [tenth], [half]])
    assert found == pytest.approx([0.45, 0.025, 0.025, 0.5])


def test_labels_of_one_token_need_one_read() -> None:
    tree = LabelTree([(7,), (5,), (6,)])
    assert tree.reads == [((), (7, 5, 6))]
    assert tree.probabilities([[math.log(0.2), math.log(0.1), math.log(0.1)]]) == pytest.approx(
        [0.5, 0.25, 0.25]
    )


def test_very_unlikely_labels_still_have_probabilities() -> None:
    tree = LabelTree([(0, 1), (1, 0)])
    found = tree.probabilities([[-900.0, -901.0], [-300.0], [-300.0]])
    assert found == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])


@pytest.mark.parametrize("labels", [[(1,), (1,)], [(1,), ()]])
def test_equal_and_empty_labels_are_refused(labels: list[Ids]) -> None:
    with pytest.raises(ValueError, match="differ"):
        LabelTree(labels)


def test_labels_that_need_too_many_reads_are_refused() -> None:
    first, *labels = [tuple(range(at, at + 128)) for at in range(MAX_READS // 127 + 1)]
    with pytest.raises(ValueError, match="reads"):
        LabelTree([first, *labels])
    assert len(LabelTree(labels[:-1]).reads) <= MAX_READS


def noted(prompts: Sequence[Sequence[int]]) -> PromptLengths:
    lengths = PromptLengths()
    for index, prompt in enumerate(prompts):
        lengths.add(index, array("i", prompt))
    return lengths


def test_tokens_that_prompts_share_are_counted_once() -> None:
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 4, 6, 7]]
    usages = [
        Usage(cached_tokens=0, cache_write_tokens=5),
        Usage(cached_tokens=3, cache_write_tokens=1),
        Usage(cached_tokens=4, cache_write_tokens=2),
    ]
    usage = noted(prompts).usage(usages)
    assert usage.prompt_tokens == 3 + 2 + 1 + 3
    assert (usage.cached_tokens, usage.cache_write_tokens) == (1, 8)
    again = noted(prompts[:1]).usage([Usage(cached_tokens=4)])
    assert (again.prompt_tokens, again.cached_tokens) == (5, 4)

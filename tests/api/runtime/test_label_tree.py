"""Probabilities of labels of several tokens: as counted over all answers of a small model."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Sequence

import pytest

from foretoken.api.runtime.decisions import labels
from foretoken.api.runtime.decisions.decider import PromptLengths
from foretoken.api.runtime.decisions.labels import (
    MAX_BRANCHES,
    MAX_READS,
    Ids,
    LabelTree,
    Part,
)
from foretoken.core.interface.request import Usage
from foretoken.core.interface.sampling import Pooling

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

    def read(self, tree: LabelTree, *, with_branches: bool = True) -> dict[Ids, float]:
        """Answer the requests of a tree: what the rows of their prompt and branches predict."""
        found: dict[Ids, float] = {}
        for part in tree.parts(with_branches=with_branches):
            numbers = [
                math.log(self.next(path)[token])
                for path, token_ids in zip(paths_of(part), part.pooling.rows, strict=True)
                for token in token_ids
            ]
            found.update(part.found(numbers))
        return found


def paths_of(part: Part) -> list[Ids]:
    """The tokens after the question's prompt on the path of each row that is read."""
    branches = part.pooling.branches
    count = len(part.token_ids) - len(branches)
    paths = [part.token_ids[:count]]
    for branch, token in zip(branches, part.token_ids[count:], strict=True):
        paths.append((*paths[1 + branch.parent], token))
    return paths


def counted(model: Model, chosen: Sequence[Ids]) -> list[float]:
    """The share of each label: answers count for the longest label that they begin with."""
    mass = dict.fromkeys(chosen, 0.0)
    for answer in itertools.product(VOCAB, repeat=LENGTH):
        begun = [label for label in chosen if answer[: len(label)] == label]
        if begun:
            mass[max(begun, key=len)] += model.answer(answer)
    return [each / sum(mass.values()) for each in mass.values()]


EVERY = [ids for size in range(1, LENGTH + 1) for ids in itertools.product(VOCAB, repeat=size)]


@pytest.mark.parametrize("with_branches", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_labels_have_the_share_of_the_answers_that_begin_with_them(
    seed: int, with_branches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "MAX_BRANCHES", (128, 1, 3)[seed % 3])
    chosen = random.Random(seed).sample(EVERY, 2 + seed % 9)
    tree, model = LabelTree(chosen), Model(seed)
    found = model.read(tree, with_branches=with_branches)
    assert tree.probabilities(found) == pytest.approx(counted(model, chosen))


def test_a_label_inside_two_others_has_what_they_leave() -> None:
    tree = LabelTree([(0,), (0, 1), (0, 1, 2), (1,)])
    half, tenth = math.log(0.5), math.log(0.1)
    found = tree.probabilities({(0,): half, (1,): half, (0, 1): tenth, (0, 1, 2): half})
    assert found == pytest.approx([0.45, 0.025, 0.025, 0.5])


def test_labels_of_one_token_need_one_row() -> None:
    tree = LabelTree([(7,), (5,), (6,)])
    (part,) = tree.parts(with_branches=True)
    assert (part.token_ids, part.pooling) == ((), Pooling((7, 5, 6), is_normalized=True))
    found = dict(part.found([math.log(0.2), math.log(0.1), math.log(0.1)]))
    assert tree.probabilities(found) == pytest.approx([0.5, 0.25, 0.25])


def test_labels_of_several_tokens_are_branches_of_one_prompt() -> None:
    tree = LabelTree([(1, 2, 3), (1, 2, 4), (5, 6), (7,)])
    (part,) = tree.parts(with_branches=True)
    assert part.token_ids == (1, 2, 5), "the last token of a label needs no row"
    assert part.pooling.rows == [(1, 5, 7), (2,), (3, 4), (6,)]
    assert [each.parent for each in part.pooling.branches] == [-1, 0, -1]
    alone = tree.parts(with_branches=False)
    assert [(each.token_ids, each.pooling.rows) for each in alone] == [
        ((), [(1, 5, 7)]),
        ((1,), [(2,)]),
        ((5,), [(6,)]),
        ((1, 2), [(3, 4)]),
    ]


def test_many_branches_are_several_requests() -> None:
    tree = LabelTree([(first, second, 1) for first in range(20) for second in range(20)])
    parts = tree.parts(with_branches=True)
    assert len(parts) == 4
    assert all(len(part.token_ids) <= MAX_BRANCHES for part in parts)
    num_repeated = sum(len(part.reads) for part in parts) - tree.num_reads
    assert num_repeated == 3 * 2, "the path to the first new read of each later request"


def test_long_labels_do_not_repeat_their_paths_in_many_requests() -> None:
    tree = LabelTree([tuple(range(first, first + 256)) for first in range(0, 4096, 256)])
    parts = tree.parts(with_branches=True)
    num_rows = sum(len(part.reads) for part in parts)
    assert tree.num_reads == 1 + 16 * 255
    assert num_rows < 4 * tree.num_reads
    assert max(len(part.token_ids) for part in parts) <= 255 + MAX_BRANCHES // 2
    assert {read.prefix for part in parts for read in part.reads} == {
        label[:end]
        for label in (tuple(range(at, at + 256)) for at in range(0, 4096, 256))
        for end in range(256)
    }


def test_very_unlikely_labels_still_have_probabilities() -> None:
    tree = LabelTree([(0, 1), (1, 0)])
    found = tree.probabilities({(0,): -900.0, (1,): -901.0, (0, 1): -300.0, (1, 0): -300.0})
    assert found == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])


@pytest.mark.parametrize("given", [[(1,), (1,)], [(1,), ()]])
def test_equal_and_empty_labels_are_refused(given: list[Ids]) -> None:
    with pytest.raises(ValueError, match="differ"):
        LabelTree(given)


def test_labels_that_need_too_many_reads_are_refused() -> None:
    first, *others = [tuple(range(at, at + 128)) for at in range(MAX_READS // 127 + 1)]
    with pytest.raises(ValueError, match="reads"):
        LabelTree([first, *others])
    assert LabelTree(others[:-1]).num_reads <= MAX_READS


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

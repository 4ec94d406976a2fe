"""Merges the guesses of several sources for one request into a tree, stored as paths.

The most promising guess becomes the trunk. A guess that is a prefix of the trunk only raises the
survival of the shared tokens. A guess that differs becomes a branch from its first different token
on; it can be accepted only if the trunk's token at that level is rejected.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.interface.draft import Draft
from .source import Guess

Survival = NDArray[np.float64]
"""[num_tokens] probability that a draft token and all tokens before it on its path are accepted.

Values never rise from one token to the next."""


class GuessPath(msgspec.Struct, eq=False, gc=False):
    """A run of draft tokens and their survival; ``start`` is the depth of the first token."""

    token_ids: array[int]
    source: str
    survival: Survival  # [len(token_ids)]
    start: int = 0  # number of draft tokens before this run
    branches: list[GuessPath] = []  # forks and continuations of this path

    @property
    def stop(self) -> int:
        """Depth of the last token plus 1."""
        return self.start + len(self.token_ids)


class GuessTree(msgspec.Struct, eq=False, gc=False):
    """The merged guesses as a tree of draft tokens, each with its chance of being accepted."""

    trunk: GuessPath
    branches: list[GuessPath] = []  # all paths except the trunk; each one follows its parent path

    @property
    def survival(self) -> Survival:
        """Survival of all tokens, in descending order, [num_tokens].

        The first n values belong to the n best tokens, which form a tree.
        """
        if not self.branches:
            return self.trunk.survival
        survival = np.concatenate([path.survival for path in (self.trunk, *self.branches)])
        return -np.sort(-survival)

    def draft(self, count: int) -> Draft:
        """Return the tree of the ``count`` tokens with the highest survival."""
        if not self.branches or count < 1:
            return self.chain(count)
        paths = (self.trunk, *self.branches)
        survival = np.concatenate([path.survival for path in paths])
        owners = np.repeat(np.arange(len(paths)), [len(path.survival) for path in paths])
        best = (-survival).argsort(kind="stable")[
            :count
        ]  # The stable sort keeps a parent before a child with the same survival.
        counts = np.bincount(owners[best], minlength=len(paths)).tolist()
        if counts[0] == len(best):
            return self.chain(count)
        kept = {id(path): kept for path, kept in zip(paths, counts, strict=True)}
        return _laid_out(self.trunk, kept)

    def chain(self, count: int) -> Draft:
        """Return a chain of the first ``count`` tokens of the trunk."""
        token_ids = self.trunk.token_ids[:count]
        sources = (self.trunk.source,) * len(token_ids)
        return Draft(token_ids, sources, survival=self.trunk.survival[:count].tolist())

    def add(self, guess: Guess, survival: Survival) -> None:
        """Add a guess that is less promising than the trunk, with the survival of its tokens."""
        path, at = self.trunk, 0
        while True:
            here = at - path.start
            shared = common_len(path.token_ids[here:], guess.token_ids[at:])
            if path is self.trunk and shared:
                path.survival = path.survival.copy()
                np.maximum(path.survival[:shared], survival[:shared], out=path.survival[:shared])
            at += shared
            if at == len(guess.token_ids):
                return
            siblings = [each for each in path.branches if each.start == at]
            same = (each for each in siblings if each.token_ids[0] == guess.token_ids[at])
            following = next(same, None)
            if following is None:
                self._leave(path, at, siblings, guess, survival)
                return
            path = following

    def _leave(
        self,
        path: GuessPath,
        at: int,
        siblings: Sequence[GuessPath],
        guess: Guess,
        survival: Survival,
    ) -> None:
        """Add the guess's tokens from depth ``at`` on as a branch of ``path``.

        The survival of the branch is scaled to the probability that is left at the fork: the
        survival of the token before it, minus the survival of the tokens that already follow that
        token.
        """
        before, own_before = 1.0, 1.0
        if at:
            before, own_before = float(path.survival[at - 1 - path.start]), float(survival[at - 1])
        taken = sum(float(each.survival[0]) for each in siblings)
        if at < path.stop:
            taken += float(path.survival[at - path.start])
        left = max(0.0, before - taken) / max(own_before, 1e-9)
        branch = GuessPath(guess.token_ids[at:], guess.source, survival[at:] * left, at)
        path.branches.append(branch)
        self.branches.append(branch)


def merge(guesses: Sequence[Guess], survivals: Sequence[Survival]) -> GuessTree:
    """Merge guesses into a tree: the most promising is the trunk, the others branch off it.

    ``guesses`` must not be empty; ``survivals[i]`` is the survival of ``guesses[i]``.
    """
    order = sorted(range(len(guesses)), key=lambda i: -float(survivals[i].sum()))
    first = guesses[order[0]]
    tree = GuessTree(GuessPath(first.token_ids, first.source, survivals[order[0]]))
    for index in order[1:]:
        tree.add(guesses[index], survivals[index])
    return tree


def _laid_out(trunk: GuessPath, kept: dict[int, int]) -> Draft:
    """Return a draft of the first tokens of each path, depth first.

    ``kept``: maps the `id` of each path to the number of its tokens to take.
    """
    token_ids, sources, parents = array("q"), list[str](), list[int]()
    survival = list[float]()

    def lay_out(path: GuessPath, parent: int) -> None:
        count, first = kept[id(path)], len(token_ids)
        token_ids.extend(path.token_ids[:count])
        sources.extend([path.source] * count)
        survival.extend(path.survival[:count].tolist())
        parents.extend([parent, *range(first, first + count - 1)][:count])
        for branch in sorted(path.branches, key=lambda each: -each.start):
            if kept[id(branch)]:
                level = branch.start - path.start  # number of the path's tokens before the branch
                lay_out(branch, first + level - 1 if level else parent)

    lay_out(trunk, -1)
    return Draft(token_ids, tuple(sources), parents=tuple(parents), survival=survival)


def common_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the leading items that two sequences share."""
    length = min(len(first), len(second))
    # Comparing two arrays at once is fast. An array never equals a list, so the loop compares
    # their items.
    if first[:length] == second[:length]:
        return length
    for index in range(length):
        if first[index] != second[index]:
            return index
    return length

"""What several sources guess for one request, merged: a trie, kept as paths.

The most promising guess is the trunk. A guess that runs along it adds nothing but confidence; one
that leaves it is a branch from its fork on, and can only come true where the trunk does not.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core.interface.step import Draft
from .source import Guess

Survival = NDArray[np.float64]
"""[num_tokens] chance that a draft token and all before it come true; never rising."""


@dataclass(slots=True)
class Path:
    """One guess from the request's position on, and what each of its tokens is worth."""

    token_ids: array[int]
    source: str
    survival: Survival
    fork: int = 0  # leading tokens that the trunk has, too

    def draft(self, length: int) -> Draft:
        """Its first ``length`` tokens."""
        return Draft.of(self.token_ids[:length], self.source)


def merge(guesses: Sequence[Guess], survivals: Sequence[Survival]) -> list[Path]:
    """The trunk, then the branches, most promising first; without duplicates.

    ``survivals[i]`` belongs to ``guesses[i]``, of which there is at least one.
    """
    order = sorted(range(len(guesses)), key=lambda i: -float(survivals[i].sum()))
    first = order[0]
    trunk = Path(guesses[first].token_ids, guesses[first].source, survivals[first])
    branches: list[Path] = []
    for index in order[1:]:
        branch = _beside(trunk, guesses[index], survivals[index])
        if branch is not None and all(_differ(branch, other) for other in branches):
            branches.append(branch)
    return [trunk, *branches]


def _beside(trunk: Path, guess: Guess, survival: Survival) -> Path | None:
    """What a guess adds to the trunk: a branch, or confidence in what they share."""
    fork = common_len(trunk.token_ids, guess.token_ids)
    if fork:
        trunk.survival = trunk.survival.copy()
        np.maximum(trunk.survival[:fork], survival[:fork], out=trunk.survival[:fork])
    if fork >= min(len(trunk.token_ids), len(guess.token_ids)):
        return None
    before = trunk.survival[fork - 1] if fork else 1.0
    own_before = survival[fork - 1] if fork else 1.0
    left = (before - trunk.survival[fork]) / max(own_before, 1e-9)
    tail = np.where(np.arange(len(survival)) < fork, 0.0, survival * left)
    return Path(guess.token_ids, guess.source, tail, fork)


def _differ(branch: Path, other: Path) -> bool:
    shared = common_len(branch.token_ids, other.token_ids)
    return shared < min(len(branch.token_ids), len(other.token_ids))


def common_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Leading items that two sequences share."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:  # arrays compare at once, but are equal to arrays alone
        return length
    return next((i for i in range(length) if first[i] != second[i]), length)

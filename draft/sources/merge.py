"""Merges the guesses of several sources for one request into a trie, kept as paths.

The most promising guess is the main path. A guess that agrees with it to its end only raises its
survival. A guess that differs is a branch from the fork on, which can be accepted only if the main
path is rejected there.
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
"""[num_tokens] chance that a draft token and all before it are accepted; never rising."""


@dataclass(slots=True)
class Path:
    """One guess from the request's position on, and the survival of each of its tokens."""

    token_ids: array[int]
    source: str
    survival: Survival
    fork: int = 0  # leading tokens that it shares with the main path

    def draft(self, length: int) -> Draft:
        """Make a draft of its first ``length`` tokens."""
        return Draft.of(self.token_ids[:length], self.source)


def merge(guesses: Sequence[Guess], survivals: Sequence[Survival]) -> list[Path]:
    """Return the main path, then the branches, most promising first and without duplicates.

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
    """Raise the main path's survival where a guess agrees; return the branch if it differs."""
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
    """Count the leading items that two sequences share."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:  # arrays compare at once, but are equal to arrays alone
        return length
    return next((i for i in range(length) if first[i] != second[i]), length)

"""LookUps: the guesses of all sources for the requests of a step, merged into a tree for each.

The sources are asked for all requests at once, and the survival of all guesses is one array: a call
for each request would cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress

import numpy as np
from msgspec.structs import replace

from ...core.interface.request import Request
from ..sources.grammar import GrammarSource
from ..sources.merge import GuessPath, GuessTree, Survival, merge
from ..sources.source import GuardedSource, Guess
from .draft_state import DraftState
from .estimators import AcceptanceModel, GuessClass

NO_SURVIVAL: Survival = np.zeros(0)


class LookUps:
    """Asks all sources for guesses.

    ``grammar`` cuts guesses before the first token that a request's constraint forbids.
    """

    def __init__(
        self,
        sources: Sequence[GuardedSource],
        grammar: GrammarSource | None,
        acceptance: AcceptanceModel,
    ) -> None:
        self._sources, self._grammar, self._acceptance = sources, grammar, acceptance

    def find(self, states: Sequence[DraftState], most: Sequence[int]) -> Sequence[GuessTree | None]:
        """Return the merged guesses for each request, or None for a request without guesses.

        ``most`` [len(states)]: maximum number of tokens of a guess; with 0 nothing is looked up for
        the request. The guesses are kept in the states, to be scored after the step.
        """
        trees: list[GuessTree | None] = [None] * len(states)
        wanted = list(compress(range(len(states)), most))
        asked = [states[index] for index in wanted]
        guesses = self._guesses(asked, [most[index] for index in wanted])
        _keep(asked, guesses)
        if not any(guesses):
            return trees
        survivals = iter(self._survivals(asked, guesses))
        for index, own in zip(wanted, guesses, strict=True):
            if own[1:]:
                trees[index] = merge(own, [next(survivals) for _ in own])
            elif own:  # the most frequent case
                path = GuessPath(own[0].token_ids, own[0].source, next(survivals))
                trees[index] = GuessTree(path)
        return trees

    def _guesses(self, states: Sequence[DraftState], most: Sequence[int]) -> list[list[Guess]]:
        """Return the guesses for each request, in the order of the sources."""
        requests = [state.request for state in states]
        by_source = [source.propose_all(requests, most) for source in self._sources]
        guesses = [[guess for own in by_source for guess in own[at]] for at in range(len(states))]
        all_ids = [guess.token_ids for own in guesses for guess in own]
        has_images = min(chain.from_iterable(all_ids), default=0) < 0
        for index, (request, own) in enumerate(zip(requests, guesses, strict=True)):
            is_cut = has_images or request.sampling.constraint is not None
            for guess in own:
                is_cut = is_cut or not (
                    guess.token_ids and request.stop_ids.isdisjoint(guess.token_ids)
                )
            if is_cut:
                guesses[index] = self._cut(request, own)
        return guesses

    def _cut(self, request: Request, guesses: Sequence[Guess]) -> list[Guess]:
        """Cut guesses to the tokens that the answer may have; drop empty ones."""
        left = [cut for guess in guesses if (cut := _to_the_end(guess, request.stop_ids)).token_ids]
        if request.sampling.constraint is None or self._grammar is None:
            return left
        return _allowed(left, request, self._grammar)

    def _survivals(
        self, states: Sequence[DraftState], guesses: Sequence[Sequence[Guess]]
    ) -> list[Survival]:
        """Return the survival of the tokens of each guess, request after request."""
        classes = [
            GuessClass(guess.source, guess.kind, state.request.request_id, state.is_sampled)
            for state, own in zip(states, guesses, strict=True)
            for guess in own
        ]
        lens = list(map(len, [guess.token_ids for own in guesses for guess in own]))
        table = self._acceptance.survivals(classes, max(lens))
        return [row[:length] for row, length in zip(table, lens, strict=True)]


def _keep(states: Sequence[DraftState], guesses: Sequence[list[Guess]]) -> None:
    """Keep guesses in the requests' states until they are scored.

    The outcome of the preceding step may not be scored yet, so its guesses are kept, too.
    """
    lens = map(len, [state.request.tokens for state in states])
    for state, own, num_tokens in zip(states, guesses, lens, strict=True):
        earlier = state.unscored[-1:]
        if earlier and earlier[0][0] >= num_tokens:
            earlier = []
        state.unscored = [*earlier, (num_tokens, own)] if own else earlier


def survival_table(trees: Sequence[GuessTree | None]) -> Survival:
    """Return the survival of all tokens of each tree, in descending order.

    The shape is [len(trees), number of tokens of the largest tree], padded with 0.
    """
    rows = [
        NO_SURVIVAL if tree is None else tree.survival if tree.branches else tree.trunk.survival
        for tree in trees
    ]
    lens = list(map(len, rows))
    table = np.zeros((len(rows), max(lens)))
    for own, row, length in zip(table, rows, lens, strict=True):
        own[:length] = row
    return table


def _to_the_end(guess: Guess, stop_ids: frozenset[int]) -> Guess:
    """Cut a guess after the first stop token, and before the first image placeholder (id < 0)."""
    if guess.token_ids and min(guess.token_ids) < 0:
        end = next(at for at, token in enumerate(guess.token_ids) if token < 0)
        guess = replace(guess, token_ids=guess.token_ids[:end])
    if stop_ids.isdisjoint(guess.token_ids):
        return guess
    end = next(at for at, token in enumerate(guess.token_ids) if token in stop_ids)
    return replace(guess, token_ids=guess.token_ids[: end + 1])


def _allowed(guesses: Sequence[Guess], request: Request, grammar: GrammarSource) -> list[Guess]:
    """Cut the guesses before the first token that the constraint forbids; drop empty ones."""
    left = [
        guess if guess.source == grammar.name else grammar.trim(request, guess) for guess in guesses
    ]
    return [guess for guess in left if guess is not None]

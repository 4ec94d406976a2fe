"""CandidateGenerator: merges the guesses of all look-up sources for a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...core.interface.request import Request
from ..sources.grammar import GrammarSource
from ..sources.merge import GuessTree, merge
from ..sources.source import GuardedSource, Guess
from .acceptance import AcceptanceModel
from .request_state import DraftState


class CandidateGenerator:
    """Collects guesses of the sources and weighs them by their acceptance rates."""

    def __init__(
        self,
        sources: Sequence[GuardedSource],
        odds: AcceptanceModel,
        grammar: GrammarSource | None,
    ) -> None:
        self._sources, self._odds, self._grammar = sources, odds, grammar

    def generate(self, state: DraftState, most: int) -> GuessTree | None:
        """Return a tree of guesses of at most ``most`` tokens each; None without a guess."""
        request = state.request
        guesses = [
            _to_the_end(guess, request.stop_ids)
            for source in self._sources
            for guess in source.propose(request, most)
        ]
        if request.sampling.constraint is not None:
            guesses = self._possible(request, guesses)
        state.guesses = guesses
        if not guesses:
            return None
        survivals = [
            self._odds.survival(
                each.source,
                each.kind,
                request.request_id,
                len(each.token_ids),
                sampled=state.is_sampled,
            )
            for each in guesses
        ]
        return merge(guesses, survivals)

    def _possible(self, request: Request, guesses: Sequence[Guess]) -> list[Guess]:
        """Cut the guesses at the first token that the request's constraint forbids."""
        if self._grammar is None:
            return list(guesses)
        own, trim = self._grammar.name, self._grammar.trim
        left = [guess if guess.source == own else trim(request, guess) for guess in guesses]
        return [guess for guess in left if guess is not None]


def _to_the_end(guess: Guess, stop_ids: frozenset[int]) -> Guess:
    """Cut the guess behind the first token that ends the answer."""
    if stop_ids.isdisjoint(guess.token_ids):
        return guess
    end = next(at for at, token in enumerate(guess.token_ids) if token in stop_ids)
    return replace(guess, token_ids=guess.token_ids[: end + 1])

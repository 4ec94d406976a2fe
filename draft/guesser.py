"""Guesser: what all free sources say of a request, merged."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.request import Request
from .calibration import Calibration
from .grammar import GrammarSource
from .source import CarefulSource, Guess
from .track import Track
from .trie import Path, merge


class Guesser:
    """Asks the free sources, and weighs what they say by how often the like came true."""

    def __init__(
        self,
        sources: Sequence[CarefulSource],
        calibration: Calibration,
        grammar: GrammarSource | None,
    ) -> None:
        self._sources, self._calibration, self._grammar = sources, calibration, grammar

    def guess(self, track: Track, most: int) -> list[Path]:
        """At most ``most`` tokens of each, the likeliest first; empty when they say nothing."""
        request = track.request
        guesses = [
            guess
            for source in self._sources
            if (guess := source.propose(request, most)) is not None and guess.token_ids
        ]
        if request.sampling.constraint is not None:
            guesses = self._possible(request, guesses)
        track.guesses = guesses
        if not guesses:
            return []
        survival = self._calibration.survival
        survivals = [
            survival(each.source, each.kind, request.request_id, len(each.token_ids))
            for each in guesses
        ]
        return merge(guesses, survivals)

    def _possible(self, request: Request, guesses: Sequence[Guess]) -> list[Guess]:
        """What a request's constraint leaves of its guesses."""
        if self._grammar is None:
            return list(guesses)
        own, trim = self._grammar.name, self._grammar.trim
        left = [guess if guess.source == own else trim(request, guess) for guess in guesses]
        return [guess for guess in left if guess is not None]

    def is_forced(self, track: Track) -> bool:
        """Whether a constraint tells what follows: such drafts come true, whatever others did."""
        return self._grammar is not None and self._grammar.propose(track.request, 1) is not None

"""Peek: a glance at the look-ups while deciding rests, for text may begin to repeat any time."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.request import Request
from .calibration import Calibration
from .source import CarefulSource

PROMISE = 0.75  # chance of a guess's first token that is worth a decision
MOST_REQUESTS = 4  # looked at in one glance, in turn


class Peek:
    """Whether any request is about to say what mostly came true before."""

    def __init__(self, sources: Sequence[CarefulSource], calibration: Calibration) -> None:
        self._sources, self._calibration = sources, calibration
        self._next = 0  # of the requests, by their order

    def finds(self, requests: Sequence[Request]) -> bool:
        """Whether a look-up promises something to the next few of ``requests``."""
        if not requests:
            return False
        self._next = (self._next + MOST_REQUESTS) % len(requests)
        some = [*requests[self._next :], *requests][:MOST_REQUESTS]
        return any(map(self._promises, some))

    def _promises(self, request: Request) -> bool:
        guesses = (source.propose(request, 1) for source in self._sources)
        chance = self._calibration.chance
        return any(
            guess is not None
            and len(guess.token_ids) > 0
            and chance(guess.source, guess.kind, request.request_id) >= PROMISE
            for guess in guesses
        )

"""The protocol of the free sources: what guesses from token ids alone, on the event loop's side."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...core.interface.circuit_breaker import CircuitBreaker
from ...core.interface.request import Request

logger = logging.getLogger(__name__)
MAX_FAILURES = 5  # in all
INDEX_CHUNK = 2048  # tokens that one call of `Source.index` indexes at most
BUCKETS = (0, 1, 2, 4, 8, 16)  # first draft position of each class of positions

Odds = tuple[float, ...]
"""[len(BUCKETS)] chance of a draft token, given that all before it were right, by position."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What may follow a request's tokens.

    ``kind`` is what the source itself knows of how far to trust it (the length of a match, say):
    an index into its priors. How often each kind comes true is measured.
    """

    token_ids: array[int]
    source: str
    kind: int


@dataclass(frozen=True, slots=True)
class Priors:
    """Odds of each kind of guess while nothing is measured, [num_kinds]."""

    greedy: tuple[Odds, ...]
    sampled: tuple[Odds, ...]  # for requests with a temperature above 0

    @classmethod
    def constant(cls, *chances: float) -> Priors:
        """The same chance at every position, greedy or not; one for each kind."""
        odds = tuple((chance,) * len(BUCKETS) for chance in chances)
        return cls(odds, odds)


class Source(Protocol):
    """Guesses what follows from tokens seen before, of the same ``request.namespace`` alone.

    Reads requests, never writes them. Calls come from the event loop, one at a time.
    """

    @property
    def name(self) -> str:
        """What its tokens are labelled with."""

    @property
    def priors(self) -> Priors:
        """Of all kinds of its guesses."""

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        """Guesses, of at most ``most`` tokens each, at what follows ``request.tokens``."""

    def index(self, request: Request) -> int:
        """Index tokens of a live request, `INDEX_CHUNK` at most; returns how many it indexed.

        Called now and then until it returns 0; runs while the model thread computes a step.
        """

    def leave(self, request: Request) -> None:
        """The request ended: keep of its tokens what may serve others, drop the rest."""

    def flush(self, *namespaces: str | None) -> None:
        """Forget what was seen in these namespaces, in all when none is named."""


class GuardedSource:
    """A source that may fail: a failure costs its guesses; after a few it is dropped."""

    def __init__(self, source: Source) -> None:
        self.name = source.name
        self.priors = source.priors
        self._inner: Source | None = source
        self._breaker = CircuitBreaker(MAX_FAILURES, forgiven=0.0)

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        """Its guesses; none where it failed."""
        if self._inner is None:
            return ()
        try:
            return self._inner.propose(request, most)
        except Exception:
            self._failed()
            return ()

    def index(self, request: Request) -> int:
        """Tokens that it indexed; 0 once it failed."""
        if self._inner is None:
            return 0
        try:
            return self._inner.index(request)
        except Exception:
            self._failed()
            return 0

    def leave(self, request: Request) -> None:
        """Passed on."""
        if self._inner is None:
            return
        try:
            self._inner.leave(request)
        except Exception:
            self._failed()

    def flush(self, *namespaces: str | None) -> None:
        """Passed on. A source that cannot forget is dropped, with all that it knows."""
        if self._inner is None:
            return
        try:
            self._inner.flush(*namespaces)
        except Exception:
            self._failed(is_last=True)

    def _failed(self, *, is_last: bool = False) -> None:
        """Log and count the exception that is being handled; drop the source if it ``is_last``."""
        self._breaker.record_failure()
        logger.exception("draft source %s failed", self.name)
        if is_last or self._breaker.is_open:
            logger.error("draft source %s is dropped", self.name)
            self._inner = None

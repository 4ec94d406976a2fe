"""The protocol of the free sources: what guesses from token ids alone, on the event loop's side."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core.request import Request

INDEX_CHUNK = 2048  # tokens that one call of `Source.index` takes in at most


@dataclass(frozen=True, slots=True)
class Guess:
    """What may follow a request's tokens.

    ``kind`` is what the source itself knows of how far to trust it (the length of a match, say):
    an index into its ``priors``. How often each kind comes true is measured.
    """

    token_ids: array[int]
    source: str
    kind: int


class Source(Protocol):
    """Guesses what follows from tokens seen before, of the same ``request.namespace`` alone.

    Reads requests, never writes them. Calls come from the event loop, one at a time.
    """

    @property
    def name(self) -> str:
        """What its tokens are labelled with."""

    @property
    def priors(self) -> Sequence[float]:
        """[num_kinds] chance of a token given all before it, while nothing is measured."""

    def propose(self, request: Request, most: int) -> Guess | None:
        """At most ``most`` tokens that may follow ``request.tokens`` as they are now."""

    def index(self, request: Request) -> int:
        """Take in tokens of a live request, `INDEX_CHUNK` at most; returns how many it took.

        Called now and then until it returns 0; runs while the model thread computes a step.
        """

    def leave(self, request: Request) -> None:
        """The request ended: keep of its tokens what may serve others, drop the rest."""

    def flush(self, *namespaces: str | None) -> None:
        """Forget what was seen in these namespaces, in all when none is named."""

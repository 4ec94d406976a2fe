"""NgramSource: prompt look-up. What followed the last few tokens before may follow them again.

Source: prompt look-up decoding (Saxena 2023), as ``prompt_lookup_num_tokens`` in transformers.
"""

from __future__ import annotations

from ..core.request import Request
from .source import INDEX_CHUNK, Guess
from .suffix import PRIORS, Segment, SuffixIndex, guess_at


class NgramSource:
    """Continues where a request's last tokens stood before in its own tokens, the prompt included.

    The suffix index with every request in a scope of its own; nothing outlives a request.
    """

    name = "ngram"
    priors = PRIORS

    def __init__(self, *, num_slots: int = 2**20) -> None:
        self._index = SuffixIndex(num_slots)
        self._live: dict[Request, Segment] = {}

    def propose(self, request: Request, most: int) -> Guess | None:
        """What followed the longest run of last tokens that the request has seen before."""
        segment = self._segment(request)
        place = self._index.find(segment)
        return guess_at(place, segment, self.name, most) if place is not None else None

    def index(self, request: Request) -> int:
        """All of the prompt: that others brought it before is of no use here."""
        return self._index.index(self._segment(request), INDEX_CHUNK)

    def leave(self, request: Request) -> None:
        """Nothing is kept."""
        segment = self._live.pop(request, None)
        if segment is not None:
            self._index.drop(segment)

    def flush(self, *namespaces: str | None) -> None:
        """Nothing is kept that others could see."""

    def _segment(self, request: Request) -> Segment:
        segment = self._live.get(request)
        if segment is None:
            segment = self._index.open(request.tokens, scope=request, salt=request.serial)
            self._live[request] = segment
        return segment

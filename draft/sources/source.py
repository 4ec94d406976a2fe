"""Source: the base of drafters that need token ids alone, on the event loop's side.

`SourceIndexer` has the sources index the tokens of requests while steps run.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...core.interface.request import Request
from ...core.scheduling.guarded_speculator import Guarded, guard

logger = logging.getLogger(__name__)
INDEX_CHUNK = 2048  # tokens that one call of `Source.index` indexes at most
MAX_ENDED = 8  # ended requests whose tokens one call keeps, a tenth of a millisecond each
BUCKETS = (0, 1, 2, 4, 8, 16)  # first draft position of each class of positions

Chances = tuple[float, ...]
"""[len(BUCKETS)] chance of a draft token, given that all before it were right, by position."""


class Guess(msgspec.Struct, frozen=True, gc=False):
    """Tokens that may follow a request's tokens.

    ``kind`` is how far the source itself trusts the guess (by the length of a match, for example):
    an index into its priors. How often guesses of each kind are accepted is measured.
    """

    token_ids: array[int]
    source: str
    kind: int


@dataclass(frozen=True, slots=True)
class Priors:
    """Chances of each kind of guess before anything is measured, [num_kinds]."""

    greedy: tuple[Chances, ...]
    sampled: tuple[Chances, ...]  # for requests with a temperature above 0

    @classmethod
    def constant(cls, *chances: float) -> Priors:
        """Make priors with one chance a kind, equal at every position, greedy or sampled."""
        by_kind = tuple((chance,) * len(BUCKETS) for chance in chances)
        return cls(by_kind, by_kind)


class Source:
    """Guesses from tokens seen before in the same ``request.namespace``.

    It reads requests and never writes them. Calls come from the event loop, one at a time. This one
    guesses, indexes and keeps nothing; subclasses do.
    """

    name: str  # the label of its tokens in usage and metrics
    priors: Priors  # chances of each kind of its guesses before any is measured

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        """Return guesses of at most ``most`` tokens each behind ``request.tokens``."""
        del request, most
        return ()

    def index(self, request: Request, *, for_others: bool = False) -> int:
        """Index tokens of a request, `INDEX_CHUNK` at most; return how many.

        Called until it returns fewer, while the model thread computes steps. The newest tokens
        come first: a request may end before all are indexed. ``for_others``: the request has
        ended, so what served its own look-ups alone is left out.
        """
        del request, for_others
        return 0

    def leave(self, request: Request) -> None:
        """Keep what was indexed for others of a request that ended; drop everything else."""

    def flush(self, *namespaces: str | None) -> None:
        """Forget the tokens of these namespaces, of all when none is named."""


class GuardedSource(Guarded[Source], Source):
    """Wraps a source: a failure costs its guesses, and repeated failures the source."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, Source(), f"draft source {source.name}")
        self.name, self.priors = source.name, source.priors

    propose = guard(Source.propose, if_failed=())
    index = guard(Source.index, if_failed=0)
    leave = guard(Source.leave, if_failed=None)

    def flush(self, *namespaces: str | None) -> None:
        """Call the source; if it cannot forget, it is dropped with all that it holds."""
        try:
            self.inner.flush(*namespaces)
        except Exception:
            logger.exception("draft source %s failed to flush and is no longer used", self.name)
            self.inner = self._idle


class SourceIndexer:
    """The tokens of each request that the sources have not indexed yet."""

    def __init__(self, sources: Sequence[GuardedSource]) -> None:
        self._sources = sources
        # Running requests and how many of their tokens are indexed; the one served longest ago
        # comes first.
        self._num_indexed: OrderedDict[str, tuple[Request, int]] = OrderedDict()
        self._ended: deque[Request] = deque()  # their tokens are still to be kept

    def join(self, request: Request) -> None:
        """Add a running request."""
        self._num_indexed[request.request_id] = request, 0

    def leave(self, request: Request) -> None:
        """Move a request to those that ended; `work` keeps its tokens."""
        self._num_indexed.pop(request.request_id, None)
        self._ended.append(request)

    @property
    def has_work(self) -> bool:
        """Whether there may be something to index. Cheap."""
        return bool(self._num_indexed or self._ended)

    def work(self) -> None:
        """Index tokens of ended requests and keep them, then those of running ones; bounded."""
        room = INDEX_CHUNK
        if self._ended:
            room -= self._finish() if self._num_indexed else self.keep()
        for request, num_indexed in list(self._num_indexed.values()):
            if room <= 0:
                return
            if len(request.tokens) == num_indexed:
                continue
            done = self._index(request)
            is_whole = done < INDEX_CHUNK  # no source has more to index
            self._num_indexed[request.request_id] = request, len(request.tokens) * is_whole
            self._num_indexed.move_to_end(request.request_id)
            room -= done

    def keep(self) -> int:
        """Keep the tokens of all ended requests; return how many were indexed."""
        num_indexed = 0
        while self._ended:
            num_indexed += self._finish()
        return num_indexed

    def _finish(self) -> int:
        """Index tokens of the requests that ended first, a bounded number; return how many."""
        num_indexed = 0
        for _ in range(min(MAX_ENDED, len(self._ended))):
            request = self._ended[0]
            done = self._index(request, for_others=True)
            num_indexed += done
            if done >= INDEX_CHUNK:  # it may have more
                break
            self._ended.popleft()
            for source in self._sources:
                source.leave(request)
            if num_indexed >= INDEX_CHUNK:
                break
        return num_indexed

    def _index(self, request: Request, *, for_others: bool = False) -> int:
        """Have each source index tokens; return the most that one of them did."""
        done = (source.index(request, for_others=for_others) for source in self._sources)
        return max(done, default=0)

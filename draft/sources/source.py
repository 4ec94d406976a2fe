"""Source: the base class of drafters that need token ids only and run in the event loop.

`SourceIndexer` makes the sources index the tokens of requests while steps run.
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
INDEX_CHUNK = 2048  # maximum number of tokens that one call of `Source.index` indexes
MAX_ENDED = 8  # maximum number of ended requests finished in one call, at about 0.1 ms each
BUCKETS = (0, 1, 2, 4, 8, 16)  # first draft position of each bucket of positions

Chances = tuple[float, ...]
"""[len(BUCKETS)] acceptance probability of a draft token whose predecessors are all accepted."""


class Guess(msgspec.Struct, frozen=True, gc=False):
    """Tokens that may follow a request's tokens.

    ``kind`` is an index into the source's priors. A source uses several kinds to distinguish
    guesses that are not equally reliable, for example by the length of a match. Acceptance is
    measured separately for each kind.
    """

    token_ids: array[int]
    source: str
    kind: int


@dataclass(frozen=True, slots=True)
class Priors:
    """Acceptance probabilities of each kind of guess before any is measured, [num_kinds]."""

    greedy: tuple[Chances, ...]
    sampled: tuple[Chances, ...]  # probabilities for requests with a temperature above 0

    @classmethod
    def constant(cls, *chances: float) -> Priors:
        """Make priors with one probability per kind, for all positions, greedy and sampled."""
        by_kind = tuple((chance,) * len(BUCKETS) for chance in chances)
        return cls(by_kind, by_kind)


class Source:
    """Base class of sources; it makes no guesses and stores no tokens.

    A source guesses tokens from those seen before in the same ``request.namespace``. It reads
    requests and never changes them. The event loop calls it, one call at a time.
    """

    name: str  # label of the source's tokens in usage and metrics
    priors: Priors  # acceptance probabilities of the source's guesses before any is measured

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        """Return guesses of the next tokens after ``request.tokens``, at most ``most`` each."""
        del request, most
        return ()

    def index(self, request: Request, *, for_others: bool = False) -> int:
        """Index at most `INDEX_CHUNK` tokens of a request; return the number indexed.

        It is called repeatedly while the model thread computes steps, until it returns a smaller
        number. The newest tokens come first, because a request may end before all are indexed.
        ``for_others``: the request has ended, so tokens that serve only its own look-ups are left
        out.
        """
        del request, for_others
        return 0

    def leave(self, request: Request) -> None:
        """Drop a request that ended, except for the tokens that other requests may look up."""

    def flush(self, *namespaces: str | None) -> None:
        """Forget the tokens of the given namespaces; without an argument, forget all tokens."""


class GuardedSource(Guarded[Source]):
    """Wraps a source: a failed call makes no guesses, and repeated failures turn the source off."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, Source(), f"draft source {source.name}")
        self.name, self.priors = source.name, source.priors

    @property
    def has_index(self) -> bool:
        """Whether `index` does anything: the source has an index, and it is still in use."""
        return type(self.inner).index is not Source.index

    def propose_all(
        self, requests: Sequence[Request], most: Sequence[int]
    ) -> list[Sequence[Guess]]:
        """Return the source's guesses for each request, at most ``most[i]`` tokens each.

        A request for which the source fails has no guesses; the other requests keep theirs.
        """
        guesses: list[Sequence[Guess]] = [()] * len(requests)
        for index, (request, length) in enumerate(zip(requests, most, strict=True)):
            try:
                guesses[index] = self.inner.propose(request, length)
            except Exception:
                self.record_exception("propose")
            else:
                if self.breakers:  # empty until a method fails
                    self.breakers["propose"].record_success()
        return guesses

    index = guard(Source.index, if_failed=0)
    leave = guard(Source.leave, if_failed=None)

    def flush(self, *namespaces: str | None) -> None:
        """Flush the source; if that fails, stop using it, so that no flushed token is proposed."""
        try:
            self.inner.flush(*namespaces)
        except Exception:
            logger.exception("draft source %s failed to flush and is no longer used", self.name)
            self.inner = self._idle


class SourceIndexer:
    """Tracks which tokens of each request the sources have not indexed yet."""

    def __init__(self, sources: Sequence[GuardedSource]) -> None:
        self._sources = sources
        # Running requests and the number of their indexed tokens; the request that was indexed
        # longest ago comes first.
        self._num_indexed: OrderedDict[str, tuple[Request, int]] = OrderedDict()
        self._new: set[str] = set()  # running requests that were never indexed completely
        self._ended: deque[Request] = deque()  # ended requests whose tokens are not stored yet

    def join(self, request: Request) -> None:
        """Add a running request."""
        self._num_indexed[request.request_id] = request, 0
        self._new.add(request.request_id)

    def leave(self, request: Request) -> None:
        """Mark a request as ended; `work` stores its tokens later."""
        self._num_indexed.pop(request.request_id, None)
        self._new.discard(request.request_id)
        self._ended.append(request)

    @property
    def has_work(self) -> bool:
        """Whether there may be tokens to index or to store. O(sources)."""
        return bool(self._ended or (self._num_indexed and self._has_index))

    @property
    def has_backlog(self) -> bool:
        """Whether an ended request is not stored yet, or a running one is not indexed.

        O(sources).
        """
        return bool(self._ended or (self._new and self._has_index))

    @property
    def _has_index(self) -> bool:
        return any(source.has_index for source in self._sources)

    def work(self) -> None:
        """Index and store tokens of ended requests, then index tokens of running requests.

        While requests run, one call indexes a limited number of tokens.
        """
        room = INDEX_CHUNK
        if self._ended:
            room -= self._finish() if self._num_indexed else self.keep()
        if not self._has_index:
            return
        for request, num_indexed in list(self._num_indexed.values()):
            if room <= 0:
                return
            if len(request.tokens) == num_indexed:
                continue
            done = self._index(request)
            is_complete = done < INDEX_CHUNK  # whether every source has indexed all tokens
            self._num_indexed[request.request_id] = request, len(request.tokens) * is_complete
            self._num_indexed.move_to_end(request.request_id)
            if is_complete:
                self._new.discard(request.request_id)
            room -= done

    def keep(self) -> int:
        """Index and store the tokens of all ended requests; return the number indexed."""
        num_indexed = 0
        while self._ended:
            num_indexed += self._finish()
        return num_indexed

    def _finish(self) -> int:
        """Index and store a bounded number of tokens of the requests that ended first.

        Returns the number of tokens indexed.
        """
        num_indexed = 0
        for _ in range(min(MAX_ENDED, len(self._ended))):
            request = self._ended[0]
            done = self._index(request, for_others=True)
            num_indexed += done
            if done >= INDEX_CHUNK:  # The request may have more tokens to index.
                break
            self._ended.popleft()
            for source in self._sources:
                source.leave(request)
            if num_indexed >= INDEX_CHUNK:
                break
        return num_indexed

    def _index(self, request: Request, *, for_others: bool = False) -> int:
        """Make each source index tokens; return the largest number that one of them indexed."""
        done = (source.index(request, for_others=for_others) for source in self._sources)
        return max(done, default=0)

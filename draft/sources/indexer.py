"""SourceIndexer: has the sources index the tokens of requests while steps run."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from ...core.interface.request import Request
from .source import INDEX_CHUNK, GuardedSource

MAX_ENDED = 8  # ended requests whose tokens one call keeps, a tenth of a millisecond each


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
        """Keep the tokens of ended requests, then index new ones of running requests; bounded."""
        self.keep(MAX_ENDED if self._num_indexed else None)
        room = INDEX_CHUNK
        for request, num_indexed in list(self._num_indexed.values()):
            if len(request.tokens) == num_indexed:
                continue
            done = max((source.index(request) for source in self._sources), default=0)
            is_whole = done < INDEX_CHUNK  # no source has more to index
            self._num_indexed[request.request_id] = request, len(request.tokens) * is_whole
            self._num_indexed.move_to_end(request.request_id)
            room -= done
            if room <= 0:
                return

    def keep(self, most: int | None = None) -> None:
        """Keep the tokens of ended requests: of the ``most`` that ended first, or of all."""
        count = len(self._ended) if most is None else min(most, len(self._ended))
        for _ in range(count):
            request = self._ended.popleft()
            for source in self._sources:
                source.leave(request)

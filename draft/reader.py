"""Reader: has the sources take in what is said, while steps run."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence

from ..core.request import Request
from .source import INDEX_CHUNK, CarefulSource


class Reader:
    """What each request has said that the sources have not taken in yet."""

    def __init__(self, sources: Sequence[CarefulSource]) -> None:
        self._sources = sources
        self._requests: dict[str, Request] = {}
        # Tokens of these that were taken in; who was read longest ago comes first.
        self._num_read: OrderedDict[str, int] = OrderedDict()
        self._new: set[str] = set()  # of these, whose prompts are to be taken in
        self._left: deque[Request] = deque()  # ended; their tokens are still to be kept

    def join(self, request: Request) -> None:
        """Its prompt is taken in soon."""
        self._requests[request.request_id] = request
        self._new.add(request.request_id)

    def leave(self, request: Request) -> None:
        """Its tokens are kept later."""
        request_id = request.request_id
        self._requests.pop(request_id, None)
        self._num_read.pop(request_id, None)
        self._new.discard(request_id)
        self._left.append(request)

    @property
    def has_prompts(self) -> bool:
        """Whether prompts are still to be taken in."""
        return bool(self._new)

    @property
    def num_left(self) -> int:
        """Ended requests whose tokens are still to be kept."""
        return len(self._left)

    def keep(self, most: int | None = None) -> None:
        """Take in what ended requests have said: of so many, the first that ended, or of all."""
        count = len(self._left) if most is None else min(most, len(self._left))
        for _ in range(count):
            request = self._left.popleft()
            for source in self._sources:
                source.leave(request)

    def read_prompts(self) -> None:
        """Take in the prompts of those who came, or a part."""
        if self._new:
            self._read([each for each in self._requests if each in self._new])

    def read(self, bite: int, *, eager: Collection[str] = ()) -> None:
        """The same, and what others have said beyond what was taken in: of ``bite`` tokens on.

        Of who is ``eager`` one token is enough.
        """
        self.read_prompts()
        self._read(list(self._late(bite, eager)))

    def _late(self, bite: int, eager: Collection[str]) -> Iterator[str]:
        """Whose tokens are so many more than were taken in."""
        for name, num_read in self._num_read.items():
            missing = len(self._requests[name].tokens) - num_read
            if missing >= bite or (missing and name in eager):
                yield name

    def _read(self, names: Sequence[str]) -> None:
        room = INDEX_CHUNK
        for name in names:
            request = self._requests[name]
            taken = sum(source.index(request) for source in self._sources)
            if taken < INDEX_CHUNK:  # no source has more to take
                self._num_read[name] = len(request.tokens)
                self._new.discard(name)
            if name in self._num_read:
                self._num_read.move_to_end(name)
            room -= taken
            if room <= 0:
                return

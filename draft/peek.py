"""Peek: a glance at the look-ups while deciding rests, for text may begin to repeat any time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ..core.request import Request
from .calibration import Calibration
from .source import CarefulSource

PROMISE = 0.75  # chance of a guess's first token that is worth a decision
TELLING = 6  # tokens of an answer by which a look-up can tell whether they repeat others


class Peek:
    """Whether a request is about to say what mostly came true before.

    One request a glance: who came, as soon as it has said a few tokens; then the others in turn.
    """

    def __init__(self, sources: Sequence[CarefulSource], calibration: Calibration) -> None:
        self._sources, self._calibration = sources, calibration
        self._new: dict[str, Request] = {}  # not looked at yet
        self._known: OrderedDict[str, Request] = OrderedDict()  # whose turn is next comes first

    def join(self, request: Request) -> None:
        """It is looked at soon."""
        self._new[request.request_id] = request

    def leave(self, request_id: str) -> None:
        """Not any more."""
        self._new.pop(request_id, None)
        self._known.pop(request_id, None)

    def newcomer(self) -> Request | None:
        """Who came and has begun to answer; once each."""
        for name, request in self._new.items():
            if request.num_output >= TELLING and request.num_pending == 1:
                self._known[name] = self._new.pop(name)
                return request
        return None

    def in_turn(self) -> Request | None:
        """The next of the others, if any of them decodes."""
        for _ in range(len(self._known)):
            name, request = self._known.popitem(last=False)
            self._known[name] = request
            if request.num_pending == 1:
                return request
        return None

    def promises(self, request: Request) -> bool:
        """Whether a look-up finds what mostly came true."""
        guesses = (source.propose(request, 1) for source in self._sources)
        chance = self._calibration.chance
        return any(
            guess is not None
            and len(guess.token_ids) > 0
            and chance(guess.source, guess.kind, request.request_id) >= PROMISE
            for guess in guesses
        )

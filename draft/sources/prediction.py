"""PredictionSource: drafts from the client's prediction, like OpenAI's Predicted Outputs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.interface.request import Request
from .merge import common_len
from .source import Guess, Priors, Source

IN_SYNC, RESYNCED = 0, 1  # kinds of guesses
MAX_ASKEW = 64  # number of matches not aligned to a token after which a search gives up
ORDERS = (8, 4, 3, 2)  # numbers of last tokens to relocate by, the most reliable first
STEADY = 16  # correct tokens after a relocation that make the prediction count as in sync again


@dataclass(slots=True)
class _PredictionCursor:
    """The position in a prediction up to which the answer agrees with it."""

    prediction: array[int]
    data: bytes  # bytes of ``prediction``, for searches
    num_seen: int = 0  # tokens of the answer that were followed
    at: int = 0  # index of the next predicted token, or of the one that the answer contradicts
    lost: bool = False  # whether the last relocation found no position
    num_right: int = STEADY  # correctly predicted tokens since the last relocation

    def follow(self, new: array[int]) -> bool:
        """Advance while the tokens of ``new`` are as predicted; return whether all of them are."""
        same = common_len(new, self.prediction[self.at : self.at + len(new)])
        self.at += same
        self.num_right += same
        return same == len(new)

    def relocate(self, last: array[int]) -> None:
        """Move to the position after the next occurrence of ``last``, the answer's last tokens.

        If they do not occur later in the prediction, the first occurrence is used. Fewer last
        tokens are tried if the longer run does not occur. ``lost`` is set if the prediction does
        not contain the last two tokens; this takes one scan of its bytes.
        """
        self.lost, self.num_right = True, 0
        if _find(self.data, last[-ORDERS[-1] :], 0) is None:
            return
        for order in ORDERS:
            for start in (self.at, 0):
                at = _find(self.data, last[-order:], start) if order <= len(last) else None
                if at is not None:
                    self.at, self.lost = at + order, False
                    return


class PredictionSource(Source):
    """Drafts from ``request.prediction``.

    If the answer departs from the prediction, the source searches the prediction for the answer's
    last tokens and continues after them.
    """

    name = "prediction"
    priors = Priors.constant(0.9, 0.6)

    def __init__(self) -> None:
        self._cursors: dict[Request, _PredictionCursor] = {}

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        """Return the next ``most`` predicted tokens as the only guess.

        There is no guess while the answer's last tokens do not occur in the prediction. O(new
        tokens + most); after a departure, each call scans the prediction until the tokens are
        found.
        """
        if not request.prediction:
            return ()
        cursor = self._follow(request, request.prediction)
        token_ids = cursor.prediction[cursor.at : cursor.at + most]
        if cursor.lost or not token_ids:
            return ()
        kind = IN_SYNC if cursor.num_right >= STEADY else RESYNCED
        return (Guess(token_ids, self.name, kind),)

    def leave(self, request: Request) -> None:
        """Forget the request's cursor."""
        self._cursors.pop(request, None)

    def _follow(self, request: Request, prediction: array[int]) -> _PredictionCursor:
        cursor = self._cursors.get(request)
        if cursor is None:
            cursor = self._cursors[request] = _PredictionCursor(prediction, prediction.tobytes())
        new = request.tokens[request.prompt_len + cursor.num_seen :]
        cursor.num_seen += len(new)
        if new and (cursor.lost or not cursor.follow(new)):
            start = max(request.prompt_len, len(request.tokens) - ORDERS[0])
            cursor.relocate(request.tokens[start:])
        return cursor


def _find(data: bytes, tokens: array[int], start: int) -> int | None:
    """Return the index, in tokens, of the first match of ``tokens`` from ``start`` on, or None.

    The search compares bytes, so a match may begin in the middle of a token. Such matches are
    skipped; after `MAX_ASKEW` of them the search ends without a result.
    """
    size, needle = tokens.itemsize, tokens.tobytes()
    at = data.find(needle, start * size)
    for _ in range(MAX_ASKEW):
        if at < 0 or at % size == 0:
            return at // size if at >= 0 else None
        at = data.find(needle, at + 1)
    return None

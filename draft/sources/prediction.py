"""PredictionSource: the caller's own guess at the answer, as in OpenAI's Predicted Outputs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.interface.request import Request
from .merge import common_len
from .source import Guess, Priors, Source

IN_SYNC, RESYNCED = 0, 1  # kinds
MAX_ASKEW = 64  # places where the bytes of some tokens are found between tokens
ORDERS = (8, 4, 3, 2)  # last tokens to find the place again by, the surest first
STEADY = 16  # tokens that came true since the place was found again: trusted as before


@dataclass(slots=True)
class _PredictionCursor:
    """The position of an answer in its prediction."""

    prediction: array[int]
    data: bytes  # of the prediction
    num_seen: int = 0  # tokens of the answer
    at: int = 0  # the prediction's token that comes next, or where the answer left it
    lost: bool = False
    num_right: int = STEADY  # tokens that came true since the place was last found

    def follow(self, new: array[int]) -> bool:
        """Advance over the tokens that are as predicted; return whether all of ``new`` are."""
        same = common_len(new, self.prediction[self.at : self.at + len(new)])
        self.at += same
        self.num_right += same
        return same == len(new)

    def relocate(self, last: array[int]) -> None:
        """Move behind the answer's last tokens: to their next occurrence, else to the first.

        One scan of the bytes if the prediction lacks the last two tokens.
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
    """Follows ``request.prediction``; if the answer departs from it, it finds the place again."""

    name = "prediction"
    priors = Priors.constant(0.9, 0.6)

    def __init__(self) -> None:
        self._cursors: dict[Request, _PredictionCursor] = {}

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        """O(new tokens + most) in sync; a scan of the prediction for each call when lost."""
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
    """Index of the first place of ``tokens`` from ``start`` on, in items of ``data``.

    Bytes may agree where tokens do not: after `MAX_ASKEW` such places the search ends.
    """
    size, needle = tokens.itemsize, tokens.tobytes()
    at = data.find(needle, start * size)
    for _ in range(MAX_ASKEW):
        if at < 0 or at % size == 0:
            return at // size if at >= 0 else None
        at = data.find(needle, at + 1)
    return None

"""Completing structured output within the token limit of a request.

Near the limit, the grammar's mask is narrowed to tokens after which the output can still be
completed: a JSON object is closed instead of being truncated inside a string. Completions are found
by a search (ends/search.py) whose effort is limited in nodes, not in time. The mask depends only on
the request's own output and limit, so answers do not depend on drafters or batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .ends.closer import Closer
from .ends.narrowing import Narrowing
from .ends.protocols import Matcher

Ids = Sequence[int]
Between = Callable[[int, int], Ids]  # returns the output tokens between two positions
RETRY = 8  # tokens until the next search, if no completion within the limit was found


@dataclass(slots=True)
class _Position:
    """A position in the output at which a completion is searched for.

    ``end``: the shortest completion that was found, if any. ``known``: completions that were found
    while the possible next tokens were judged; None before that. ``guess``: the completion that was
    found last, here or at an earlier position. ``is_inside``: whether the position is inside a
    character, so that another search is made at the next position.
    """

    end: Ids | None
    known: Sequence[Ids] | None = None
    guess: Ids | None = None
    is_inside: bool = False


class ClosingPath:
    """Follows one output, and bans tokens when its shortest completion comes near the limit.

    Completions are searched for only at some positions. While many tokens are left, the next search
    is at the first position at which the limit could be near if every token made the completion
    longer by the maximum. The positions and results depend on the output only.
    """

    def __init__(self, closer: Closer, first: Ids, limit: int) -> None:
        self._closer = closer
        self._limit = limit
        # positions at which completions were searched for, by the number of tokens before them
        self._positions: dict[int, _Position] = {0: _Position(first, guess=first)}

    def forget(self, first: int, last: int) -> None:
        """Forget positions outside [first, last], except the last one at or before ``first``."""
        start = max(number for number in self._positions if number <= first)
        kept = (
            (number, each) for number, each in self._positions.items() if start <= number <= last
        )
        self._positions = dict(kept)

    def narrow(
        self, matcher: Matcher, mask: NDArray[np.bool_], number: int, between: Between
    ) -> bool:
        """Ban the tokens after which the output cannot be completed within the limit.

        Return whether a token was banned. ``number``: number of output tokens before the matcher's
        position. ``mask`` [vocab]: the tokens that the grammar allows, without stop tokens; it is
        changed in place. If no completion fits within the limit, nothing is banned and the limit
        truncates the answer.
        """
        position = self._position(matcher, number, between)
        if position is None or not self._is_near(number, position):
            return False
        banned = self._judge(matcher.deep_copy(), mask, number, position)
        if not len(banned):
            return False
        mask[banned] = False
        if position.end:
            mask[position.end[0]] = True
        return True

    def _judge(
        self, matcher: Matcher, mask: NDArray[np.bool_], number: int, position: _Position
    ) -> NDArray[np.int64]:
        """Return the tokens to ban at a position near the limit."""
        before = self._positions.get(number - 1)
        known = before.known if before is not None and before.known is not None else ()
        most = self._limit - number - 2  # number of tokens after the next one, without a stop token
        narrowing = Narrowing(self._closer, matcher, position.end or (), most, known)
        banned = narrowing.late(mask)
        position.known = narrowing.known
        return banned

    def _is_near(self, number: int, position: _Position) -> bool:
        """Whether the tokens at a position need to be judged."""
        return (
            position.end is not None and 0 <= self._spare(number, position.end) <= self._closer.zone
        )

    def _spare(self, number: int, end: Ids) -> int:
        return self._limit - number - 1 - len(end)

    def _position(self, matcher: Matcher, number: int, between: Between) -> _Position | None:
        """Return the position after ``number`` tokens; None if completions are not searched there.

        Searches that are due at earlier positions are made first.
        """
        at = max(each for each in self._positions if each <= number)
        while at < number:
            following = self._following(at)
            if following > number:
                return None
            there = matcher.deep_copy()
            there.rollback(number - at)
            self._finish(there, at)
            tokens = between(at, following)
            there.try_consume_tokens(list(tokens))
            end = self._end(there, at, following, tokens)
            guess = self._positions[at].guess if end is None else end
            is_inside = bool(self._closer.table.is_partial[tokens[-1]])
            self._positions[following] = _Position(end, guess=guess, is_inside=is_inside)
            at = following
        return self._positions[at]

    def _finish(self, matcher: Matcher, number: int) -> None:
        """Judge the tokens at a skipped position: the judgement at the next position uses them."""
        position = self._positions[number]
        if position.known is None and self._is_near(number, position):
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            size = self._closer.tokens.size
            mask = np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)
            self._judge(matcher, mask, number, position)

    def _following(self, number: int) -> int:
        """Return the next position at which a completion is searched for."""
        position = self._positions[number]
        if position.end is None or (spare := self._spare(number, position.end)) < 0:
            return number + (1 if position.is_inside else RETRY)
        return number + max(1, (spare - self._closer.zone) // (1 + self._closer.growth))

    def _end(self, matcher: Matcher, before: int, number: int, tokens: Ids) -> Ids | None:
        position = self._positions[before]
        guesses = [*(position.known or ())]
        if position.guess is not None:
            is_next = len(tokens) == 1 and position.end is not None
            guesses += (
                self._closer.after_token(position.guess, tokens[0]) if is_next else [position.guess]
            )
        return self._closer.end(matcher, guesses, self._limit - number - 1)

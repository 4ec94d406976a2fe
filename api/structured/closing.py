"""Closing structured output in time: which tokens leave room for the shortest end of an answer.

Near the limit of a request's tokens, the mask of a grammar keeps only tokens after which the output
can still be completed and ended: a JSON object closes instead of being cut in the middle of a
string. An end is found by a search (ends/search.py) whose work is counted in nodes, never in time.
What is allowed is a function of the request's own output and limit: answers stay the same for
every drafter and batch.
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
Between = Callable[[int, int], Ids]  # the tokens from one place of the output to another
RETRY = 8  # tokens from a place without an end in time to the next one that is looked at


@dataclass(slots=True)
class _Place:
    """A place where an end is looked for: the shortest, and those that were found behind tokens.

    ``known``: None until the tokens were judged. ``guess``: the end that was found last, here or
    before. ``is_inside``: it is inside a character, behind which the next place is looked at.
    """

    end: Ids | None
    known: Sequence[Ids] | None = None
    guess: Ids | None = None
    is_inside: bool = False


class ClosingPath:
    """Follows one output, and bans tokens where its shortest end comes near its limit.

    Ends are looked for at some places only: with tokens to spare, the next place is so far ahead as
    the spare tokens last if the end grows behind every token. Which places these are, and what is
    found there, follows from the output alone.
    """

    def __init__(self, closer: Closer, first: Ids, limit: int) -> None:
        self._closer = closer
        self._limit = limit
        self._places: dict[int, _Place] = {0: _Place(first, guess=first)}  # up to the last asked

    def forget(self, first: int, last: int) -> None:
        """Forget what is behind the place ``last``, and what ``first`` makes needless."""
        start = max(number for number in self._places if number <= first)
        kept = ((number, each) for number, each in self._places.items() if start <= number <= last)
        self._places = dict(kept)

    def narrow(
        self, matcher: Matcher, mask: NDArray[np.bool_], number: int, between: Between
    ) -> bool:
        """Ban every token after which the output cannot end in time; whether any was banned.

        ``number``: tokens of the output before this place, where the matcher is. ``mask`` [vocab]
        allows what the grammar does, stop tokens aside, and is changed in place. Where the output
        cannot end in time, nothing is banned: the answer is cut by its limit.
        """
        place = self._place(matcher, number, between)
        if place is None or not self._is_near(number, place):
            return False
        banned = self._judge(matcher.deep_copy(), mask, number, place)
        if not len(banned):
            return False
        mask[banned] = False
        if place.end:
            mask[place.end[0]] = True
        return True

    def _judge(
        self, matcher: Matcher, mask: NDArray[np.bool_], number: int, place: _Place
    ) -> NDArray[np.int64]:
        """Return the late tokens of a place near the limit."""
        before = self._places.get(number - 1)
        known = before.known if before is not None and before.known is not None else ()
        most = self._limit - number - 2  # tokens behind the next one, and the stop token
        narrowing = Narrowing(self._closer, matcher, place.end or (), most, known)
        banned = narrowing.late(mask)
        place.known = narrowing.known
        return banned

    def _is_near(self, number: int, place: _Place) -> bool:
        """Whether the tokens of a place are to be judged."""
        return place.end is not None and 0 <= self._spare(number, place.end) <= self._closer.zone

    def _spare(self, number: int, end: Ids) -> int:
        return self._limit - number - 1 - len(end)

    def _place(self, matcher: Matcher, number: int, between: Between) -> _Place | None:
        """Return the place, if it is one where an end is looked for."""
        at = max(each for each in self._places if each <= number)
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
            guess = self._places[at].guess if end is None else end
            is_inside = bool(self._closer.table.is_partial[tokens[-1]])
            self._places[following] = _Place(end, guess=guess, is_inside=is_inside)
            at = following
        return self._places[at]

    def _finish(self, matcher: Matcher, number: int) -> None:
        """Judge a place that was not asked, for what is found there counts at the next one."""
        place = self._places[number]
        if place.known is None and self._is_near(number, place):
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            size = self._closer.tokens.size
            mask = np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)
            self._judge(matcher, mask, number, place)

    def _following(self, number: int) -> int:
        """Return the next place where an end is looked for."""
        place = self._places[number]
        if place.end is None or (spare := self._spare(number, place.end)) < 0:
            return number + (1 if place.is_inside else RETRY)
        return number + max(1, (spare - self._closer.zone) // (1 + self._closer.growth))

    def _end(self, matcher: Matcher, before: int, number: int, tokens: Ids) -> Ids | None:
        place = self._places[before]
        guesses = [*(place.known or ())]
        if place.guess is not None:
            is_next = len(tokens) == 1 and place.end is not None
            guesses += self._closer.behind(place.guess, tokens[0]) if is_next else [place.guess]
        return self._closer.end(matcher, guesses, self._limit - number - 1)

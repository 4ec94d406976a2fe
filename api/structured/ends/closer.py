"""The shortest ends of the outputs of one grammar: searched for, and guessed from known ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .protocols import Matcher, Tokens
from .search import NARROW, WIDE, EndSearch, Hints
from .spelling import Speller, text_of
from .token_table import MARKS, TokenTable

Ids = Sequence[int]
FIRST_NODES, WIDE_NODES = 2000, 300  # of the search for the shortest answer
NODES = 600  # of a search on the way
LEAST_ZONE = 24  # tokens above the growth from which on every token is looked at
COSTLY = 4  # tokens of one byte that one token of an end may stand for, on the average


@dataclass(frozen=True, eq=False)
class Closer:
    """Finds the shortest completions of the outputs of one grammar.

    ``growth``: tokens by which an end may grow behind one token.
    """

    tokens: Tokens
    table: TokenTable
    hints: Hints = field(default_factory=Hints)
    growth: int = 0

    @property
    def zone(self) -> int:
        """Tokens to spare from which on every token is looked at."""
        return self.growth + LEAST_ZONE

    @cached_property
    def longest_hint(self) -> int:
        """Tokens of the longest value that the schemas give as a hint."""
        return max(map(len, self.hints.values), default=0)

    @cached_property
    def may_end_words(self) -> NDArray[np.bool_]:
        """Tokens that may complete a mark: behind them, a free text may have ended, [vocab]."""
        found = np.zeros(self.tokens.size, dtype=np.bool_)
        found[self.table.special] = True
        lasts = {text[-1:] for ids in self.hints.marks if (text := text_of(self.tokens, ids))}
        for last in lasts:
            found |= [last in text for text in self.tokens.texts]
        return found

    def shortest(self, matcher: Matcher) -> list[int] | None:
        """Return the shortest answer, for a matcher at its beginning, which is given away."""
        search = EndSearch(matcher, self.tokens, self.table, self.hints)
        end = search.find(FIRST_NODES, NARROW)
        most = None if end is None else len(end) - 1
        return search.find(WIDE_NODES, WIDE, most) or end

    def end(self, matcher: Matcher, guesses: Sequence[Ids], most: int) -> Ids | None:
        """Return the end of an answer from where the matcher is: the shortest guess that is one.

        A new one is looked for if no guess has ``most`` tokens or fewer. The matcher comes back to
        where it was.
        """
        ends = (self.written(matcher, guess) for guess in sorted(guesses, key=len))
        known = next((end for end in ends if end is not None), None)
        if known is not None and len(known) <= most:
            return known
        found = [end for end in (known, self.searched(matcher, NODES)[0]) if end is not None]
        return min(found, key=len, default=None)

    def searched(
        self, matcher: Matcher, most_nodes: int, most: int | None = None
    ) -> tuple[list[int] | None, int]:
        """Search from here; return what is found, and the number of nodes that it took.

        ``most``: tokens that an end may have to be of use.
        """
        search = EndSearch(matcher.deep_copy(), self.tokens, self.table, self.hints)
        cost = None if most is None else COSTLY * most + COSTLY  # before it is spelt in few tokens
        return search.find(most_nodes, NARROW, cost), search.num_nodes

    def written(self, matcher: Matcher, end: Ids) -> list[int] | None:
        """The same text as an end here, in the tokens that are allowed here; None if it is none."""
        if not self.completes(matcher, end):
            return None
        ids = Speller(matcher, self.tokens).rewritten(end)
        is_whole = not matcher.is_error() and matcher.is_accepting()
        if not matcher.is_error():
            matcher.rollback(len(ids))
        return ids if is_whole else None

    def completes(self, matcher: Matcher, end: Ids) -> bool:
        """Whether these tokens complete the answer from here."""
        whole = [*end, self.tokens.end]
        return bool(matcher.validate_tokens(whole) == len(whole) if end else matcher.is_accepting())

    def behind(self, end: Ids, token_id: int) -> list[Ids]:
        """Return the rests of an end that may be left behind a token: all, or what it does not
        write.
        """
        text, said = text_of(self.tokens, end), self.tokens.texts[token_id]
        found = [end[1:]] if end and end[0] == token_id else []
        first = _first_mark(text)  # the token may also end the text that stands before it
        for part in dict.fromkeys((said, said[_first_mark(said) :])):
            for at in dict.fromkeys((0, first)):
                if part and text.startswith(part, at) and at + len(part) < len(text):
                    found.append(self._without(end, at + len(part)))
        if said and len(said) < len(text):
            found.append(self._without(end, len(said)))  # of a text whose length counts
        return [*found, end]

    def _without(self, end: Ids, num_bytes: int) -> Ids:
        """Return an end without its first bytes, or without those before a special token."""
        ids, texts = list(end), self.tokens.texts
        while ids and num_bytes > 0 and texts[ids[0]]:
            text = texts[ids.pop(0)]
            if len(text) > num_bytes:
                ids = [*self.tokens.spell(text[num_bytes:]), *ids]
            num_bytes -= len(text)
        return ids


def _first_mark(text: bytes) -> int:
    """Index of the first byte with a meaning inside a string; the length without any."""
    return next((index for index, byte in enumerate(text) if byte in MARKS), len(text))

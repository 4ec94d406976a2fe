"""Short completions of one grammar's outputs: searched for, or derived from known completions."""

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
FIRST_NODES, WIDE_NODES = 2000, 300  # maximum numbers of nodes to search for the shortest answer
NODES = 600  # maximum number of nodes of later searches
LEAST_ZONE = 24  # minimum of `Closer.zone` in tokens
COSTLY = 4  # token limit of a search, per token of a useful completion


@dataclass(frozen=True, eq=False)
class Closer:
    """Finds the shortest completions of one grammar's outputs.

    ``growth``: maximum number of tokens by which a completion may grow after one token.
    """

    tokens: Tokens
    table: TokenTable
    hints: Hints = field(default_factory=Hints)
    growth: int = 0

    @property
    def zone(self) -> int:
        """Largest number of spare tokens at which every possible next token is judged."""
        return self.growth + LEAST_ZONE

    @cached_property
    def longest_hint(self) -> int:
        """Number of tokens of the longest value among the hints."""
        return max(map(len, self.hints.values), default=0)

    @cached_property
    def may_end_text(self) -> NDArray[np.bool_]:
        """Mask [vocab] of the tokens that may complete a delimiter at the end of free text."""
        found = np.zeros(self.tokens.size, dtype=np.bool_)
        found[self.table.special] = True
        lasts = {text[-1:] for ids in self.hints.marks if (text := text_of(self.tokens, ids))}
        for last in lasts:
            found |= [last in text for text in self.tokens.texts]
        return found

    def shortest(self, matcher: Matcher) -> list[int] | None:
        """Return the shortest answer that a search finds, else None.

        The matcher must have consumed no tokens. Its position changes.
        """
        search = EndSearch(matcher, self.tokens, self.table, self.hints)
        end = search.find(FIRST_NODES, NARROW)
        most = None if end is None else len(end) - 1
        return search.find(WIDE_NODES, WIDE, most) or end

    def end(self, matcher: Matcher, guesses: Sequence[Ids], most: int) -> Ids | None:
        """Return a completion from the matcher's position; None if none is found.

        It is the shortest guess that is valid. If no valid guess has at most ``most`` tokens, a
        completion is searched for. The matcher's position is restored.
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
        """Search for a completion from the matcher's position.

        Return the completion or None, and the number of nodes used. ``most``: maximum number of
        tokens of a useful completion.
        """
        search = EndSearch(matcher.deep_copy(), self.tokens, self.table, self.hints)
        # The search counts tokens before the completion is encoded in fewer tokens.
        cost = None if most is None else COSTLY * most + COSTLY
        return search.find(most_nodes, NARROW, cost), search.num_nodes

    def written(self, matcher: Matcher, end: Ids) -> list[int] | None:
        """Return a completion, encoded in tokens that the matcher allows at its position.

        Return None if the text does not complete the answer. The matcher's position is restored.
        """
        if not self.completes(matcher, end):
            return None
        ids = Speller(matcher, self.tokens).rewritten(end)
        is_whole = not matcher.is_error() and matcher.is_accepting()
        if not matcher.is_error():
            matcher.rollback(len(ids))
        return ids if is_whole else None

    def completes(self, matcher: Matcher, end: Ids) -> bool:
        """Whether these tokens complete the answer from the matcher's position."""
        whole = [*end, self.tokens.end]
        return bool(matcher.validate_tokens(whole) == len(whole) if end else matcher.is_accepting())

    def after_token(self, end: Ids, token_id: int) -> list[Ids]:
        """Return candidates for a completion after a token, given the completion ``end`` before it.

        They are ``end`` without parts that the token may have written already, and ``end`` itself.
        """
        text, said = text_of(self.tokens, end), self.tokens.texts[token_id]
        found = [end[1:]] if end and end[0] == token_id else []
        first = _first_mark(text)  # the token may also end the preceding text
        for part in dict.fromkeys((said, said[_first_mark(said) :])):
            for at in dict.fromkeys((0, first)):
                if part and text.startswith(part, at) and at + len(part) < len(text):
                    found.append(self._without(end, at + len(part)))
        if said and len(said) < len(text):
            # If the length of the text is limited, the token shortens the rest by as many bytes.
            found.append(self._without(end, len(said)))
        return [*found, end]

    def _without(self, end: Ids, num_bytes: int) -> Ids:
        """Return a completion without its first ``num_bytes`` bytes.

        If a special token comes earlier, the completion begins with it.
        """
        ids, texts = list(end), self.tokens.texts
        while ids and num_bytes > 0 and texts[ids[0]]:
            text = texts[ids.pop(0)]
            if len(text) > num_bytes:
                ids = [*self.tokens.spell(text[num_bytes:]), *ids]
            num_bytes -= len(text)
        return ids


def _first_mark(text: bytes) -> int:
    """Return the index of the first quotation mark or backslash, else the length of the text."""
    return next((index for index, byte in enumerate(text) if byte in MARKS), len(text))

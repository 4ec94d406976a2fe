"""A matcher that can roll back over any token.

To roll back over a token, the grammar library counts its bytes. The count is wrong if a grammar
refers by number to a token that has text. `RewindingMatcher` then restarts and consumes the path
again.
"""

from __future__ import annotations

import re
from collections.abc import Set

from llguidance import LLMatcher

_NAMED = re.compile(r"<\[([0-9,]+)\]>")


def named_tokens(source: str) -> frozenset[int]:
    """Return the tokens that the text of a grammar refers to by number."""
    lists = (found.split(",") for found in _NAMED.findall(source))
    return frozenset(int(number) for each in lists for number in each if number)


class RewindingMatcher:
    """A `Matcher` that wraps llguidance's matcher and can roll back over any token.

    ``matcher``: a matcher that has consumed no tokens. ``uncounted``: tokens that it cannot roll
    back over.
    """

    def __init__(self, matcher: LLMatcher, uncounted: Set[int]) -> None:
        self._beginning = matcher
        self._matcher = matcher.deep_copy()
        self._uncounted = uncounted
        self._path: list[int] = []

    def deep_copy(self) -> RewindingMatcher:
        """Copy the matcher with its state."""
        copy = RewindingMatcher(self._beginning, self._uncounted)
        copy._matcher = self._matcher.deep_copy()
        copy._path = [*self._path]
        return copy

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Consume tokens as far as they are allowed. Return the number of consumed tokens."""
        count = self._matcher.try_consume_tokens(tokens)
        self._path += tokens[:count]
        return count

    def rollback(self, num_tokens: int) -> bool:
        """Undo the last ``num_tokens`` consumed tokens. Return whether it succeeded."""
        if not num_tokens:
            return True
        kept, dropped = self._path[:-num_tokens], self._path[-num_tokens:]
        self._path = kept
        if self._uncounted.isdisjoint(dropped):
            return self._matcher.rollback(num_tokens)
        self._matcher = self._beginning.deep_copy()
        return self._matcher.try_consume_tokens(kept) == len(kept)

    def validate_tokens(self, tokens: list[int]) -> int:
        """Return the number of leading tokens that are allowed. The position does not change."""
        return self._matcher.validate_tokens(tokens)

    def compute_bitmask(self) -> bytes:
        """Return the mask of the next token, one bit per token."""
        return self._matcher.compute_bitmask()

    def compute_ff_tokens(self) -> list[int]:
        """Return the tokens that must follow."""
        return self._matcher.compute_ff_tokens()

    def compute_ff_bytes(self) -> bytes:
        """Return the bytes that must follow."""
        return self._matcher.compute_ff_bytes()

    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def is_stopped(self) -> bool:
        """Whether only the end of the answer may follow."""
        return self._matcher.is_stopped()

    def is_error(self) -> bool:
        """Whether the matcher has failed."""
        return self._matcher.is_error()

    def get_error(self) -> str:
        """Return why the matcher has failed."""
        return self._matcher.get_error()

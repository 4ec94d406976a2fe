"""NgramProposer: prompt look-up. What followed the last few tokens before may follow them again.

Source: prompt look-up decoding (Saxena 2023), as ``prompt_lookup_num_tokens`` in transformers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ..core.proposer import DraftRow
from ..core.step import Draft

SOURCE = "ngram"


class NgramProposer:
    """Continues the most recent earlier occurrence of a request's last tokens.

    Tries the last ``max_len`` tokens, then fewer, down to ``min_len``. One search scans the
    request's last ``window`` tokens in C, no index is kept: O(window) for each length tried.
    """

    def __init__(self, *, min_len: int = 3, max_len: int = 8, window: int = 4096) -> None:
        self._lengths = range(max_len, min_len - 1, -1)
        self._window = window

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """One draft for each row; empty where nothing repeats."""
        return [Draft.of(self._look_up(row.tokens, row.max_draft), SOURCE) for row in rows]

    def forget(self, request_ids: Sequence[str], fresh_pages: array[int]) -> None:
        """Nothing is remembered."""

    def _look_up(self, tokens: array[int], max_draft: int) -> Sequence[int]:
        tokens = tokens[-self._window :]
        text = tokens.tobytes()
        for length in self._lengths:
            start = _find_last(text, tokens[-length:].tobytes(), tokens.itemsize)
            if start is not None:
                return tokens[start + length : start + length + max_draft]
        return ()


def _find_last(text: bytes, suffix: bytes, itemsize: int) -> int | None:
    """Index of the last occurrence of ``suffix`` in ``text`` before its end, in items."""
    end = len(text) - itemsize
    while (at := text.rfind(suffix, 0, end)) >= 0:
        if at % itemsize == 0:
            return at // itemsize
        end = at + len(suffix) - 1
    return None

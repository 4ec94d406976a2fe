"""History: how often each token occurs in a request's tokens, updated as the request grows."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class History:
    """Counts of a request's tokens from index ``start`` on.

    The array of tokens only grows, so each token is counted once. For another array, counting
    begins anew.
    """

    def __init__(self, start: int, vocab_size: int) -> None:
        self._start = self._stop = start  # tokens before ``_stop`` are counted
        self._vocab_size = vocab_size
        self._follow(array("q"))

    def counts(
        self, tokens: array[int], tail: Sequence[int]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return distinct ids, and the count of each in ``tokens[start:]`` plus ``tail``."""
        if tokens is not self._tokens or len(tokens) < self._stop:
            self._follow(tokens)
        self._count(tokens[self._stop :])
        self._stop = max(self._stop, len(tokens))
        ids, counts = np.array(self._ids, np.int32), np.array(self._counts, np.int32)
        if not tail:
            return ids, counts
        more = Counter(self._known(tail))
        for token_id in more.keys() & self._slots.keys():
            counts[self._slots[token_id]] += more.pop(token_id)
        return (
            np.append(ids, np.fromiter(more.keys(), np.int32)),
            np.append(counts, np.fromiter(more.values(), np.int32)),
        )

    def _follow(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self._stop = self._start
        self._slots: dict[int, int] = {}  # index of each id
        self._ids: array[int] = array("i")
        self._counts: array[int] = array("i")

    def _count(self, token_ids: Iterable[int]) -> None:
        for token_id in self._known(token_ids):
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot < len(self._ids):
                self._counts[slot] += 1
            else:
                self._ids.append(token_id)
                self._counts.append(1)

    def _known(self, token_ids: Iterable[int]) -> Iterable[int]:
        return (token_id for token_id in token_ids if 0 <= token_id < self._vocab_size)

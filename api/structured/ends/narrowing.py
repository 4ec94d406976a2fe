"""Find late tokens: tokens after which the answer cannot be completed within its limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .closer import Closer
from .protocols import Matcher
from .spelling import text_of

Ids = Sequence[int]
# maximum number of nodes of a search after one token, and of all searches at one position
TOKEN_NODES, PLACE_NODES = 60, 160
FEW = 256  # up to this number of allowed tokens, each is tried; above, groups are sampled
FEWER = 64  # number of tokens of a group to try if some of its samples are too late
NUM_ENDS = 4  # number of the shortest and of the longest tokens of a group to sample
NUM_FREE = 3  # number of tokens to sample if any text may follow
NUM_FIRSTS = 12  # number of tokens with different first bytes to sample
NUM_BYTES = 3  # maximum number of tokens to complete a character
TIGHT = 4  # with fewer spare tokens than this, samples are not representative
ROOMY = 32  # text without quotes is allowed if the longest hint leaves this many spare tokens
NUM_KNOWN = 8  # maximum number of known completions to try after every token


class Narrowing:
    """Finds the late tokens at one position. The matcher's position is restored.

    ``end``: the shortest known completion from this position. ``most``: maximum number of tokens
    after the next one. ``known``: completions that were found at the previous position; those found
    here are added.
    """

    def __init__(
        self, closer: Closer, matcher: Matcher, end: Ids, most: int, known: Sequence[Ids]
    ) -> None:
        self._closer = closer
        self._table = closer.table
        self._matcher = matcher
        self._end = end
        self._most = most
        self._spare = most + 1 - len(end)
        self._nodes_left = PLACE_NODES
        self.known = known

    def late(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the late tokens among those that ``mask`` [vocab] allows."""
        allowed, is_free = np.flatnonzero(mask), self._table.is_free(mask)
        if not self._end and is_free:  # free text, which may be truncated anywhere
            return self._late(allowed[self._closer.may_end_text[allowed]])
        if len(allowed) <= FEW:
            return self._late(allowed)
        is_named = np.isin(allowed, self._closer.hints.named)
        named, allowed = allowed[is_named], allowed[~is_named]
        is_marked = self._table.groups[allowed] > 0
        is_partial = self._table.is_partial[allowed] & ~is_marked
        banned = [
            self._late(named),
            self._late_groups(allowed[is_marked]),
            self._late_plain(allowed[~is_marked & ~is_partial], is_free=is_free),
        ]
        if len(self._end) + NUM_BYTES > self._most:
            banned.append(allowed[is_partial])
        return np.concatenate(banned)

    def _late_groups(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the late tokens among tokens with a quotation mark or backslash.

        Of the tokens with the same text from the mark on, only the longest is tried.
        """
        groups = self._table.groups[token_ids]
        by_length = np.lexsort((self._table.lengths[token_ids], groups))
        last = by_length[np.flatnonzero(np.diff(groups[by_length], append=0))]
        late = self._table.groups[self._late(np.sort(token_ids[last]))]
        found: NDArray[np.int64] = token_ids[np.isin(groups, late)]
        return found

    def _late_plain(self, token_ids: NDArray[np.int64], *, is_free: bool) -> NDArray[np.int64]:
        """Return the late tokens among tokens without quotation marks and backslashes."""
        if self._spare > ROOMY + self._closer.longest_hint:
            return token_ids[:0]
        if is_free and self._spare >= TIGHT:
            some = token_ids[:: max(1, len(token_ids) // NUM_FREE)]
        else:  # after some texts, a pattern may require other completions
            some = self._some(token_ids)
        if (is_free or self._spare >= TIGHT) and not len(self._late(some)):
            return token_ids[:0]
        tried = np.isin(token_ids, self._beginnings())
        if not is_free:
            tried[:FEWER] = True
        return np.concatenate([self._late(token_ids[tried]), token_ids[~tried]])

    def _beginnings(self) -> list[int]:
        """Return the tokens whose text is a prefix of the completion's text."""
        text = text_of(self._closer.tokens, self._end)
        found = (self._closer.tokens.id_of(text[:length]) for length in range(1, len(text) + 1))
        return [token_id for token_id in found if token_id is not None]

    def _some(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a sample: the shortest and the longest tokens, and some by their first bytes."""
        lengths, firsts = self._table.lengths[token_ids], self._table.firsts[token_ids]
        by_length = token_ids[np.argsort(lengths, kind="stable")]
        _, places = np.unique(firsts, return_index=True)
        step = max(1, len(places) // NUM_FIRSTS)
        return np.unique(
            np.concatenate([by_length[:NUM_ENDS], by_length[-NUM_ENDS:], token_ids[places[::step]]])
        )

    def _late(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        late = [i for i in token_ids.tolist() if not self._is_in_time(i)]
        return np.array(late, dtype=np.int64)

    def _is_in_time(self, token_id: int) -> bool:
        """Whether the answer can be completed within its limit after this token."""
        if self._matcher.is_error() or self._matcher.try_consume_tokens([token_id]) != 1:
            return False
        try:
            if self._matcher.is_accepting():
                return self._most >= 0
            ends = [end for end in self._guesses(token_id) if self._completes(end)]
            return any(map(self._fits, ends)) if ends else self._has_new_end()
        finally:
            if not self._matcher.is_error():
                self._matcher.rollback(1)

    def _guesses(self, token_id: int) -> Iterator[Ids]:
        yield from self._closer.after_token(self._end, token_id)
        yield from self.known

    def _completes(self, end: Ids) -> bool:
        return self._closer.completes(self._matcher, end)

    def _fits(self, end: Ids) -> bool:
        """Whether a completion has at most ``most`` tokens, encoded in tokens that are allowed."""
        if len(end) < self._most:
            return True  # even if an allowed encoding takes one more token
        written = self._closer.written(self._matcher, end) if len(end) == self._most else None
        return written is not None and len(written) <= self._most

    def _has_new_end(self) -> bool:
        """Whether a search finds a completion of at most ``most`` tokens."""
        if self._nodes_left <= 0 or self._most <= 0:
            return False
        most_nodes = min(TOKEN_NODES, self._nodes_left)
        end, num_nodes = self._closer.searched(self._matcher, most_nodes, self._most)
        self._nodes_left -= num_nodes
        if end is None or len(end) > self._most:
            return False
        self.known = [end, *self.known[: NUM_KNOWN - 1]]
        return True

"""Find tokens that come too late: behind them, the answer could not be completed by its limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .closer import Closer
from .protocols import Matcher
from .spelling import text_of

Ids = Sequence[int]
TOKEN_NODES, PLACE_NODES = 60, 160  # of searches behind one token, and behind all of one place
FEW = 256  # allowed tokens that are tried one by one; of more, those of a kind together
FEWER = 64  # that many of a kind are tried where some of them come too late
NUM_ENDS = 4  # short ones and long ones of a kind that stand for the others
NUM_FREE = 3  # that stand for all of a text that may be any
NUM_FIRSTS = 12  # of a kind that begin differently
NUM_BYTES = 3  # tokens that complete a character, at most
TIGHT = 4  # with fewer tokens to spare, some do not stand for all of a kind
ROOMY = 32  # with more tokens to spare than that above the longest hint, plain text is harmless
NUM_KNOWN = 8  # ends that are tried behind every token


class Narrowing:
    """Judges the tokens of one place. ``matcher`` is there, is its own, and comes back there.

    ``end``: the shortest end that is known here. ``most``: tokens that an end may have behind the
    next token. ``known``: ends that were found behind tokens of the place before, and then those
    that are found here.
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
        """Return the tokens of a mask [vocab] behind which every known end is too long."""
        allowed, is_free = np.flatnonzero(mask), self._table.is_free(mask)
        if not self._end and is_free:  # words, which may be cut anywhere
            return self._late(allowed[self._closer.may_end_words[allowed]])
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
        """Late tokens with marks; of those with the same marks and the same behind, the longest."""
        groups = self._table.groups[token_ids]
        by_length = np.lexsort((self._table.lengths[token_ids], groups))
        last = by_length[np.flatnonzero(np.diff(groups[by_length], append=0))]
        late = self._table.groups[self._late(np.sort(token_ids[last]))]
        found: NDArray[np.int64] = token_ids[np.isin(groups, late)]
        return found

    def _late_plain(self, token_ids: NDArray[np.int64], *, is_free: bool) -> NDArray[np.int64]:
        """Late tokens among those without marks."""
        if self._spare > ROOMY + self._closer.longest_hint:
            return token_ids[:0]
        if is_free and self._spare >= TIGHT:
            some = token_ids[:: max(1, len(token_ids) // NUM_FREE)]
        else:  # a pattern may want other ends behind some of the texts that it allows
            some = self._some(token_ids)
        if (is_free or self._spare >= TIGHT) and not len(self._late(some)):
            return token_ids[:0]
        tried = np.isin(token_ids, self._beginnings())
        if not is_free:
            tried[:FEWER] = True
        return np.concatenate([self._late(token_ids[tried]), token_ids[~tried]])

    def _beginnings(self) -> list[int]:
        """Tokens that the text of the end begins with."""
        text = text_of(self._closer.tokens, self._end)
        found = (self._closer.tokens.id_of(text[:length]) for length in range(1, len(text) + 1))
        return [token_id for token_id in found if token_id is not None]

    def _some(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the shortest and the longest, and some that begin differently."""
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
        """Whether the answer can be completed in time behind this token."""
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
        yield from self._closer.behind(self._end, token_id)
        yield from self.known

    def _completes(self, end: Ids) -> bool:
        return self._closer.completes(self._matcher, end)

    def _fits(self, end: Ids) -> bool:
        """Whether an end is short enough in the tokens that it has here."""
        if len(end) < self._most:
            return True  # one more token may come of another spelling
        written = self._closer.written(self._matcher, end) if len(end) == self._most else None
        return written is not None and len(written) <= self._most

    def _has_new_end(self) -> bool:
        """Whether a search finds an end that is short enough."""
        if self._nodes_left <= 0 or self._most <= 0:
            return False
        most_nodes = min(TOKEN_NODES, self._nodes_left)
        end, num_nodes = self._closer.searched(self._matcher, most_nodes, self._most)
        self._nodes_left -= num_nodes
        if end is None or len(end) > self._most:
            return False
        self.known = [end, *self.known[: NUM_KNOWN - 1]]
        return True

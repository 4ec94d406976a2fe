"""SuffixSource: drafts the tokens that followed an earlier occurrence of the last few tokens.

The occurrence may be in the same request or in another one. Drafting from earlier outputs follows
suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), and drafting from the request's own tokens
follows prompt look-up decoding (Saxena 2023). A hash table of fixed size replaces the suffix tree.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.interface.request import Request
from ...radix_cache.namespaces import FlushedNamespaces
from .source import INDEX_CHUNK, Chances, Guess, Priors, Source

ORDERS = (16, 8, 4, 3, 2, 1)  # numbers of last tokens that must match, the most reliable first
NUM_SHARED = 3  # number of leading ORDERS that are also looked up in other requests
FIRST_ORDERS = (2, 4)  # indices of the orders whose oldest occurrence is indexed, too
MAX_ORDER = ORDERS[0]
MAX_REQUESTS = 2**14  # maximum number of ended requests, of about 1.4 KiB each without tokens
FIRST_KIND = len(ORDERS)  # kind of guesses from oldest occurrences; lower kinds: from newest ones
SHARED_KIND = FIRST_KIND + len(FIRST_ORDERS)

MASK = 2**64 - 1
BASE = 0x9E3779B97F4A7C15  # base of the polynomial hash; odd, so that it has an inverse
FEW_TO_HASH, FEW_TO_INDEX = 64, 12  # numbers of tokens up to which a Python loop beats numpy
_POWERS = np.cumprod(np.array([1] + [BASE] * INDEX_CHUNK, np.uint64))
_INVERSES = np.cumprod(np.array([1] + [pow(BASE, -1, 2**64)] * INDEX_CHUNK, np.uint64))
_SHIFTS = tuple(pow(BASE, order, 2**64) for order in ORDERS)

# Fitted on the tuning half of bench/common/real_tasks.py with SmolLM2-135M: see
# docs/speculation-internals.md. Rows are kinds, columns are buckets of positions. Values with few
# observations (sampled requests, occurrences in other requests) are estimates.
_GREEDY: tuple[Chances, ...] = (
    (0.98, 0.98, 0.98, 0.98, 0.99, 0.99),
    (0.88, 0.92, 0.95, 0.96, 0.95, 0.98),
    (0.77, 0.78, 0.83, 0.92, 0.96, 0.96),
    (0.68, 0.73, 0.80, 0.86, 0.97, 0.96),
    (0.55, 0.68, 0.73, 0.85, 0.94, 0.96),
    (0.22, 0.47, 0.69, 0.79, 0.90, 0.95),
    (0.78, 0.82, 0.87, 0.90, 0.96, 0.99),
    (0.59, 0.62, 0.73, 0.76, 0.93, 0.94),
    (0.79, 0.79, 0.73, 0.66, 0.66, 0.66),
    (0.67, 0.70, 0.62, 0.54, 0.54, 0.54),
    (0.74, 0.85, 0.86, 0.75, 0.75, 0.75),
)
_SAMPLED: tuple[Chances, ...] = (
    (0.87, 0.86, 0.84, 0.83, 0.84, 0.84),
    (0.83, 0.86, 0.93, 0.91, 0.86, 0.84),
    (0.62, 0.73, 0.73, 0.84, 0.92, 0.86),
    (0.56, 0.54, 0.74, 0.73, 0.94, 0.86),
    (0.39, 0.54, 0.61, 0.70, 0.93, 0.85),
    (0.14, 0.39, 0.53, 0.72, 0.86, 0.75),
    (0.64, 0.63, 0.60, 0.81, 0.82, 0.82),
    (0.39, 0.55, 0.69, 0.63, 0.86, 0.86),
    (0.61, 0.61, 0.61, 0.61, 0.61, 0.61),
    (0.38, 0.45, 0.50, 0.50, 0.50, 0.50),
    (0.32, 0.49, 0.57, 0.57, 0.57, 0.57),
)
PRIORS = Priors(_GREEDY, _SAMPLED)


@dataclass(slots=True, eq=False)
class TokenHistory:
    """The tokens of one request. Positions always count from the request's first token.

    ``hashes[i]`` is the polynomial hash of the first ``i`` tokens; it is empty after the request
    has ended.
    """

    number: int  # unique number of the history, never reused, so old entries stay invalid
    scope: Hashable  # only look-ups of the same scope find this history
    tokens: array[int]  # the live request's own array; after its end a copy from `offset` on
    own_salts: tuple[int, ...]  # [len(ORDERS)] hash salts for the request's own look-ups
    first_salts: tuple[int, ...]  # [len(FIRST_ORDERS)] hash salts of the oldest occurrences
    shared_salts: tuple[int, ...]  # [NUM_SHARED] salts for other requests' look-ups; empty: none
    shared_from: int  # positions before this one were indexed for others by another history
    indexed_to: int  # positions from `shared_from` to this one are in the table
    indexed_from: int  # positions from this one to `shared_from` serve own look-ups
    offset: int = 0  # position of tokens[0]
    hashes: array[int] = field(default_factory=lambda: array("Q", (0,)))

    def hash_new(self) -> int:
        """Extend ``hashes`` to the newest token; return the number of tokens."""
        length = len(self.tokens)
        missing = length + 1 - len(self.hashes)
        while missing > FEW_TO_HASH:
            self._hash_many(min(missing, INDEX_CHUNK))
            missing = length + 1 - len(self.hashes)
        if missing > 0:
            self._hash_few(missing, length)
        return length

    def _hash_few(self, missing: int, length: int) -> None:
        hashes = self.hashes
        last = hashes[-1]
        for token in self.tokens[length - missing :]:
            # The product spreads the newest token to the top bits, which select the slot.
            last = (last + token) * BASE & MASK
            hashes.append(last)

    def _hash_many(self, count: int) -> None:
        """Extend ``hashes`` by ``count`` tokens with numpy.

        ``hashes[i] / BASE**i`` is a sum over the first ``i`` tokens, so it can be computed by
        `cumsum`.
        """
        first = len(self.hashes) - 1
        tokens = np.frombuffer(self.tokens[first : first + count], np.uint64)
        sums = np.cumsum(tokens * _INVERSES[:count]) + np.uint64(self.hashes[-1])
        self.hashes.frombytes((sums * _POWERS[1 : count + 1]).tobytes())


class Occurrence(NamedTuple):
    """An earlier occurrence of a request's last tokens: ``history.tokens[at]`` followed them."""

    history: TokenHistory
    at: int
    kind: int


class SuffixIndex:
    """A hash table that maps a request's last n tokens, for n in ORDERS, to earlier occurrences.

    There are entries for the newest and the oldest occurrence in the request itself, and for the
    newest one in another request. The table is direct-mapped and has ``num_slots`` (a power of two)
    entries of 8 bytes. A new entry replaces any other entry in its slot, and entries are never
    deleted, so memory is bounded. A look-up therefore compares the tokens themselves: an entry of a
    dropped history, of another scope or with other tokens is a miss. The constructor writes to the
    whole table, because page faults during steps would take more time than all look-ups.
    """

    def __init__(self, num_slots: int = 2**22) -> None:
        self.histories: dict[int, TokenHistory] = {}
        # [num_slots] entries: number of the history << 32 | position
        self._table: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self._table.fill(0)
        self._entries = self._table.data  # a memoryview reads and writes single ints faster
        self._slot_mask = num_slots - 1
        self._shift = 65 - num_slots.bit_length()  # the top bits of a hash depend on all tokens
        self._num_opened = 0

    def open(
        self, tokens: array[int], *, scope: Hashable, shared_salt: int | None, shared_from: int = 0
    ) -> TokenHistory:
        """Return a new history over ``tokens``, the live request's own array, which may grow.

        Look-ups find tokens in other histories with the same ``scope`` and the same
        ``shared_salt``; if ``shared_salt`` is None, they search only the history itself. Other
        histories cannot find positions before ``shared_from`` in this one, because they are already
        indexed in another history.
        """
        self._num_opened += 1
        number = self._num_opened
        shared = () if shared_salt is None else ORDERS[:NUM_SHARED]
        history = TokenHistory(
            number=number,
            scope=scope,
            tokens=tokens,
            own_salts=tuple(self._salt(number, order) for order in ORDERS),
            first_salts=tuple(self._salt(~number, ORDERS[index]) for index in FIRST_ORDERS),
            shared_salts=tuple(self._salt(shared_salt or 0, order) for order in shared),
            shared_from=shared_from,
            indexed_to=shared_from,
            indexed_from=shared_from,
        )
        self.histories[number] = history
        return history

    def _salt(self, seed: int, order: int) -> int:
        # A hash of integers is the same in every process.
        return hash((seed, order)) & self._slot_mask

    def keep(self, history: TokenHistory) -> None:
        """Keep a copy of the tokens that other histories may find, after the request has ended."""
        start = max(0, history.shared_from - MAX_ORDER)
        history.tokens = history.tokens[start:]
        history.offset = start
        history.hashes = array("Q")

    def drop(self, history: TokenHistory) -> None:
        """Forget a history. O(1): its entries stay in the table and become invalid."""
        del self.histories[history.number]

    # -- looking up

    def find(self, history: TokenHistory) -> list[Occurrence]:
        """Return distinct earlier occurrences of a live history's last tokens, at most three.

        They are the newest one in the history itself, with the longest order that matches; the
        newest one in another history, if its order is at least as long; and the oldest one in the
        history itself, if another occurrence was found. O(1) each.
        """
        end = history.hash_new()
        places = []
        num_orders = len(ORDERS)  # number of orders at least as long as the newest match
        for index, salt in enumerate(history.own_salts):
            place = self._look_up(history, end, index, salt, index)
            if place is not None:
                places.append(place)
                num_orders = index + 1
                break
        for index, salt in enumerate(history.shared_salts[:num_orders]):
            place = self._look_up(history, end, index, salt, SHARED_KIND + index)
            if place is not None and place.history is not history:
                places.append(place)
                break
        for number, index in enumerate(FIRST_ORDERS if places else ()):
            salt = history.first_salts[number]
            place = self._look_up(history, end, index, salt, FIRST_KIND + number)
            if place is not None:
                if all(place[:2] != other[:2] for other in places):
                    places.append(place)
                break
        return places

    def _look_up(
        self, history: TokenHistory, end: int, index: int, salt: int, kind: int
    ) -> Occurrence | None:
        order, hashes = ORDERS[index], history.hashes
        if order >= len(hashes):
            return None
        window = hashes[-1] - hashes[-1 - order] * _SHIFTS[index]
        entry = self._entries[(window >> self._shift ^ salt) & self._slot_mask]
        found = self.histories.get(entry >> 32)
        if found is None or found.scope != history.scope:
            return None
        at = (entry & 0xFFFFFFFF) - found.offset
        if found.tokens[at - order : at] != history.tokens[end - order :]:
            return None  # A slice beyond the kept tokens is shorter and so differs.
        return Occurrence(found, at, kind)

    # -- indexing

    def index(self, history: TokenHistory, most: int, *, for_others: bool = False) -> int:
        """Index up to ``most`` tokens of a history; return the number indexed.

        Positions from ``shared_from`` on come first. Positions before it are already indexed in
        another history; they follow in descending order, for the history's own look-ups, unless
        ``for_others`` is set. The last token is indexed when the next one is known, so a look-up
        never finds itself.
        """
        first = history.indexed_to
        stop = history.indexed_to = max(first, min(history.hash_new(), first + most))
        if stop - first > FEW_TO_INDEX:
            self._index_many(history, first, stop)
        elif stop > first:
            self._index_few(history, first, stop)
        num_indexed, end = stop - first, history.indexed_from
        if not for_others and num_indexed < most and end:
            begin = history.indexed_from = max(0, end - (most - num_indexed))
            self._index_older(history, begin, end)
            num_indexed += end - begin
        return num_indexed

    def _index_few(self, history: TokenHistory, first: int, stop: int) -> None:
        hashes, entries, shift, mask = history.hashes, self._entries, self._shift, self._slot_mask
        number = history.number
        for position in range(first, stop):
            entry, last = number << 32 | position, hashes[position]
            windows = [
                (last - hashes[position - order] * power) >> shift if order <= position else None
                for order, power in zip(ORDERS, _SHIFTS, strict=True)
            ]
            for window, salt in (
                *zip(windows, history.own_salts, strict=True),
                *zip(windows, history.shared_salts, strict=False),
            ):
                if window is not None:
                    entries[(window ^ salt) & mask] = entry
            for index, salt in zip(FIRST_ORDERS, history.first_salts, strict=True):
                window = windows[index]
                if window is not None:
                    slot = (window ^ salt) & mask
                    if entries[slot] >> 32 != number:
                        entries[slot] = entry

    def _index_many(self, history: TokenHistory, first: int, stop: int) -> None:
        """Index the positions from ``first`` to ``stop`` with numpy."""
        for index, windows, entries in self._windows(history, first, stop):
            self._table[self._slots(windows, history.own_salts[index])] = entries
            if index < len(history.shared_salts):
                self._table[self._slots(windows, history.shared_salts[index])] = entries
            if index in FIRST_ORDERS:
                salt = history.first_salts[FIRST_ORDERS.index(index)]
                slots = self._slots(windows, salt)
                is_free = (self._table[slots] >> 32) != history.number
                # The first of several positions with one slot must win, so it is assigned last.
                self._table[slots[is_free][::-1]] = entries[is_free][::-1]

    def _index_older(self, history: TokenHistory, first: int, stop: int) -> None:
        """Index the positions from ``first`` to ``stop``, which precede all indexed positions.

        They never replace the newest occurrences in the history, and always replace the oldest
        ones.
        """
        for index, windows, entries in self._windows(history, first, stop):
            slots = self._slots(windows, history.own_salts[index])
            is_free = (self._table[slots] >> 32) != history.number
            self._table[slots[is_free]] = entries[is_free]
            if index in FIRST_ORDERS:
                slots = self._slots(windows, history.first_salts[FIRST_ORDERS.index(index)])
                self._table[slots[::-1]] = entries[::-1]

    def _windows(
        self, history: TokenHistory, first: int, stop: int
    ) -> Iterator[tuple[int, NDArray[np.uint64], NDArray[np.int64]]]:
        """Yield the index of each order, and hashes and table entries for the positions.

        For order n, the hash of a position covers the n tokens before it. Positions with fewer
        tokens before them are left out.
        """
        low = max(0, first - MAX_ORDER)
        hashes = np.frombuffer(history.hashes[low:stop], "u8")
        entries = np.arange(first, stop) | history.number << 32
        for index, (order, power) in enumerate(zip(ORDERS, _SHIFTS, strict=True)):
            count = min(stop - first, len(hashes) - order)
            if count > 0:
                windows = hashes[-count:] - hashes[-count - order : -order] * np.uint64(power)
                windows >>= np.uint64(self._shift)
                yield index, windows, entries[-count:]

    def _slots(self, windows: NDArray[np.uint64], salt: int) -> NDArray[np.int64]:
        return (windows ^ np.uint64(salt)).view(np.int64)


class SuffixSource(Source):
    """Drafts the tokens that followed an earlier occurrence of a request's last tokens.

    The occurrence may be in any request of the namespace. The arrays of live requests are read in
    place. After a request ends, the source keeps the tokens that it did not share with earlier
    requests: at most ``max_tokens`` tokens of ``max_requests`` requests; the least recently used
    are dropped first. ``own_only``: look up in the request's own tokens only, and drop them when it
    ends.
    """

    priors = PRIORS

    def __init__(
        self,
        *,
        max_tokens: int = 1_000_000,
        max_requests: int = MAX_REQUESTS,
        num_slots: int = 2**22,
        own_only: bool = False,
    ) -> None:
        self.name = "ngram" if own_only else "suffix"
        self._own_only = own_only
        self._max_tokens, self._max_requests = max_tokens, max_requests
        self._index = SuffixIndex(num_slots)
        self._live: dict[Request, TokenHistory] = {}
        self._ended: OrderedDict[int, TokenHistory] = OrderedDict()  # least recently used first
        self._num_kept = 0  # tokens of ended histories

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        """Return the tokens that followed earlier occurrences of the request's last tokens."""
        history = self._history(request)
        return list(self._guesses(history, most))

    def _guesses(self, history: TokenHistory, most: int) -> Iterator[Guess]:
        for place in self._index.find(history):
            if place.history.number in self._ended:
                self._ended.move_to_end(place.history.number)
            token_ids = _continuation(place, history, most)
            if token_ids:
                yield Guess(token_ids, self.name, place.kind)

    def index(self, request: Request, *, for_others: bool = False) -> int:
        """Index new tokens of a request; return the number indexed.

        Prompt tokens that were cached are indexed for the request's own look-ups only.
        """
        is_unseen = request not in self._live and not request.num_output
        if for_others and (is_unseen or self._is_private(request)):
            return 0
        return self._index.index(self._history(request), INDEX_CHUNK, for_others=for_others)

    def leave(self, request: Request) -> None:
        """Keep the tokens of an ended request that it did not share with earlier requests."""
        if self._is_private(request):
            self._forget(request)
            return
        if request not in self._live and not request.num_output:
            return
        self.index(request, for_others=True)
        history = self._live.pop(request)
        self._index.keep(history)
        self._ended[history.number] = history
        self._num_kept += len(history.tokens)
        while self._num_kept > self._max_tokens or len(self._ended) > self._max_requests:
            self._drop(next(iter(self._ended.values())))

    def _is_private(self, request: Request) -> bool:
        return self._own_only or request.cache.is_private

    def _forget(self, request: Request) -> None:
        history = self._live.pop(request, None)
        if history is not None:
            self._index.drop(history)

    def flush(self, *namespaces: str | None) -> None:
        """Drop the tokens of ended requests in some namespaces; running requests keep theirs."""
        flushed = FlushedNamespaces(namespaces)
        for history in list(self._ended.values()):
            if history.scope in flushed:
                self._drop(history)

    def _drop(self, history: TokenHistory) -> None:
        del self._ended[history.number]
        self._num_kept -= len(history.tokens)
        self._index.drop(history)

    def _history(self, request: Request) -> TokenHistory:
        return self._live.get(request) or self._open(request)

    def _open(self, request: Request) -> TokenHistory:
        if self._is_private(request):
            scope: Hashable = request
            shared_salt, shared_from = None, 0
        else:
            scope, shared_salt = request.namespace, _salt_of(request.namespace)
            shared_from = request.usage.cached_tokens
        history = self._index.open(
            request.tokens, scope=scope, shared_salt=shared_salt, shared_from=shared_from
        )
        self._live[request] = history
        return history


def _continuation(place: Occurrence, history: TokenHistory, most: int) -> array[int]:
    """Return up to ``most`` tokens that followed an occurrence.

    If the occurrence is in the request itself, its continuation may reach the end of the request.
    Then it is repeated.
    """
    found, at, _ = place
    token_ids = found.tokens[at : at + most]
    if found is history and 0 < len(token_ids) < most:
        token_ids = (token_ids * (most // len(token_ids) + 1))[:most]
    return token_ids


def _salt_of(namespace: str | None) -> int:
    """Return a salt for the namespace that, unlike ``hash``, is the same in every process."""
    return int.from_bytes(blake2b(repr(namespace).encode(), digest_size=8).digest(), "little")

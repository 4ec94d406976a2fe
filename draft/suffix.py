"""The suffix index: what followed the last few tokens before, in any request of the namespace.

Source: suffix decoding (Oliaro et al. 2024, arXiv 2411.04975) for the idea of drafting from earlier
outputs; the suffix tree is replaced by one table of fixed size, written on misses only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.request import Request
from .source import INDEX_CHUNK, Guess

ORDERS = (24, 12, 6, 4, 3)  # tokens that must be equal, the surest first; a match's kind
PRIORS = (0.95, 0.9, 0.75, 0.6, 0.45)
MAX_ORDER = ORDERS[0]

MASK = 2**64 - 1
BASE = 0x9E3779B97F4A7C15  # of the polynomial; odd, so that it has an inverse
FEW_TO_HASH, FEW_TO_INDEX = 64, 12  # tokens up to which numpy costs more than it saves
_POWERS = np.cumprod(np.array([1] + [BASE] * INDEX_CHUNK, np.uint64))
_INVERSES = np.cumprod(np.array([1] + [pow(BASE, -1, 2**64)] * INDEX_CHUNK, np.uint64))
_SHIFTS = tuple(pow(BASE, order, 2**64) for order in ORDERS)


@dataclass(slots=True, eq=False)
class Segment:
    """The tokens of one request. Positions are the request's own, whatever is kept of it.

    ``hashes[i]`` is the polynomial hash of ``tokens[start : start + i]`` while the request lives.
    """

    number: int  # never used twice, so that a place in an ended segment is void for ever
    scope: Hashable  # whoever is in another scope learns nothing of it
    tokens: array[int]  # lent by a live request; from `start` on a copy of an ended one
    start: int  # the first position that is hashed or kept
    salts: tuple[int, ...]  # [num_orders]
    offset: int = 0  # position of tokens[0]
    hashes: array[int] = field(default_factory=lambda: array("Q", (0,)))
    num_indexed: int = 0  # positions before this one are in the table

    def hash_new(self) -> int:
        """Bring ``hashes`` up to the newest token; returns the number of tokens."""
        length = len(self.tokens)
        missing = length - self.start + 1 - len(self.hashes)
        while missing > FEW_TO_HASH:
            self._hash_many(min(missing, INDEX_CHUNK))
            missing = length - self.start + 1 - len(self.hashes)
        if missing > 0:
            self._hash_few(missing, length)
        return length

    def _hash_few(self, missing: int, length: int) -> None:
        hashes = self.hashes
        last = hashes[-1]
        for token in self.tokens[length - missing :]:
            last = (last + token) * BASE & MASK  # times BASE: the newest token moves the top bits
            hashes.append(last)

    def _hash_many(self, count: int) -> None:
        """The same recurrence at once: divided by BASE**i it is a running sum."""
        first = self.start + len(self.hashes) - 1
        tokens = np.frombuffer(self.tokens[first : first + count], np.uint64)
        sums = np.cumsum(tokens * _INVERSES[:count]) + np.uint64(self.hashes[-1])
        self.hashes.frombytes((sums * _POWERS[1 : count + 1]).tobytes())


class Place(NamedTuple):
    """Where a request's last tokens stood before: ``tokens[at]`` followed them."""

    segment: Segment
    at: int
    kind: int  # which of ORDERS is equal, at least


class SuffixIndex:
    """The last n tokens, for n in ORDERS, to where they last stood.

    One direct-mapped table of ``num_slots`` (a power of two) 8-byte entries, and the last writer
    wins: memory is bounded and nothing is ever deleted. So whatever the table says is checked
    against the tokens themselves: a segment that is gone, of another scope or with other tokens
    is a miss. The table's memory is touched at once: page by page while steps run, the system's
    part of it took more time than all look-ups (measured).
    """

    def __init__(self, num_slots: int = 2**22) -> None:
        self.segments: dict[int, Segment] = {}
        self._table: NDArray[np.int64] = np.zeros(num_slots, np.int64)  # number << 32 | position
        self._table.fill(0)
        self._entries = self._table.data  # plain ints are read and written faster here
        self._slot_mask = num_slots - 1
        self._shift = 65 - num_slots.bit_length()  # the top bits of a hash depend on all tokens
        self._num_opened = 0

    def open(self, tokens: array[int], *, scope: Hashable, salt: int, start: int = 0) -> Segment:
        """A live segment over ``tokens``, which are lent and may grow. Equal scope, equal salt."""
        self._num_opened += 1
        salts = tuple(_mix(salt + order) & self._slot_mask for order in ORDERS)
        segment = Segment(self._num_opened, scope, tokens, start, salts, num_indexed=start)
        self.segments[segment.number] = segment
        return segment

    def keep(self, segment: Segment) -> None:
        """Replace what was lent by a copy of what is indexed."""
        segment.tokens = segment.tokens[segment.start :]
        segment.offset = segment.start
        segment.hashes = array("Q")

    def drop(self, segment: Segment) -> None:
        """Forget a segment. O(1): its entries are void from now on."""
        del self.segments[segment.number]

    # -- looking up

    def find(self, segment: Segment) -> Place | None:
        """Where the last tokens of a live segment stood before, by the longest order that did.

        O(1): text that was never seen costs one look into the table, for the shortest order.
        """
        end = segment.hash_new()
        shortest = self._look_up(segment, end, len(ORDERS) - 1)
        if shortest is None:
            return None
        for kind in range(len(ORDERS) - 1):
            place = self._look_up(segment, end, kind)
            if place is not None:
                return place
        return shortest

    def _look_up(self, segment: Segment, end: int, kind: int) -> Place | None:
        order, hashes = ORDERS[kind], segment.hashes
        if order >= len(hashes):
            return None
        window = hashes[-1] - hashes[-1 - order] * _SHIFTS[kind]
        entry = self._entries[(window >> self._shift ^ segment.salts[kind]) & self._slot_mask]
        found = self.segments.get(entry >> 32)
        if found is None or found.scope != segment.scope:
            return None
        at = (entry & 0xFFFFFFFF) - found.offset
        if found.tokens[at - order : at] != segment.tokens[end - order :]:
            return None  # a slice cut short at either end is unequal, too
        return Place(found, at, kind)

    # -- taking in

    def index(self, segment: Segment, most: int) -> int:
        """Take in up to ``most`` tokens of a live segment; returns how many it took.

        The last token waits until it is known what follows it: a look-up never finds itself.
        """
        first = segment.num_indexed
        stop = min(segment.hash_new(), first + most)
        if stop - first > FEW_TO_INDEX:
            self._index_many(segment, first, stop)
        elif stop > first:
            self._index_few(segment, first, stop)
        segment.num_indexed = max(first, stop)
        return max(0, stop - first)

    def _index_few(self, segment: Segment, first: int, stop: int) -> None:
        hashes, entries, shift, mask = segment.hashes, self._entries, self._shift, self._slot_mask
        rows = tuple(zip(ORDERS, _SHIFTS, segment.salts, strict=True))
        for position in range(first, stop):
            at, entry = position - segment.start, segment.number << 32 | position
            last = hashes[at]
            for order, power, salt in rows:
                if order <= at:
                    window = last - hashes[at - order] * power
                    entries[(window >> shift ^ salt) & mask] = entry

    def _index_many(self, segment: Segment, first: int, stop: int) -> None:
        """The same at once. No order reaches before the start, so the first tokens take longer."""
        low = max(segment.start, first - MAX_ORDER)
        hashes = np.frombuffer(segment.hashes[low - segment.start : stop - segment.start], "u8")
        positions = np.arange(first, stop) | segment.number << 32
        for order, power, salt in zip(ORDERS, _SHIFTS, segment.salts, strict=True):
            count = min(stop - first, len(hashes) - order)
            if count > 0:
                windows = hashes[-count:] - hashes[-count - order : -order] * np.uint64(power)
                slots = windows >> np.uint64(self._shift) ^ np.uint64(salt)
                self._table[slots.view(np.int64)] = positions[-count:]


class SuffixSource:
    """Continues where the last tokens stood before, in this request or any of its namespace.

    Live requests lend their tokens. Of ended ones it keeps what they did not share with those
    before them, ``max_tokens`` in all, the least recently used dropped first.
    """

    name = "suffix"
    priors = PRIORS

    def __init__(self, *, max_tokens: int = 1_000_000, num_slots: int = 2**22) -> None:
        self._max_tokens = max_tokens
        self._index = SuffixIndex(num_slots)
        self._live: dict[Request, Segment] = {}
        self._ended: OrderedDict[int, Segment] = OrderedDict()  # the least recently used first
        self._num_kept = 0  # tokens of ended segments

    def propose(self, request: Request, most: int) -> Guess | None:
        """What followed the longest run of last tokens that was seen before."""
        segment = self._segment(request)
        place = self._index.find(segment)
        if place is None:
            return None
        if place.segment.number in self._ended:
            self._ended.move_to_end(place.segment.number)
        return guess_at(place, segment, self.name, most)

    def index(self, request: Request) -> int:
        """Prompt tokens whose KV was cached are left out: someone brought them before."""
        return self._index.index(self._segment(request), INDEX_CHUNK)

    def leave(self, request: Request) -> None:
        """What no one had said before is kept."""
        if request.cache.is_private:
            self._forget(request)
            return
        if request not in self._live and not request.num_output:
            return
        segment = self._segment(request)
        self._index.index(segment, INDEX_CHUNK)
        del self._live[request]
        self._index.keep(segment)
        self._ended[segment.number] = segment
        self._num_kept += len(segment.tokens)
        while self._num_kept > self._max_tokens:
            self._drop(next(iter(self._ended.values())))

    def _forget(self, request: Request) -> None:
        segment = self._live.pop(request, None)
        if segment is not None:
            self._index.drop(segment)

    def flush(self, *namespaces: str | None) -> None:
        """Live requests stay, as their KV does."""
        for segment in list(self._ended.values()):
            if not namespaces or segment.scope in namespaces:
                self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        del self._ended[segment.number]
        self._num_kept -= len(segment.tokens)
        self._index.drop(segment)

    def _segment(self, request: Request) -> Segment:
        return self._live.get(request) or self._open(request)

    def _open(self, request: Request) -> Segment:
        num_known, name = request.usage.cached_tokens, request.namespace
        scope: Hashable = name
        if request.cache.is_private:  # it draws on its own tokens, and nobody else does
            num_known, scope, name = 0, request, request.request_id
        start = max(0, num_known - MAX_ORDER)
        segment = self._index.open(request.tokens, scope=scope, salt=_salt(name), start=start)
        segment.num_indexed = num_known
        self._live[request] = segment
        return segment


def guess_at(place: Place, segment: Segment, source: str, most: int) -> Guess:
    """The tokens from a place on; where they run into the request's own end they go round."""
    found, at, kind = place
    token_ids = found.tokens[at : at + most]
    if found is segment and 0 < len(token_ids) < most:
        token_ids = (token_ids * (most // len(token_ids) + 1))[:most]
    return Guess(token_ids, source, kind)


def _salt(namespace: str | None) -> int:
    """Tells namespaces apart in the table; the same in every process, as ``hash`` is not."""
    return int.from_bytes(blake2b(repr(namespace).encode(), digest_size=8).digest(), "little")


def _mix(value: int) -> int:
    """64 bits that depend on all bits of ``value`` (splitmix64; Steele et al. 2014)."""
    value = (value + BASE) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31

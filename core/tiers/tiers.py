"""Tiers: saves pages to stores outside the pool, and loads pages from them.

Saving takes no lock and delays no request: the bytes of a page are copied while it may be in use. A
copy is kept only if the page stayed in the tree meanwhile, because then its bytes did not change.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from typing_extensions import override

from ...radix_cache import RadixTree, StateSlots
from ...radix_cache.audit import Steps
from ...radix_cache.node import Cause, KeptState
from ..interface.extras.tiers import KVTiers, PageStore, TierState
from ..interface.extras.transfers import PageOffer, Refusal
from .keys import PageKeys, StoredPages, chain_keys, tag_of
from .page_records import Records, SlotRecords
from .stores.peer_store import PeerStore

logger = logging.getLogger(__name__)
LEAST_TOKENS = 64  # minimum number of tokens that are worth a load
CALL_BYTES = 8 << 20  # bytes that one call of the I/O thread moves, within a few milliseconds

# At most one 16th of the pool is under I/O at once: if a store hangs, these pages are not usable.
POOL_DIVISOR = 16
MAX_QUEUED = 4  # maximum number of pages that wait to be saved, as a multiple of the pool

# Time for which a failed store is not used: at first, and at most. It doubles with each failure.
CLOSED_SECONDS, MAX_CLOSED_SECONDS = 10.0, 600.0
MOST_LATE = 1.5  # value of `_Tier.lateness` at which a store is no longer used for a while
FORGIVEN = 1 / 64  # each page read subtracts this from `_Tier.lateness`
MEAN_RATE = 0.3  # weight of a new value in a running mean


@dataclass(slots=True, eq=False)
class _Tier:
    """A store with its counts and its state."""

    store: PageStore
    # store of recurrent states, each by the key of the page before it
    states: PageStore | None = None
    opens: float = -math.inf  # time until which the tier is not used
    pause: float = CLOSED_SECONDS  # seconds for which the tier is not used after the next failure
    lateness: float = 0.0  # number of late loads, minus what pages read since then subtracted
    num_closed: int = 0
    num_loaded: int = 0  # number of loaded pages
    load_seconds: float = 0.0
    num_saved: int = 0  # number of saved pages
    num_evicted: int = 0  # number of pages that left the pool before they were saved
    num_refused: int = 0  # number of pages not saved because the tier was closed

    # tags to flush before the next look-up
    unflushed: set[bytes | None] = field(default_factory=set)

    @property
    def stores(self) -> Iterator[PageStore]:
        """The store of pages, and the store of states."""
        yield self.store
        if self.states is not None:
            yield self.states

    def close(self, why: object, now: float) -> None:
        """Stop using the store for ``pause`` seconds, and double ``pause``."""
        if now < self.opens:
            return
        self.num_closed += 1
        self.opens = now + self.pause
        logger.warning(
            "not using the KV tier on %s for %.0f s: %s", self.store.medium, self.pause, why
        )
        self.pause = min(2 * self.pause, MAX_CLOSED_SECONDS)


@dataclass(frozen=True, slots=True)
class _Save:
    page_id: int
    key: bytes
    tag: bytes
    counter: int  # counter of the page when it joined the tree


@dataclass(frozen=True, slots=True)
class _StateSave:
    slot: int
    key: bytes  # key of the page before the state
    counter: int  # counter of the slot when it was attached to the page
    num_before: int  # number of pages that were queued before the state


@dataclass(frozen=True, slots=True)
class StateTiers:
    """Stores of recurrent states for `Tiers`: one for each store of pages."""

    slots: StateSlots
    records: SlotRecords
    stores: Sequence[PageStore]


class Tiers(KVTiers):
    """`KVTiers` over several stores, which are asked in order; also a `KeyObserver`.

    ``peers``: pools of other engines, which are asked last and to which nothing is saved.
    ``states``: stores of recurrent states, for a model that can resume only from such a state. No
    method raises an error of a store: a store that fails or answers too late is closed, which means
    that it is not used for a while.
    """

    def __init__(
        self,
        tree: RadixTree,
        keys: PageKeys,
        records: Records,
        stores: Sequence[PageStore],
        peers: PeerStore | None = None,
        *,
        states: StateTiers | None = None,
        clock: Callable[[], float] = time.monotonic,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        self.least_tokens = least_tokens
        self._tree, self._keys, self._records, self._peers = tree, keys, records, peers
        of_states = [None] * len(stores) if states is None else states.stores
        # Tiers to which pages are saved.
        self._keeping = [_Tier(*both) for both in zip(stores, of_states, strict=True)]
        self._states = states
        self._state_queue: deque[_StateSave] = deque()
        self._tiers = [*self._keeping, *([] if peers is None else [_Tier(peers)])]
        self._clock = clock
        self._queue: deque[_Save] = deque()
        self._num_queued = 0  # number of pages that were ever queued
        self._num_unqueued = 0  # number of pages for which the queue had no room
        self._on_saves: Callable[[], None] = lambda: None
        self._page_seconds = 0.0  # running mean of the seconds per loaded page
        self._asked: _Tier | None = None  # tier whose store the I/O thread is calling
        keys.add_observer(self)
        if states is not None:
            states.slots.on_attached = self._attached

    # -- in the I/O thread ----------------------------------------------------------------------

    @override
    def find(self, tokens: array[int], namespace: str | None, first: int) -> list[bytes]:
        # The last token must be computed in any case, because its logits are needed.
        whole = tokens[: len(tokens) - 1]
        keys = list(chain_keys(self._keys.root(namespace), whole, self._keys.page_size))
        found, reached = first, -1
        while reached < found < len(keys):  # one tier may continue where another ends
            reached = found
            for tier in self._open_tiers():
                with self._asking(tier):
                    found += min(tier.store.find(keys[found:]), len(keys) - found)
        if self._states is not None:
            found = max(
                (self._last_state(t, keys, first, found) for t in self._open_tiers()), default=first
            )
        return keys[:found] if found > first else []

    def _last_state(self, tier: _Tier, keys: Sequence[bytes], first: int, found: int) -> int:
        """Return the greatest number of leading pages, up to ``found``, with a state at their end.

        Returns ``first`` if the tier has no state after page ``first``.
        """
        with self._asking(tier):
            for count in range(found, first, -1):
                if tier.states is not None and tier.states.find(keys[count - 1 : count]):
                    return count
        return first

    @override
    def load(self, keys: Sequence[bytes], page_ids: array[int]) -> int:
        began, count = self._clock(), 0
        for key, page_id in zip(keys, page_ids, strict=True):
            if not self._load_page(key, page_id):
                break
            count += 1
        if count:
            seconds = (self._clock() - began) / count
            rate = MEAN_RATE if self._page_seconds else 1.0
            self._page_seconds += rate * (seconds - self._page_seconds)
        return count

    def _load_page(self, key: bytes, page_id: int) -> bool:
        for tier in self._open_tiers():
            is_loaded, began = False, self._clock()
            with self._asking(tier):
                is_loaded = tier.store.get(key, self._records.target(page_id))
            if is_loaded:
                self._records.write(page_id)
                tier.num_loaded += 1
                tier.load_seconds += self._clock() - began
                tier.lateness = max(0.0, tier.lateness - FORGIVEN)
                if not tier.lateness:
                    tier.pause = CLOSED_SECONDS
                return True
        return False

    @override
    def load_state(self, key: bytes, slot: int, position: int) -> bool:
        assert self._states is not None, "the tiers keep no states"
        records = self._states.records
        for tier in self._open_tiers():
            is_loaded = False
            with self._asking(tier):
                if tier.states is not None:
                    is_loaded = tier.states.get(key, records.target(slot))
            if is_loaded:
                records.write(slot)
                records.set_position(slot, position)
                return True
        return False

    @override
    def save(self) -> None:
        # A state, which is large, is saved alone, after the pages before it. It does not wait for
        # all pages: the queue of a busy engine may never be empty.
        num_taken = self._num_queued - len(self._queue)
        if self._state_queue and self._state_queue[0].num_before <= num_taken:
            self._save_state(self._state_queue.popleft())
            return
        for _ in range(min(self.pages_per_call, len(self._queue))):
            self._save_page(self._queue.popleft())

    def _save_page(self, save: _Save) -> None:
        def stayed() -> bool:
            return self._keys.counters[save.page_id] == save.counter

        is_open = set(self._open_tiers())
        for tier in self._keeping:
            if tier not in is_open:
                tier.num_refused += 1
                continue
            is_kept = False
            if stayed():
                page = self._records.read(save.page_id)
                with self._asking(tier):
                    is_kept = tier.store.put(save.key, save.tag, page, stayed)
            tier.num_saved += is_kept
            tier.num_evicted += not is_kept and not stayed()

    def _save_state(self, save: _StateSave) -> None:
        assert self._states is not None, "the tiers keep no states"
        slots, records = self._states.slots, self._states.records

        def stayed() -> bool:
            return slots.counters[save.slot] == save.counter

        for tier in self._open_tiers():
            if tier.states is not None and stayed():
                state = records.read(save.slot)
                with self._asking(tier):
                    tier.states.put(save.key, tag_of(save.key), state, stayed)

    @override
    def flush(self, namespaces: Sequence[str | None]) -> None:
        tags: set[bytes | None] = {self._tag(each) for each in namespaces}
        for tier in self._tiers:
            tier.unflushed |= tags or {None}
            self._flush(tier)

    def _flush(self, tier: _Tier) -> None:
        """Flush the pending namespaces; if that fails, the tier is closed and they stay pending."""
        with self._asking(tier):
            while tier.unflushed:
                tag = next(iter(tier.unflushed))
                for store in tier.stores:
                    store.flush(tag)
                tier.unflushed.discard(tag)

    @override
    def meet(self, offer: PageOffer) -> None:
        if self._peers is not None:
            self._peers.meet(offer)

    @override
    def renew_offers(self) -> None:
        if self._peers is not None:
            self._peers.renew()

    @override
    def end_offer(self, offer: PageOffer) -> None:
        if self._peers is not None:
            self._peers.end(offer)

    @override
    def close(self) -> None:
        for tier in self._tiers:
            self._flush(tier)  # otherwise the next process would find flushed pages
            for store in tier.stores:
                with self._asking(tier):
                    store.close()

    def _open_tiers(self) -> Iterator[_Tier]:
        for tier in self._tiers:
            if self._is_open(tier) and tier.unflushed:
                self._flush(tier)
            if self._is_open(tier) and not tier.unflushed:
                yield tier

    @contextmanager
    def _asking(self, tier: _Tier) -> Iterator[None]:
        """Close the tier for a while if the block raises."""
        self._asked = tier
        try:
            yield
        except Exception as failure:
            tier.close(failure, self._clock())
        finally:
            self._asked = None

    # -- on the loop ----------------------------------------------------------------------------

    @property
    @override
    def pages_per_call(self) -> int:
        most = len(self._keys.counters) // POOL_DIVISOR
        return max(1, min(most, CALL_BYTES // self._records.num_bytes))

    @property
    @override
    def num_state_pages(self) -> int:
        if self._states is None:
            return 0
        return -(-self._states.records.num_bytes // self._records.num_bytes)

    @property
    @override
    def is_open(self) -> bool:
        return any(map(self._is_open, self._tiers))

    def _is_open(self, tier: _Tier) -> bool:
        return self._clock() >= tier.opens

    @property
    @override
    def has_saves(self) -> bool:
        return bool(self._queue or self._state_queue)

    @property
    @override
    def refused_offers(self) -> Mapping[Refusal, int] | None:
        return None if self._peers is None else self._peers.refused.copy()

    @override
    def watch_saves(self, on_saves: Callable[[], None]) -> None:
        self._on_saves = on_saves

    @override
    def load_seconds(self, num_pages: int) -> float:
        return num_pages * self._page_seconds

    @override
    def note_late(self) -> None:
        tier = self._asked
        if tier is None or tier.store is self._peers:  # `PeerStore` suspends peers itself
            return
        tier.lateness += 1.0
        if tier.lateness >= MOST_LATE:
            tier.lateness = MOST_LATE - 1.0  # once the tier is open again, one late load is enough
            tier.close("loads take too long", self._clock())

    def stored(self, pages: StoredPages) -> None:
        """Queue pages that were published to the tree for saving, as far as the queue has room."""
        if not self._keeping:
            return
        room = MAX_QUEUED * len(self._keys.counters) - len(self._queue)
        tag = self._tag(pages.namespace)
        for page_id, key in zip(pages.page_ids[:room], pages.keys, strict=False):
            self._queue.append(_Save(page_id, key, tag, self._keys.counters[page_id]))
            # It is increased after the append: `save` must never count too many pages as taken.
            self._num_queued += 1
        self._num_unqueued += max(0, len(pages.keys) - room)
        self._on_saves()

    def _attached(self, kept: KeptState) -> None:
        """Queue a state that was attached to a page, unless as many states as slots are queued."""
        if self._states is None or len(self._state_queue) >= self._states.slots.num_total:
            return
        counter, key = self._states.slots.counters[kept.slot], self._keys.key(kept.page_id)
        self._state_queue.append(_StateSave(kept.slot, key, counter, self._num_queued))
        self._on_saves()

    def dropped(self, namespace: str | None, keys: list[bytes], cause: Cause) -> None:
        """Do nothing: `PageKeys.counters` already show that the pages left the tree."""

    def _dropped(self, tier: _Tier) -> Mapping[str, int]:
        """Return the number of pages that were not saved to a tier, by cause."""
        if tier not in self._keeping:
            return {}
        return {
            "left_the_pool": tier.num_evicted,
            "closed": tier.num_refused,
            "queue_full": self._num_unqueued,
        }

    def _tag(self, namespace: str | None) -> bytes:
        return tag_of(self._keys.root(namespace))

    @override
    def checks(self) -> Steps:
        return self._keys.checks(self._tree)

    @override
    def describe(self) -> Sequence[TierState]:
        return [
            TierState(
                medium=tier.store.medium,
                pages=len(tier.store),
                capacity_pages=tier.store.capacity,
                loaded_pages=tier.num_loaded,
                load_seconds=tier.load_seconds,
                saved_pages=tier.num_saved,
                queued_pages=len(self._queue) if tier in self._keeping else 0,
                dropped_pages={**self._dropped(tier), **tier.store.stats()},
                times_closed=tier.num_closed,
                is_open=self._is_open(tier),
            )
            for tier in self._tiers
        ]

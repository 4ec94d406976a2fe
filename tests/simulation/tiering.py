"""Tiers of a simulation: the real ones, over pages of hashes and a store that fails by lot."""

from __future__ import annotations

import pickle
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from foretoken.core.interface.extras.tiers import IsValid, Medium
from foretoken.core.tiers.keys import PageKeys, chain_keys, tag_of
from foretoken.core.tiers.tiers import StateTiers, Tiers
from foretoken.radix_cache import PrefixCache
from support.toy_states import ToySlotRecords

from .asks import NUM_SALTS, Asks, namespace_of
from .faults import Faults
from .model import Pages, State, advance, root, solo

RECORD_BYTES = 4096
LEAST_TOKENS = 2  # worth a load: prompts are short here


class HashRecords:
    """`PageRecords` of `Pages`."""

    num_bytes = RECORD_BYTES

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._staged = bytearray(RECORD_BYTES)

    def read(self, page_id: int) -> memoryview:
        return memoryview(record(self._pages.data[page_id]))

    def target(self, page_id: int) -> memoryview:
        del page_id
        return memoryview(self._staged)

    def write(self, page_id: int) -> None:
        self._pages.data[page_id] = pickle.loads(self._staged)


def record(states: list[State | None]) -> bytes:
    """Return the bytes of a page."""
    return pickle.dumps(states).ljust(RECORD_BYTES, b"\0")


class FaultyStore:
    """A `PageStore` in a dict that raises, lies, loses and fills up as ``faults`` say."""

    medium: Medium = "disk"

    def __init__(self, faults: Faults, rng: random.Random, capacity: int) -> None:
        self.capacity = capacity
        self._faults, self._rng = faults, rng
        self.pages: dict[bytes, tuple[bytes, bytes]] = {}  # by key: tag and bytes, oldest first

    def __len__(self) -> int:
        return len(self.pages)

    def find(self, keys: Sequence[bytes]) -> int:
        self._may_raise()
        if self._faults.happens("tier lies"):
            return self._rng.randrange(len(keys) + 3)
        return next((at for at, key in enumerate(keys) if key not in self.pages), len(keys))

    def get(self, key: bytes, into: memoryview) -> bool:
        self._may_raise()
        if key not in self.pages:
            return False
        if self._faults.happens("tier damages"):
            into[:] = self._rng.randbytes(len(into))
            del self.pages[key]
            return False
        into[:] = self.pages[key][1]
        return True

    def put(self, key: bytes, tag: bytes, page: memoryview, is_valid: IsValid) -> bool:
        self._may_raise()
        data = bytes(page)
        if not is_valid():
            return False
        while len(self.pages) >= self.capacity:
            del self.pages[next(iter(self.pages))]
        self.pages[key] = (tag, data)
        return True

    def flush(self, tag: bytes | None = None) -> None:
        self._may_raise()
        kept = {key: page for key, page in self.pages.items() if tag not in (None, page[0])}
        self.pages = kept

    def stats(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        self._may_raise()

    def _may_raise(self) -> None:
        if self._faults.happens("tier raises"):
            raise OSError("injected")


class SimulatedTiers(Tiers):
    """The real tiers, over one or two stores."""

    def __init__(
        self,
        cache: PrefixCache,
        pages: Pages,
        faults: Faults,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        num_pages = cache.num_total_pages
        self.page_keys = PageKeys(b"simulated", num_pages, cache.page_size)
        cache.tree.add_observer(self.page_keys)
        self.stores = [
            FaultyStore(faults, random.Random(rng.getrandbits(64)), rng.choice([20, 999, 999]))
            for _ in range(rng.choice([1, 1, 2]))
        ]
        self.state_stores: list[FaultyStore] = []
        states = None
        if cache.states is not None and pages.states is not None:
            self.state_stores = [
                FaultyStore(faults, random.Random(rng.getrandbits(64)), rng.choice([3, 99]))
                for _ in self.stores
            ]
            self._slot_records = ToySlotRecords(pages.states, RECORD_BYTES)
            states = StateTiers(cache.states, self._slot_records, self.state_stores)
        super().__init__(
            cache.tree,
            self.page_keys,
            HashRecords(pages),
            self.stores,
            clock=clock,
            least_tokens=LEAST_TOKENS,
            states=states,
        )

    def fill(self, asks: Asks) -> None:
        """Put the KV of answers into the stores, as a process before this one would have left it.

        One store has the beginnings, the other one what follows.
        """
        for stem in asks.stems:
            for salt in range(NUM_SALTS):
                for at, (key, tag, page) in enumerate(self._pages_of(stem, salt)):
                    store = self.stores[at % len(self.stores)]
                    if len(store) < store.capacity:
                        store.pages[key] = (tag, page)
                    if self.state_stores and at % 3 == 1:
                        value = pickle.loads(page)[-1]
                        state = self._slot_records.record(value)
                        self.state_stores[at % len(self.stores)].pages[key] = (tag, state)

    def _pages_of(self, stem: tuple[int, ...], salt: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Keys, tags and bytes of the pages of a stem and its answer."""
        tokens = array("q", stem + solo(stem, salt, 40))
        states = list(accumulate(tokens, advance, initial=root(salt)))[1:]
        before, size = self.page_keys.root(namespace_of(salt)), self.page_keys.page_size
        for at, key in enumerate(chain_keys(before, tokens, size)):
            page = list[State | None](states[at * size : (at + 1) * size])
            yield key, tag_of(before), record(page)

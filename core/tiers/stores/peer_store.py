"""PeerStore: the pools of other engines as a store, for requests that name pages there."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from typing_extensions import override

from ...interface.extras.tiers import IsValid, Medium, PageStore
from ...interface.extras.transfers import (
    DONE,
    RENEW,
    PageOffer,
    PageReader,
    PoolMemory,
    Refusal,
    Region,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)
SHUNNED_SECONDS = 10.0  # that a peer which does not answer is left alone


class PeerStore(PageStore):
    """`PageStore` of the pages that `meet` has offered, until `end`.

    A key fixes its page's bytes, wherever they lie: an offer's last key is enough to know which of
    its pages belong to which tokens. What was read counts if the offer's word is still there.
    Belongs to the I/O thread; `__len__` and `stats` may be asked in any. No method raises for what
    a peer does: its pages are missing then, and other peers are asked as before.
    """

    medium: Medium = "peer"
    capacity = 0  # it keeps nothing

    def __init__(
        self,
        reader: PageReader,
        page_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refused: Counter[Refusal] = Counter()  # offers, by why they are of no use
        self._reader, self._page_bytes = reader, page_bytes
        self._clock = clock
        self._offers: dict[bytes, list[PageOffer]] = {}  # by the key of the last page; never empty
        self._pages: dict[bytes, tuple[PageOffer, int]] = {}  # by key: an index of the offer's
        self._keys: dict[PageOffer, dict[int, bytes]] = {}  # the same, by offer and index
        self._staged: dict[bytes, memoryview] = {}  # pages that the reader's last call read
        self._shunned: dict[bytes, float] = {}  # agents, until when
        self._num_void = 0  # pages that were read when they were held no longer

    def __len__(self) -> int:
        return sum(len(each.page_ids) for each in self._all_offers())

    def _all_offers(self) -> list[PageOffer]:
        return [each for offers in list(self._offers.values()) for each in offers]

    # -- offers ---------------------------------------------------------------------------------

    def meet(self, offer: PageOffer) -> None:
        """Connect to the peer of an offer, and note its pages if they are still held."""
        if self._is_held(offer):
            offer.is_met = True
            self._offers.setdefault(offer.key, []).append(offer)

    def renew(self) -> None:
        """Ask the peers to hold all offered pages for longer."""
        for offer in self._all_offers():
            self._send(offer, RENEW)

    def end(self, offer: PageOffer) -> None:
        """Forget an offer, and let its peer free the pages."""
        self._forget(offer)
        self._send(offer, DONE)

    def _forget(self, offer: PageOffer) -> None:
        """Forget an offer; of another one with the same last key, the pages are the same."""
        offers = [each for each in self._offers.pop(offer.key, []) if each is not offer]
        if offers:
            self._offers[offer.key] = offers
        for index, key in self._keys.pop(offer, {}).items():
            if key in self._pages and self._pages[key][0] is offer:
                del self._pages[key]
                if offers:
                    self._note_page(offers[-1], index, key)

    def _note_page(self, offer: PageOffer, index: int, key: bytes) -> None:
        self._pages[key] = offer, index
        self._keys.setdefault(offer, {})[index] = key

    def _is_held(self, offer: PageOffer) -> bool:
        """Look at the word of an offer."""
        word = self._ask(offer.memory, partial(self._reader.read_word, offer))
        if word is None:
            self.refused["unreachable"] += 1
        elif word != offer.nonce:
            self.refused["expired"] += 1
        return word == offer.nonce

    def _send(self, offer: PageOffer, verb: bytes) -> None:
        note = verb + offer.name.encode()
        self._ask(offer.memory, partial(self._reader.send, offer.memory, note))

    def _ask(self, memory: PoolMemory, call: Callable[[], T]) -> T | None:
        """Make a call to a peer; None if it does not answer, or did not lately."""
        now = self._clock()
        if self._shunned.get(memory.agent, 0.0) > now:
            return None
        try:
            return call()
        except OSError as error:
            logger.warning("not using a peer for %.0f s: %s", SHUNNED_SECONDS, error)
            self._shunned = {agent: ends for agent, ends in self._shunned.items() if ends > now}
            self._shunned[memory.agent] = self._clock() + SHUNNED_SECONDS
            return None

    # -- a store --------------------------------------------------------------------------------

    @override
    def find(self, keys: Sequence[bytes]) -> int:
        # The longest offer of several: a part of a prompt is let go before the whole of it is read.
        at = next((at for at in reversed(range(len(keys))) if keys[at] in self._offers), None)
        if at is None:
            return 0
        offer = self._offers[keys[at]][-1]
        first = len(offer.page_ids) - 1 - at  # of the keys, an index of the offer's pages
        if first < 0:
            return 0
        for index, key in enumerate(keys[: at + 1], first):
            self._note_page(offer, index, key)
        return at + 1

    @override
    def get(self, key: bytes, into: memoryview) -> bool:
        # The pages behind it are read along.
        if key not in self._staged and not self._stage(key):
            return False
        into[:] = self._staged.pop(key)
        return True

    def _stage(self, key: bytes) -> bool:
        """Read a page and the next ones of its offer."""
        self._staged = {}
        if key not in self._pages:
            return False
        offer, first = self._pages[key]
        count = min(len(offer.page_ids) - first, self._reader.capacity // self._page_bytes)
        read = partial(self._read, offer, range(first, first + count))
        if self._ask(offer.memory, read) is None:
            self.refused["unreachable"] += 1
        elif self._is_held(offer):
            return True
        self._num_void += count
        self._staged = {}
        self._forget(offer)
        return False

    def _read(self, offer: PageOffer, pages: range) -> int:
        """Read some pages of an offer, by their indices in it; returns how many."""
        parts = offer.memory.parts
        rows = [
            Region(part.address + offer.page_ids[index] * part.num_bytes, part.num_bytes)
            for index in pages
            for part in parts
        ]
        data, size, keys = self._reader.read(offer.memory, rows), self._page_bytes, self._keys
        for at, index in enumerate(pages):
            if (key := keys[offer].get(index)) is not None:
                self._staged[key] = data[at * size : (at + 1) * size]
        return len(pages)

    @override
    def put(self, key: bytes, tag: bytes, page: memoryview, is_valid: IsValid) -> bool:
        return False

    def flush(self, tag: bytes | None = None) -> None:
        """Do nothing: the pages are the peer's."""

    @override
    def stats(self) -> Mapping[str, int]:
        return {"void": self._num_void}

    @override
    def close(self) -> None:
        for offer in self._all_offers():
            self.end(offer)
        self._reader.close()

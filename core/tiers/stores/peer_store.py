"""PeerStore: the pools of other engines as a store, for requests that name pages in them."""

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
SHUNNED_SECONDS = 10.0  # time for which a peer is not used after it did not answer


class PeerStore(PageStore):
    """`PageStore` of the pages that other engines offer, from `meet` until `end`.

    A key determines its page's bytes in every engine, so the key of an offer's last page shows
    which tokens the pages of the offer belong to. Pages that were read are valid if the offer's
    word has not changed after the reading. Only the I/O thread may call the methods, except
    `__len__` and `stats`. No method raises an error of a peer: its pages count as missing then, and
    other peers are still used.
    """

    medium: Medium = "peer"
    capacity = 0  # the store keeps no pages itself

    def __init__(
        self,
        reader: PageReader,
        page_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refused: Counter[Refusal] = Counter()  # number of unusable offers by cause
        self._reader, self._page_bytes = reader, page_bytes
        self._clock = clock
        # offers by the key of their last page; no list is empty
        self._offers: dict[bytes, list[PageOffer]] = {}

        # for the key of a page: its offer, and its index in `PageOffer.page_ids`
        self._pages: dict[bytes, tuple[PageOffer, int]] = {}

        # the keys of `_pages`, by offer and index
        self._keys: dict[PageOffer, dict[int, bytes]] = {}
        self._staged: dict[bytes, memoryview] = {}  # pages that the reader's last call read
        self._shunned: dict[bytes, float] = {}  # time until which a peer is not used, by its agent
        self._num_void = 0  # number of pages that were no longer held after they were read

    def __len__(self) -> int:
        return sum(len(each.page_ids) for each in self._all_offers())

    def _all_offers(self) -> list[PageOffer]:
        return [each for offers in list(self._offers.values()) for each in offers]

    # -- offers ---------------------------------------------------------------------------------

    def meet(self, offer: PageOffer) -> None:
        """Connect to the peer of an offer, and add its pages if they are still held."""
        if self._is_held(offer):
            offer.is_met = True
            self._offers.setdefault(offer.key, []).append(offer)

    def renew(self) -> None:
        """Ask the peers to hold all offered pages for longer."""
        for offer in self._all_offers():
            self._send(offer, RENEW)

    def end(self, offer: PageOffer) -> None:
        """Drop an offer, and tell its peer that it may free the pages."""
        self._forget(offer)
        self._send(offer, DONE)

    def _forget(self, offer: PageOffer) -> None:
        """Drop an offer; another offer with the same last key, if any, replaces it."""
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
        """Whether the word of an offer says that its pages are still held."""
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
        """Return the result of a call to a peer.

        Returns None if the call fails, or if a call to this peer failed recently.
        """
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
        # Use the longest offer: an offer of a part of the prompt may end before the pages are read.
        at = next((at for at in reversed(range(len(keys))) if keys[at] in self._offers), None)
        if at is None:
            return 0
        offer = self._offers[keys[at]][-1]
        # index in the offer's pages that belongs to the first key
        first = len(offer.page_ids) - 1 - at
        if first < 0:
            return 0
        for index, key in enumerate(keys[: at + 1], first):
            self._note_page(offer, index, key)
        return at + 1

    @override
    def get(self, key: bytes, into: memoryview) -> bool:
        # The following pages are read in the same call.
        if key not in self._staged and not self._stage(key):
            return False
        into[:] = self._staged.pop(key)
        return True

    def _stage(self, key: bytes) -> bool:
        """Read a page and the next pages of its offer; return whether they were still held."""
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
        """Read the pages of an offer with these indices; return their number."""
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
        """Do nothing, because the pages belong to peers."""

    @override
    def stats(self) -> Mapping[str, int]:
        return {"void": self._num_void}

    @override
    def close(self) -> None:
        for offer in self._all_offers():
            self.end(offer)
        self._reader.close()

"""Transfers: locks of the tree that keep pages for another process while it reads them.

A pin yields when pages are needed, and the reader would get what lies there by then. So a transfer
locks its pages as a lease does, and has an end: when the reader has them, or after a time.
"""

from __future__ import annotations

import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .node import LockHandle
from .tree import RadixTree

MAX_TRANSFERS = 1024  # at a time
POOL_SHARE = 0.75  # of the pool's pages that may be held: requests need the rest
SECONDS = 30.0  # that pages are held without a word of the reader
MAX_SECONDS = 600.0  # that they are held at most, however often a reader asks for more time
WORD_BYTES = 8
NAME_BYTES = 16


@dataclass(frozen=True, slots=True)
class HeldPages:
    """The first pages of a prompt, held for one reader.

    Pages never change while they are held. `TransferLocks.words` has the number ``nonce`` at
    ``slot`` for just as long: a reader that finds it there behind its reading has read the pages.
    """

    name: str  # that no other process can guess
    page_ids: array[int]
    slot: int
    nonce: int  # never 0


@dataclass(slots=True)
class _Transfer:
    pages: HeldPages
    lock: LockHandle  # owned by `TransferLocks`
    until: float
    latest: float  # that ``until`` may become


class TransferLocks:
    """The pages of a tree that are held for other processes.

    ``max_pages``: how many may be held, those of several transfers counted for each.
    """

    def __init__(
        self, tree: RadixTree, *, max_pages: int, max_transfers: int = MAX_TRANSFERS
    ) -> None:
        self.words = array("Q", bytes(WORD_BYTES * max_transfers))  # stays where it is in memory
        self.now = 0.0  # seconds, as `PrefixCache.tick` sets it
        self.num_pages = 0  # held, as `max_pages` counts them
        self.max_pages = max_pages
        self.on_hold: Callable[[], None] = lambda: None  # called when a transfer begins
        self.refused: Counter[str] = Counter()  # by cause; counted by those who read requests
        self.ended = {"done": 0, "expired": 0}  # transfers, by how they ended
        self._tree = tree
        self._held: dict[str, _Transfer] = {}  # by name
        self._free = list(range(max_transfers - 1, -1, -1))  # slots

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_full(self) -> bool:
        """Whether no more pages can be held now. O(1)."""
        return not self._free or self.num_pages >= self.max_pages

    def hold(
        self,
        tokens: array[int],
        num_tokens: int,
        *,
        namespace: str | None = None,
        num_spare: int = 0,
    ) -> HeldPages | None:
        """Hold the cached pages of the first ``num_tokens`` for `SECONDS`.

        None where no whole page of them is cached, or there is no room for them and ``num_spare``
        pages more. O(num_tokens + depth).
        """
        match = self._tree.match(tokens, namespace=namespace, limit=num_tokens)
        count = len(match.page_ids)
        if not count or not self._free or self.num_pages + count + num_spare > self.max_pages:
            return None
        slot, name = self._free.pop(), secrets.token_hex(NAME_BYTES)
        pages = HeldPages(name, match.page_ids, slot, secrets.randbits(63) + 1)
        lock = self._tree.lock(match)
        self._held[name] = _Transfer(pages, lock, self.now + SECONDS, self.now + MAX_SECONDS)
        self.num_pages += count
        self.words[slot] = pages.nonce
        self.on_hold()
        return pages

    def is_held(self, name: str) -> bool:
        """Whether a transfer has not ended."""
        return name in self._held

    def renew(self, name: str) -> None:
        """Hold a transfer's pages for `SECONDS` from now on; unknown ones are ignored.

        Not beyond `MAX_SECONDS` from its beginning.
        """
        if (transfer := self._held.get(name)) is not None:
            transfer.until = min(self.now + SECONDS, transfer.latest)

    def end(self, name: str) -> bool:
        """End a transfer whose reader is done; returns whether it was held. O(depth + log n)."""
        return self._end(name, "done")

    def expire(self) -> None:
        """End the transfers whose time is over. O(transfers), O(depth + log n) for each of them."""
        for name in [name for name, each in self._held.items() if each.until <= self.now]:
            self._end(name, "expired")

    def close(self) -> None:
        """End all of them."""
        for name in list(self._held):
            self._end(name, "expired")

    def _end(self, name: str, how: str) -> bool:
        transfer = self._held.pop(name, None)
        if transfer is None:
            return False
        pages = transfer.pages
        self.words[pages.slot] = 0  # before a page can change
        self._free.append(pages.slot)
        self.num_pages -= len(pages.page_ids)
        self.ended[how] += 1
        self._tree.unlock(transfer.lock)
        return True

    def locks(self) -> Iterator[LockHandle]:
        """The locks of all transfers."""
        return (transfer.lock for transfer in self._held.values())

    def check(self) -> None:
        """Assert that transfers, words and page counts agree. O(transfers * depth)."""
        for name, transfer in self._held.items():
            pages = transfer.pages
            assert pages.name == name, "a transfer is filed under a wrong name"
            assert self.words[pages.slot] == pages.nonce, "a reader would not take held pages"
            held = [each for node in transfer.lock.node.path() for each in node.page_ids]
            assert held == pages.page_ids.tolist(), "a transfer holds other pages than it names"
        num_words = len(self.words) - self.words.count(0)
        assert num_words == len(self._held), "a reader would take pages that are not held"
        slots = {*self._free, *(each.pages.slot for each in self._held.values())}
        assert len(slots) == len(self.words), "a slot has two owners, or none"
        found = sum(len(each.pages.page_ids) for each in self._held.values())
        assert found == self.num_pages <= self.max_pages, f"{found} pages are held"

"""Transfers: locks of the tree that keep pages for another process while it reads them.

A pin would be removed when pages are needed, and the other process would read the new content of
the pages. So a transfer locks its pages as a lease does. It ends when the reader has the pages, or
after a time limit.
"""

from __future__ import annotations

import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .node import LockHandle
from .tree import RadixTree

MAX_TRANSFERS = 1024  # maximum number of transfers at a time
POOL_SHARE = 0.75  # maximum share of the pool that transfers may hold: requests need the rest
SECONDS = 30.0  # seconds for which pages are held without a message from the reader
MAX_SECONDS = 600.0  # maximum seconds for which pages are held, however often a reader renews
WORD_BYTES = 8
NAME_BYTES = 16


@dataclass(frozen=True, slots=True)
class HeldPages:
    """The first pages of a prompt, held for one reader.

    Pages never change while they are held. During this time, and only then,
    ``TransferLocks.words[slot]`` is ``nonce``. A reader checks this after it has read the pages: if
    the word is still ``nonce``, it has read the right content.
    """

    name: str  # random, so that other processes cannot guess it
    page_ids: array[int]
    slot: int
    nonce: int  # never 0


@dataclass(slots=True)
class _Transfer:
    pages: HeldPages
    lock: LockHandle  # owned by `TransferLocks`
    until: float
    latest: float  # upper limit of ``until``, seconds


class TransferLocks:
    """Locks on pages of a tree that are held for other processes.

    ``max_pages``: maximum number of pages held; a page of several transfers counts once for each.
    """

    def __init__(
        self, tree: RadixTree, *, max_pages: int, max_transfers: int = MAX_TRANSFERS
    ) -> None:
        # never reallocated: readers have its address
        self.words = array("Q", bytes(WORD_BYTES * max_transfers))
        self.now = 0.0  # seconds, as `PrefixCache.tick` sets it
        self.num_pages = 0  # pages held, counted as for `max_pages`
        self.max_pages = max_pages
        self.on_hold: Callable[[], None] = lambda: None  # called when a transfer begins

        self.refused: Counter[str] = Counter()  # refused transfers by cause
        self.ended = {"done": 0, "expired": 0}  # transfers, by how they ended
        self._tree = tree
        self._held: dict[str, _Transfer] = {}  # running transfers by name
        self._free = list(range(max_transfers - 1, -1, -1))  # free slots

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_full(self) -> bool:
        """Whether no further page can be held. O(1)."""
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

        Returns None if not even one whole page is cached, or if the limit has no room for the pages
        and ``num_spare`` more. O(num_tokens + depth).
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
        """Whether the transfer still holds its pages."""
        return name in self._held

    def renew(self, name: str) -> None:
        """Extend a transfer to `SECONDS` from now; ignore a transfer that has ended.

        A transfer lasts at most `MAX_SECONDS` from its beginning.
        """
        if (transfer := self._held.get(name)) is not None:
            transfer.until = min(self.now + SECONDS, transfer.latest)

    def end(self, name: str) -> bool:
        """End a transfer whose reader is done; return whether it was held. O(depth + log n)."""
        return self._end(name, "done")

    def expire(self) -> None:
        """End the expired transfers. O(transfers), and O(depth + log n) for each one ended."""
        for name in [name for name, each in self._held.items() if each.until <= self.now]:
            self._end(name, "expired")

    def close(self) -> None:
        """End all transfers."""
        for name in list(self._held):
            self._end(name, "expired")

    def _end(self, name: str, how: str) -> bool:
        transfer = self._held.pop(name, None)
        if transfer is None:
            return False
        pages = transfer.pages
        self.words[pages.slot] = 0  # the word is cleared before a page can change
        self._free.append(pages.slot)
        self.num_pages -= len(pages.page_ids)
        self.ended[how] += 1
        self._tree.unlock(transfer.lock)
        return True

    def locks(self) -> Iterator[LockHandle]:
        """Iterate over the locks of all transfers."""
        return (transfer.lock for transfer in self._held.values())

    def check(self) -> None:
        """Assert that transfers, words and page counts agree. O(transfers * depth)."""
        for name, transfer in self._held.items():
            pages = transfer.pages
            assert pages.name == name, "a transfer is filed under a wrong name"
            assert self.words[pages.slot] == pages.nonce, (
                "a reader would reject held pages: their word has another nonce"
            )
            held = [each for node in transfer.lock.node.path() for each in node.page_ids]
            assert held == pages.page_ids.tolist(), (
                "a transfer names other pages than its lock holds"
            )
        num_words = len(self.words) - self.words.count(0)
        assert num_words == len(self._held), (
            "a reader would accept pages that are not held: their word is not 0"
        )
        slots = {*self._free, *(each.pages.slot for each in self._held.values())}
        assert len(slots) == len(self.words), "a slot has two owners, or none"
        found = sum(len(each.pages.page_ids) for each in self._held.values())
        assert found == self.num_pages <= self.max_pages, (
            f"transfers hold {found} pages: not the counted number, or more than allowed"
        )

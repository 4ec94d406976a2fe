"""What one request may use of the KV pool."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from .losses import Loss
from .node import Lock


@dataclass(slots=True, eq=False)
class KVLease:
    """The pages that one request may use, from `PrefixCache.acquire` to `PrefixCache.release`."""

    page_ids: array[int]  # page table; the first num_shared_pages owned by the tree, rest by this
    lock: Lock  # holds the shared pages; owned by this lease
    num_cached_tokens: int  # found at acquire; their KV need not be computed
    namespace: str | None  # cache salt; None is the shared default
    loss: Loss | None = None  # when the first page that was not found had been cached before

    @property
    def num_shared_pages(self) -> int:
        """How many of the first pages are lent by the tree; 0 once released."""
        return self.lock.num_pages

    def require_live(self) -> None:
        """Raises ValueError once it was released."""
        if not self.lock.is_live:
            raise ValueError("the lease was released already")

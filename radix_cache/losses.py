"""What was lost of late: which cached pages were dropped, when and why."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from .node import Cause

MAX_LOSSES = 8192


@dataclass(frozen=True, slots=True)
class Loss:
    """Cached pages that were dropped: why, and when on the clock of `PrefixCache.tick`."""

    cause: Cause
    time: float  # seconds


class LossLog:
    """Remembers the last losses by where they began, ``max_losses`` at most.

    A place is known by its page and the one before it, so that noting a loss need not walk to the
    root; two equal pairs of pages at different depths are taken for one. Of one place the last
    loss counts.
    """

    def __init__(self, page_size: int, max_losses: int = MAX_LOSSES) -> None:
        self.now = 0.0  # seconds
        self._page_size = page_size  # tokens
        self._max_losses = max_losses
        self._losses: OrderedDict[tuple[str | None, int], Loss] = OrderedDict()

    def note(self, namespace: str | None, seam: bytes, cause: Cause) -> None:
        """Pages were dropped; ``seam``: tokens of the page before the first, and of the first."""
        key = (namespace, hash(seam))
        self._losses[key] = Loss(cause, self.now)
        self._losses.move_to_end(key)
        if len(self._losses) > self._max_losses:
            self._losses.popitem(last=False)

    def find(self, namespace: str | None, tokens: array[int], num_cached: int) -> Loss | None:
        """Why the page behind the first ``num_cached`` tokens is gone, if it was there. O(1)."""
        stop = num_cached + self._page_size
        if stop > len(tokens):
            return None
        seam = tokens[max(0, num_cached - self._page_size) : stop]
        return self._losses.get((namespace, hash(seam.tobytes())))

    def __len__(self) -> int:
        return len(self._losses)

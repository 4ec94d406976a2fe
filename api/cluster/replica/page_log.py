"""PageLog: a log of the pages that join or leave a replica's prefix cache, for its front."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..wire.messages import PageNews, page_news

if TYPE_CHECKING:
    from ....core.tiers.keys import PageKeys, StoredPages
    from ....radix_cache.node import Cause

PART_KEYS = 8192  # keys per message, 64 KiB


class PageLog:
    """A `KeyObserver` that collects news until they are taken. Belongs to the engine's loop.

    ``on_news`` is called after each recorded change.
    """

    def __init__(self, keys: PageKeys | None) -> None:
        self.on_news: Callable[[], None] = _nothing
        self._keys = keys
        self._news: list[tuple[bool, list[bytes]]] = []  # pairs (is stored, keys), in order
        if keys is not None:
            keys.add_observer(self)

    def stored(self, pages: StoredPages) -> None:
        """Record pages that have just joined the tree."""
        self._note(is_stored=True, keys=pages.keys)

    def dropped(self, namespace: str | None, keys: list[bytes], cause: Cause) -> None:  # noqa: ARG002
        """Record pages that leave the tree."""
        self._note(is_stored=False, keys=keys)

    def take(self) -> list[PageNews]:
        """Return the news since the last call."""
        news, self._news = self._news, []
        return [page_news(is_stored=is_stored, keys=keys) for is_stored, keys in news]

    def take_all(self) -> Iterator[list[PageNews]]:
        """Yield news of all pages in the cache, in parts; discard news that were not taken."""
        self._news = []
        held = [] if self._keys is None else list(self._keys.cached())
        for start in range(0, len(held), PART_KEYS):
            yield [page_news(is_stored=True, keys=held[start : start + PART_KEYS])]

    def _note(self, *, is_stored: bool, keys: list[bytes]) -> None:
        if self._news and self._news[-1][0] == is_stored:
            self._news[-1][1].extend(keys)
        else:
            self._news.append((is_stored, list(keys)))
        self.on_news()


def _nothing() -> None:
    pass

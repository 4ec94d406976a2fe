"""How many pages of the tree each namespace owns, and which of them own too many."""

from __future__ import annotations

from collections.abc import Set

NOBODY: Set[str | None] = frozenset()


class OwnedPages:
    """Pages by namespace, against a quota.

    A namespace that owns more than ``quota`` pages is beyond it, and what it owns goes first when
    room must be made; so nobody can drive out those who keep to theirs, and one who is alone in
    the tree has all. At most ``pool / quota`` are beyond it at a time.
    """

    def __init__(self, quota: int | None) -> None:
        self.quota = quota  # pages; None: nobody has too many
        self.num_pages: dict[str | None, int] = {}  # of those that own some
        self._beyond: set[str | None] = set()

    def beyond(self) -> Set[str | None]:
        """Those that own more than their quota, beside others. O(1)."""
        return self._beyond if len(self.num_pages) > 1 else NOBODY

    def excess(self, namespace: str | None) -> int:
        """Pages that one of those beyond its quota owns too many. O(1)."""
        return self.num_pages[namespace] - (self.quota or 0)

    def add(self, namespace: str | None, num_pages: int) -> None:
        """It has got so many pages more, or with a negative number so many fewer. O(1)."""
        count = self.num_pages.get(namespace, 0) + num_pages
        if count:
            self.num_pages[namespace] = count
        else:
            del self.num_pages[namespace]
        if self.quota is not None:
            (self._beyond.add if count > self.quota else self._beyond.discard)(namespace)

    def check(self) -> None:
        """Asserts that those beyond the quota are known. O(namespaces)."""
        many = {name for name, count in self.num_pages.items() if count > (self.quota or 0)}
        assert self._beyond == (many if self.quota is not None else set()), "a quota is not kept"

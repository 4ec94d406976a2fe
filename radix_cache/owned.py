"""How many pages of the tree each namespace owns, who owns too many, and who has gone away."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Set

NOBODY: Set[str | None] = frozenset()


class OwnedPages:
    """Pages by namespace, against a quota.

    A namespace that owns more than ``quota`` pages is beyond it, and what it owns goes first when
    room must be made; so nobody can drive out those who keep to theirs, and one who is alone in
    the tree has all. At most ``pool / quota`` are beyond it at a time.

    Who keeps to it is protected for as long as it comes back. Otherwise tenants that are gone would
    keep those that are here from most of the pool, for ever. So a namespace that nobody uses while
    ``patience`` pages are evicted is idle.
    """

    def __init__(self, quota: int | None, patience: float = math.inf) -> None:
        self.quota = quota  # pages; None: nobody has too many
        self.patience = patience  # evicted pages
        self.num_pages: dict[str | None, int] = {}  # of those that own some
        self._beyond: set[str | None] = set()
        self._used: OrderedDict[str | None, int] = OrderedDict()  # how many were evicted by then

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

    def use(self, namespace: str | None, num_evicted: int) -> None:
        """Somebody uses it, after so many evictions. O(1)."""
        if self.quota is not None:
            self._used[namespace] = num_evicted
            self._used.move_to_end(namespace)

    def idlest(self, num_evicted: int) -> tuple[str | None, ...]:
        """Who is idle after so many evictions, and for longest: nobody, or one. O(1)."""
        for namespace, used in self._used.items():
            return (namespace,) if num_evicted - used > self.patience else ()
        return ()

    def forget(self, namespace: str | None) -> None:
        """It has nothing in the tree and holds nothing there. O(1)."""
        self._used.pop(namespace, None)

    def check(self, namespaces: Set[str | None]) -> None:
        """Asserts that those beyond the quota are known, and when each was used. O(namespaces)."""
        many = {name for name, count in self.num_pages.items() if count > (self.quota or 0)}
        assert self._beyond == (many if self.quota is not None else set()), "a quota is not kept"
        known = namespaces if self.quota is not None else NOBODY
        assert self._used.keys() == known, "it is not known when a namespace was used"
        assert list(self._used.values()) == sorted(self._used.values()), "uses are out of order"

"""VersionedPrefixCache: a prefix cache for a model whose weights change."""

from __future__ import annotations

from array import array

from .node import KVLease
from .prefix_cache import PrefixCache


class VersionedPrefixCache(PrefixCache):
    """Prefix cache whose pages are found only by requests of the same version of the weights.

    Each version has namespaces of its own. A lease of an earlier version keeps its pages until it
    is released; then they are free, because no later request could find them.
    """

    _version = 0

    def begin_version(self) -> int:
        """Begin a new version: drop all unused pages, and hide the borrowed ones from new leases.

        Returns how many pages became free. O(leaves + nodes dropped + pins).
        """
        num_pages = self.flush()
        self._version += 1
        return num_pages

    def name(self, namespace: str | None) -> str | None:
        """Return the tree's name of a namespace in the present version. O(len)."""
        # A caller's namespace cannot begin with a NUL. A group of namespaces stays a group.
        return f"\0v{self._version}:{namespace or ''}" if self._version else namespace

    def match_len(
        self, tokens: array[int], *, namespace: str | None = None, limit: int | None = None
    ) -> int:
        """Return how many cached tokens `acquire` would find. O(len + depth)."""
        return super().match_len(tokens, namespace=self.name(namespace), limit=limit)

    def would_fit(
        self,
        tokens: array[int],
        upto: int,
        *,
        namespace: str | None = None,
        limit: int | None = None,
        slack: int = 0,
    ) -> bool:
        """Whether `acquire` and then `extend` to ``upto`` would leave ``slack`` pages available."""
        own = self.name(namespace)
        return super().would_fit(tokens, upto, namespace=own, limit=limit, slack=slack)

    def acquire(
        self,
        tokens: array[int],
        *,
        namespace: str | None = None,
        limit: int | None = None,
        is_first: bool = True,
    ) -> KVLease:
        """Borrow the longest prefix cached by the present version. Raises RuntimeError."""
        own = self.name(namespace)
        return super().acquire(tokens, namespace=own, limit=limit, is_first=is_first)

    def release(
        self, lease: KVLease, tokens: array[int], num_computed: int, *, keep: bool = True
    ) -> range:
        """End a lease. Pages of an earlier version become free, except borrowed ones."""
        version = f"\0v{self._version}:"
        name = lease.namespace or ""
        if not self._version or name.startswith(version):
            return super().release(lease, tokens, num_computed, keep=keep)
        super().release(lease, tokens, num_computed, keep=False)
        super().flush(lease.namespace)
        return range(0)

    def pin(
        self, tokens: array[int], num_tokens: int, *, ttl: float, namespace: str | None = None
    ) -> int:
        """Pin the first ``num_tokens`` for ``ttl`` seconds; return the number of pinned tokens."""
        return super().pin(tokens, num_tokens, ttl=ttl, namespace=self.name(namespace))

    def pin_session(
        self,
        tokens: array[int],
        num_tokens: int,
        *,
        session: str,
        namespace: str | None = None,
        began: float | None = None,
    ) -> None:
        """Pin the first ``num_tokens`` as a session's last turn, for `session_ttl` seconds."""
        own = self.name(namespace)
        super().pin_session(tokens, num_tokens, session=session, namespace=own, began=began)

    def expect(
        self,
        session: str,
        label: str,
        *,
        namespace: str | None = None,
        is_running: bool = False,
    ) -> None:
        """Predict the next turn of a session by the label of its wait, and fit its pin to that."""
        own = self.name(namespace)
        super().expect(session, label, namespace=own, is_running=is_running)

    def retire(self, tokens: array[int], num_tokens: int, *, namespace: str | None = None) -> None:
        """Let the cached pages of the first ``num_tokens`` be evicted first."""
        super().retire(tokens, num_tokens, namespace=self.name(namespace))

    def flush(self, *namespaces: str | None) -> int:
        """Drop cached pages that no lease borrows, in some namespaces, by default in all."""
        return super().flush(*map(self.name, namespaces))

    def flush_prefix(self, tokens: array[int], *, namespace: str | None = None) -> int:
        """Drop all cached continuations of ``tokens``, pinned or not, except borrowed pages."""
        return super().flush_prefix(tokens, namespace=self.name(namespace))

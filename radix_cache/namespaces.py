"""The namespaces that a flush names."""

from __future__ import annotations

from collections.abc import Iterable


class FlushedNamespaces:
    """The namespaces of a flush, of which there may be thousands; all when none is named.

    A namespace that begins with a NUL is in a group, too: a flush that names what stands in front
    of its last NUL drops the whole group. Each look-up is O(1).
    """

    def __init__(self, named: Iterable[str | None]) -> None:
        self._named = frozenset(named)

    def __contains__(self, namespace: object) -> bool:
        if not self._named or namespace in self._named:
            return True
        if not isinstance(namespace, str) or not namespace.startswith("\0"):
            return False
        return namespace.rpartition("\0")[0] in self._named

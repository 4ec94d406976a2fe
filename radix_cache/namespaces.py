"""The namespaces that a flush empties."""

from __future__ import annotations

from collections.abc import Iterable


class FlushedNamespaces:
    """The set of namespaces to flush; without any name, it contains all namespaces.

    A namespace that begins with a NUL is also in a group: a flush that names the part before its
    last NUL drops the whole group. Each look-up is O(1), whatever the number of names.
    """

    def __init__(self, named: Iterable[str | None]) -> None:
        self._named = frozenset(named)

    def __contains__(self, namespace: object) -> bool:
        if not self._named or namespace in self._named:
            return True
        if not isinstance(namespace, str) or not namespace.startswith("\0"):
            return False
        return namespace.rpartition("\0")[0] in self._named

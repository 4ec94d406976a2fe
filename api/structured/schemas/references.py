"""Resolve the references of a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote, urldefrag

from .walk import resolve, walk

Schema = Mapping[str, object]


class References:
    """Finds the targets of references in a document: by path, anchor or id."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._named: dict[str, object] = {}
        for schema in walk(root):
            self._add(schema)

    def _add(self, schema: Schema) -> None:
        for key in ("$id", "id"):
            if isinstance(name := schema.get(key), str):
                self._named.setdefault(name.removesuffix("#"), schema)
                self._named.setdefault(name.rstrip("/").rpartition("/")[2], schema)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(key), str):
                self._named.setdefault(f"#{name}", schema)

    def target(self, reference: object) -> object:
        """Return the schema that a reference refers to; None if the document has no such schema."""
        if not isinstance(reference, str):
            return None
        if reference in self._named:
            return self._named[reference]
        base, fragment = urldefrag(reference)
        document = self._root if not base else self._document(base)
        if document is None or not fragment:
            return document
        found = resolve(document, f"#{unquote(fragment)}")
        if found is None and not fragment.startswith("/"):
            found = self._named.get(f"#{fragment}")
        return found if isinstance(found, Mapping | bool) else None

    def _document(self, base: str) -> object:
        return self._named.get(base) or self._named.get(base.rstrip("/").rpartition("/")[2])

"""Adapters: changes of a model's weights for some requests of a batch."""

from __future__ import annotations

import json
from typing import NamedTuple

_MARK = "\0lora"  # first characters of an adapter's namespace; no caller's salt begins with a NUL


class Adapter:
    """Weights in addition to a model's own, opaque to all but the decoder that loaded them.

    Requests, plans and batches refer to the object itself: its memory is freed as soon as no
    reference is left.
    """

    __slots__ = ("__weakref__",)


class LoadedAdapter(NamedTuple):
    """Loaded adapter: its weights, largest rank, bytes, and a digest of its files."""

    weights: Adapter
    rank: int
    num_bytes: int
    digest: bytes


def adapter_group(name: str, number: int, digest: bytes) -> str:
    """Return the group name of an adapter's namespaces, for a flush (`FlushedNamespaces`).

    ``number``: serial number of the load in this process, so that KV from an earlier load is never
    read. The digest distinguishes the adapter from others with that name and number in other
    processes, whose KV may be in a shared store.
    """
    return _MARK + json.dumps([name, number, digest.hex()])


def adapter_namespace(group: str, salt: str | None) -> str:
    """Return the namespace of requests with this adapter group and cache_salt (or None)."""
    return f"{group}\0{json.dumps(salt)}"


def adapter_of(namespace: str | None) -> str | None:
    """Return the name of a namespace's adapter; None for the model itself."""
    if namespace is None or not namespace.startswith(_MARK):
        return None
    name: str = json.loads(namespace.removeprefix(_MARK).rpartition("\0")[0])[0]
    return name


def salt_of(namespace: str | None) -> str | None:
    """Return the cache_salt of a namespace, or None."""
    if namespace is None or not namespace.startswith(_MARK):
        return namespace
    salt: str | None = json.loads(namespace.rpartition("\0")[2])
    return salt

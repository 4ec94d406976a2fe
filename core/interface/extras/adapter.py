"""Adapters: what changes a model's weights for some requests of a batch."""

from __future__ import annotations

import json
from typing import NamedTuple

_MARK = "\0lora"  # begins the namespace of an adapter; no salt of a caller begins with a NUL


class Adapter:
    """Weights beside a model's own, opaque to all but the decoder that they were made for.

    Requests, plans and batches refer to the object itself: its memory is free as soon as none of
    them needs it any more.
    """

    __slots__ = ("__weakref__",)


class LoadedAdapter(NamedTuple):
    """An adapter as it was loaded: its weights, largest rank, bytes, and a digest of its files."""

    weights: Adapter
    rank: int
    num_bytes: int
    digest: bytes


def adapter_group(name: str, number: int, digest: bytes) -> str:
    """The name by which a flush drops all namespaces of an adapter (`FlushedNamespaces`).

    ``number``: of its loading in this process, so that what was computed before it was loaded again
    is never read. The digest tells it from adapters of that name and number in other processes,
    whose KV may be in a store that both have.
    """
    return _MARK + json.dumps([name, number, digest.hex()])


def adapter_namespace(group: str, salt: str | None) -> str:
    """The namespace of the requests that have a cache_salt, or none, and an adapter."""
    return f"{group}\0{json.dumps(salt)}"


def adapter_of(namespace: str | None) -> str | None:
    """The name of the adapter of a namespace, None for that of the model itself."""
    if namespace is None or not namespace.startswith(_MARK):
        return None
    name: str = json.loads(namespace.removeprefix(_MARK).rpartition("\0")[0])[0]
    return name


def salt_of(namespace: str | None) -> str | None:
    """The cache_salt of a namespace."""
    if namespace is None or not namespace.startswith(_MARK):
        return namespace
    salt: str | None = json.loads(namespace.rpartition("\0")[2])
    return salt

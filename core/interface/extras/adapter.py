"""Adapters: additions to a model's weights (LoRA) that apply to some requests of a batch."""

from __future__ import annotations

import json
from typing import NamedTuple

_MARK = "\0lora"  # begins an adapter's namespace; a caller's salt cannot begin with NUL


class Adapter:
    """Additional weights for a model, opaque to all code except the decoder that loaded them.

    Requests, plans and batches refer to the object itself, so its memory is freed as soon as no
    reference is left.
    """

    __slots__ = ("__weakref__",)


class LoadedAdapter(NamedTuple):
    """A loaded adapter: its weights, largest LoRA rank, size in bytes, and digest of its files."""

    weights: Adapter
    rank: int
    num_bytes: int
    digest: bytes


def adapter_group(name: str, number: int, digest: bytes) -> str:
    """Return the name of the group of an adapter's namespaces, by which they can be flushed.

    ``number``: serial number of the load in this process, so that KV from an earlier load is never
    read. ``digest`` distinguishes the adapter from adapters of the same name and number in other
    processes, whose KV may be in a shared store.
    """
    return _MARK + json.dumps([name, number, digest.hex()])


def adapter_namespace(group: str, salt: str | None) -> str:
    """Return the namespace of requests with this adapter group and this cache_salt, if any."""
    return f"{group}\0{json.dumps(salt)}"


def adapter_of(namespace: str | None) -> str | None:
    """Return the name of a namespace's adapter; None if the namespace uses no adapter."""
    if namespace is None or not namespace.startswith(_MARK):
        return None
    name: str = json.loads(namespace.removeprefix(_MARK).rpartition("\0")[0])[0]
    return name


def salt_of(namespace: str | None) -> str | None:
    """Return the cache_salt of a namespace; None if it was made without one."""
    if namespace is None or not namespace.startswith(_MARK):
        return namespace
    salt: str | None = json.loads(namespace.rpartition("\0")[2])
    return salt

"""Ownership of KV pages: a radix tree of cached prefixes, and the accounting of pages.

The package works with token ids and page ids only; it knows no model, tensor or text.
"""

from .attached import StateSlots
from .namespaces import FlushedNamespaces
from .node import (
    CacheObserver,
    Eviction,
    KeptState,
    KVLease,
    LockHandle,
    Match,
    Node,
    StateLease,
    StateRank,
)
from .prefix_cache import PrefixCache
from .transfers import HeldPages, TransferLocks
from .tree import RadixTree

__all__ = [
    "CacheObserver",
    "Eviction",
    "FlushedNamespaces",
    "HeldPages",
    "KVLease",
    "KeptState",
    "LockHandle",
    "Match",
    "Node",
    "PrefixCache",
    "RadixTree",
    "StateLease",
    "StateRank",
    "StateSlots",
    "TransferLocks",
]

"""Ownership of KV pages: a radix tree of cached prefixes, and the accounting of pages.

The package knows no model, tensor or text: token ids go in, page ids come out.
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

"""Who owns which KV page: a radix tree of cached prefixes and the accountant around it.

Knows nothing of models, tensors or text: token ids in, page ids out.
"""

from .node import CacheObserver, Eviction, KVLease, LockHandle, Match, Node
from .prefix_cache import PrefixCache
from .tree import RadixTree

__all__ = [
    "CacheObserver",
    "Eviction",
    "KVLease",
    "LockHandle",
    "Match",
    "Node",
    "PrefixCache",
    "RadixTree",
]

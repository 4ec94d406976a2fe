"""Who owns which KV page: a radix tree of cached prefixes and the accountant around it.

Knows nothing of models, tensors or text: token ids in, page ids out.
"""

from .eviction import POLICIES
from .lease import KVLease
from .losses import Loss
from .node import Lock, Match, Node
from .pins import Pinned
from .prefix_cache import PrefixCache
from .tree import RadixTree

__all__ = [
    "POLICIES",
    "KVLease",
    "Lock",
    "Loss",
    "Match",
    "Node",
    "Pinned",
    "PrefixCache",
    "RadixTree",
]

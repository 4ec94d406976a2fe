"""Mistakes in the share of the cache that one tenant may keep."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "quota-evicts-the-modest",
        "EvictionIndex.take",
        "if (leaf := self.first_of(beyond)) is not None:",
        "if (leaf := None) is not None:",
        ("test_a_flood_of_one_namespace_leaves_the_others_what_they_have",),
        "what a tenant has beyond its quota goes first",
    ),
    Mutation(
        "quota-protects-tenants-that-are-gone",
        "EvictionIndex.take",
        "if (leaf := self._idle_leaf(owned, num_evicted)) is not None:",
        "if (leaf := None) is not None:",
        ("test_quota.py",),
        "tenants that are gone make room",
    ),
)

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
    Mutation(
        "quota-forgets-who-came-back",
        "NamespaceQuota.use",
        "            self._used[namespace] = num_evicted\n",
        "            self._used.setdefault(namespace, num_evicted)\n",
        ("test_quota.py",),
        "who comes back is protected",
    ),
    Mutation(
        "quota-takes-more-than-the-excess",
        "EvictionIndex.take",
        "min(missing, owned.excess(leaf.namespace)), True",
        "missing, True",
        ("test_nobody_gets_beyond_its_quota_and_what_it_needs_at_a_time",),
        "a tenant that keeps to its quota is one of many",
    ),
    Mutation(
        "quota-forgets-what-was-dropped",
        "RadixTree._drop",
        "        self.owned.add(leaf.namespace, -len(leaf.page_ids))\n",
        "",
        ("test_a_flood_of_one_namespace_leaves_the_others_what_they_have",),
        "what a tenant owns is what it has in the tree",
    ),
)

"""Mistakes in the share of the cache that one tenant may keep."""

from __future__ import annotations

from ..mutation import Mutation

QUOTA = "tests/radix_cache/test_quota.py"

MUTATIONS = (
    Mutation(
        "quota-evicts-the-modest",
        "radix_cache/eviction.py",
        "if (leaf := self.first_of(beyond)) is not None:",
        "if (leaf := None) is not None:",
        (QUOTA,),
        "what a tenant has beyond its quota goes first",
    ),
    Mutation(
        "quota-protects-tenants-that-are-gone",
        "radix_cache/eviction.py",
        "if (leaf := self._idle_leaf(owned, num_evicted)) is not None:",
        "if (leaf := None) is not None:",
        (QUOTA,),
        "tenants that are gone make room",
    ),
    Mutation(
        "quota-forgets-who-came-back",
        "radix_cache/owned.py",
        "            self._used[namespace] = num_evicted\n",
        "            self._used.setdefault(namespace, num_evicted)\n",
        (QUOTA,),
        "who comes back is protected",
    ),
    Mutation(
        "quota-takes-more-than-the-excess",
        "radix_cache/eviction.py",
        "min(missing, owned.excess(leaf.namespace)), True",
        "missing, True",
        (QUOTA,),
        "a tenant that keeps to its quota is one of many",
    ),
    Mutation(
        "quota-forgets-what-was-dropped",
        "radix_cache/tree.py",
        "        self.owned.add(leaf.namespace, -len(leaf.page_ids))\n",
        "",
        (QUOTA,),
        "what a tenant owns is what it has in the tree",
    ),
)

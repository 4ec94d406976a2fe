"""Mistakes in the radix tree: locks, splits, eviction."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "tree-unlock-skips-the-path",
        "RadixTree.unlock",
        "        for node in lock.node.path():\n            self._let_go(node, lock)",
        "        for node in [lock.node]:\n            self._let_go(node, lock)",
        ("test_match_changes_neither_shape_nor_recency",),
        "I2: locks equal the live handles at or below",
    ),
    Mutation(
        "tree-locks-the-last-node-alone",
        "RadixTree.lock",
        "        for held in node.path():\n            self._hold(held, lock)",
        "        for held in [node]:\n            self._hold(held, lock)",
        ("test_a_leaf_pinned_by_another_too_is_not_grown_in_place",),
        "I2: a parent's locks are at least its children's",
    ),
    Mutation(
        "tree-grows-a-shared-leaf-in-place",
        "RadixTree._append",
        "if node.ref_count > 1 or node.children or node.parent is None:",
        "if node.children or node.parent is None:",
        ("test_a_leaf_pinned_by_another_too_is_not_grown_in_place",),
        "another's receipt does not grow",
    ),
    Mutation(
        "tree-namespaces-share-a-root",
        "RadixTree.lock",
        "self._roots.setdefault(match.namespace, Node(match.namespace))",
        "self._roots.setdefault(None, Node(None))",
        ("test_namespaces_never_share",),
        "cache_salt separates tenants in KV",
    ),
    Mutation(
        "tree-matches-any-namespace",
        "RadixTree.match",
        "self._roots.get(namespace), 0, 0",
        "self._roots.get(namespace) or self._roots.get(None), 0, 0",
        ("test_namespaces_never_share",),
        "cache_salt separates tenants in KV",
    ),
    Mutation(
        "tree-trims-the-front",
        "Node.cut_tail",
        "tail = self.page_ids[-num_pages:]",
        "tail = self.page_ids[:num_pages]",
        ("test_evict_trims_only_the_tail_that_it_needs",),
        "law 2: the pages that go are those that left the node",
    ),
    Mutation(
        "tree-flush-takes-what-is-borrowed",
        "RadixTree._drop_upwards",
        "while node.parent is not None and not node.ref_count and not node.children:",
        "while node.parent is not None and not node.children:",
        ("test_flush_of_all_drops_every_unlocked_node",),
        "law 2: what a request borrows is not dropped",
    ),
    Mutation(
        "tree-flush-forgets-its-namespace",
        "RadixTree.flush",
        "[leaf for leaf in self._index if leaf.namespace in flushed]",
        "[leaf for leaf in self._index if leaf]",
        ("test_flush_of_one_namespace_leaves_the_others",),
        "one tenant's flush leaves the others",
    ),
    Mutation(
        "eviction-most-recent-first",
        "EvictionIndex.take",
        "self._leaves.popitem(0)",
        "self._leaves.popitem(-1)",
        ("test_the_least_recently_used_leaf_goes_first",),
        "least recently used goes first",
    ),
)

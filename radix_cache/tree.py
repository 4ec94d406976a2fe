"""Compressed radix tree over pages of tokens: finds cached prefixes and their pages."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator

from . import audit
from .eviction import EvictionIndex, NamespaceQuota
from .namespaces import FlushedNamespaces
from .node import (
    ITEM_SIZE,
    CacheObserver,
    Cause,
    LockHandle,
    Match,
    Node,
    OnDropped,
    OnStored,
    token_bytes,
)


class RadixTree:
    """Cached prefixes and their pages, with one tree for each namespace.

    `match` finds a prefix and changes nothing. `lock` holds a match, and `unlock` releases it; both
    refresh its recency. `insert_below` extends the prefix that a lock holds. `evict` removes
    unlocked leaves, least recently used first.

    ``quota``: number of pages above which the leaves of a namespace are evicted before others, if
    there are several namespaces. ``idle_after``: number of evicted pages after which an unused
    namespace is idle; leaves of idle namespaces are evicted even earlier. Raises ValueError for a
    page size below one token.
    """

    def __init__(
        self,
        page_size: int,
        *,
        quota: int | None = None,
        idle_after: float = math.inf,
        on_dropped: OnDropped | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, not {page_size}")
        self.page_size = page_size  # tokens
        self.num_pages = 0  # pages owned by nodes
        self.num_locked_pages = 0  # pages that a lock holds
        self.num_pinned_pages = 0  # pages that a pin holds
        self.num_yielding_pages = 0  # pages that only pins hold
        self.owned = NamespaceQuota(quota, idle_after)
        self.num_nodes = 0  # nodes in use, without roots
        self.num_evicted = 0  # pages evicted since the start
        self.num_evicted_by_quota = 0  # pages evicted because their namespace was over quota
        self._page_bytes = page_size * ITEM_SIZE
        self._on_stored: list[OnStored] = []
        self._on_dropped = [] if on_dropped is None else [on_dropped]
        self._roots: dict[str | None, Node] = {}  # roots with a child or a lock
        self._index = EvictionIndex()  # unlocked leaves, no roots
        self._locks: set[LockHandle] = set()  # live locks
        self._clock = 0  # one tick per lock, unlock and insertion
        self.epoch = 0  # one tick per node cut or dropped; matches of an older epoch are stale

    def add_observer(self, observer: CacheObserver) -> None:
        """Tell ``observer`` of every page that joins the tree or leaves it from now on."""
        self._on_stored.append(observer.stored)
        self._on_dropped.append(observer.dropped)

    @property
    def version(self) -> int:
        """A number that changes whenever the tree changes."""
        return self._clock + self.epoch

    def match(
        self, tokens: array[int], *, namespace: str | None = None, limit: int | None = None
    ) -> Match:
        """Return the longest cached prefix within ``limit`` tokens, in whole pages.

        Recency does not change, because a scheduler may look at requests that it does not admit.
        O(len(tokens) + depth), at the speed of memory comparisons.
        """
        data, size = token_bytes(tokens, limit), self._page_bytes
        node, start, taken, page_ids = self._roots.get(namespace), 0, 0, array("q")
        while node is not None and (child := node.children.get(data[start : start + size])):
            node, taken = child, child.common_pages(data, start)
            whole = taken == len(child.page_ids)
            page_ids += child.page_ids if whole else child.page_ids[:taken]
            start += taken * size
            if not whole:
                break
        return Match(start // ITEM_SIZE, page_ids, namespace, node, taken, self.epoch)

    def lock(self, match: Match, *, is_pin: bool = False) -> LockHandle:
        """Hold exactly the pages of ``match``, splitting the last node where the match ends.

        Without the split, a short match into a long node would hold pages that no request reads.
        Raises ValueError if the tree has cut or dropped a node since the match. O(depth + log n).
        """
        if match.epoch != self.epoch:
            raise ValueError(
                "the match is stale: the tree has split or dropped nodes since; match again"
            )
        node = match.node or self._roots.setdefault(match.namespace, Node(match.namespace))
        if match.num_node_pages < len(node.page_ids):
            node = self._split(node, match.num_node_pages)
        lock = LockHandle(node, len(match.page_ids), is_pin)
        self._locks.add(lock)
        self._clock += 1
        self.owned.use(node.namespace, self.num_evicted)
        for held in node.path():
            self._hold(held, lock)
        return lock

    def unlock(self, lock: LockHandle) -> None:
        """Release a lock. Raises ValueError if it was released before. O(depth + log n)."""
        self._require_live(lock)
        self._locks.remove(lock)
        lock.is_live, lock.num_pages = False, 0
        self._clock += 1
        self.owned.use(lock.node.namespace, self.num_evicted)
        for node in lock.node.path():
            self._let_go(node, lock)
        self._settle(lock.node)

    def insert(
        self,
        tokens: array[int],
        page_ids: array[int] | None = None,
        *,
        namespace: str | None = None,
    ) -> array[int]:
        """Insert pages below the namespace's root, without a lasting lock. O(len(tokens) + log n).

        Returns the page ids that the tree already had for the first tokens; the caller still owns
        its own pages for these tokens. Without ``page_ids``, for a tree of tokens only, the id of
        every page is 0.
        """
        if page_ids is None:
            page_ids = array("q", bytes(ITEM_SIZE * (len(tokens) // self.page_size)))
        lock = self.lock(self.match(array("q"), namespace=namespace))
        try:
            return self.insert_below(lock, tokens, page_ids)
        finally:
            self.unlock(lock)

    def insert_below(
        self, lock: LockHandle, tokens: array[int], page_ids: array[int]
    ) -> array[int]:
        """Cache the tokens after the prefix that ``lock`` holds, and move the lock to their end.

        Returns the page ids that the tree already had for the first tokens: the caller still owns
        its own copies. The rest of ``page_ids`` belongs to the tree from now on.
        Raises ValueError for a released lock, or for tokens that do not fill their pages.
        O(len(tokens) + nodes passed), for any length of the prefix above.
        """
        self._require_live(lock)
        if len(tokens) != len(page_ids) * self.page_size:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(page_ids)} pages exactly")
        self._clock += 1
        found = self._descend(lock, token_bytes(tokens))
        if len(found) < len(page_ids):
            self._append(lock, tokens[len(found) * self.page_size :], page_ids[len(found) :])
        lock.num_pages += len(page_ids)
        return found

    def evict(self, num_pages: int) -> array[int]:
        """Drop up to ``num_pages`` unlocked pages and return their ids.

        Fewer are dropped only if no more are unlocked. Leaves are evicted least recently used
        first. If some namespaces are over quota, leaves of idle namespaces come first, then leaves
        of the namespaces over quota until they are within it. The last leaf loses only as many
        pages from its end as needed, because the front of a prefix is more likely to be used again.
        O(log n + namespaces over quota) per leaf, O(1) per page.
        """
        freed = array("q")
        while (missing := num_pages - len(freed)) > 0:
            leaf, most, is_beyond = self._index.take(missing, self.owned, self.num_evicted)
            if leaf is None:
                break
            fits = len(leaf.page_ids) <= most
            gone = self._drop(leaf, "evicted") if fits else self._trim(leaf, most)
            self.num_evicted += len(gone)
            self.num_evicted_by_quota += len(gone) if is_beyond else 0
            freed += gone
        return freed

    def flush(self, *namespaces: str | None) -> array[int]:
        """Drop every unlocked node of some namespaces, by default of all; return the pages.

        O(leaves + nodes dropped).
        """
        flushed = FlushedNamespaces(namespaces)
        return self._drop_upwards([leaf for leaf in self._index if leaf.namespace in flushed])

    def flush_below(self, match: Match) -> array[int]:
        """Drop every unlocked node that goes through the end of ``match``; return the pages.

        Pages before that end are dropped as well, back to the nearest node with other children or a
        lock. O(nodes below).
        """
        nodes = [] if match.node is None else match.node.below()
        return self._drop_upwards([node for node in nodes if not node.children])

    def roots(self) -> Iterator[Node]:
        """Iterate over the roots of all namespaces; roots have no tokens. O(namespaces)."""
        return iter(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes, roots included, parents first. O(n)."""
        return (node for root in self._roots.values() for node in root.below())

    def check(self) -> None:
        """Assert every invariant of the tree. O(pages), for tests and idle moments."""
        audit.run(self.checks())

    def checks(self, locks: Iterable[LockHandle] | None = None) -> audit.Steps:
        """Run `check` in steps; ``locks``, if given, must be the set of all live locks."""
        if locks is not None:
            assert set(locks) == self._locks, (
                "the tree's live locks are not the locks of leases, pins and transfers"
            )
        nodes: list[Node] = []
        yield from audit.gather(self.nodes(), nodes)
        counts = {
            "nodes": self.num_nodes,
            "pages": self.num_pages,
            "locked": self.num_locked_pages,
            "pinned": self.num_pinned_pages,
            "yielding": self.num_yielding_pages,
        }
        yield from audit.check_pages(nodes, counts)
        yield from audit.check_owned(nodes, self.owned)
        yield from audit.check_links(nodes, self._roots, self.page_size)
        yield from audit.check_locks(nodes, self._locks)
        yield from audit.check_leaves(nodes, self._index, self._clock)

    # -- walking and growing

    def _descend(self, lock: LockHandle, data: bytes) -> array[int]:
        """Move a lock down the nodes that hold ``data``; return the ids of their pages."""
        start, size, found = 0, self._page_bytes, array("q")
        while child := lock.node.children.get(data[start : start + size]):
            same = child.common_pages(data, start)
            lock.node = child if same == len(child.page_ids) else self._split(child, same)
            self._hold(lock.node, lock)
            found += lock.node.page_ids
            start += same * size
        return found

    def _append(self, lock: LockHandle, tokens: array[int], page_ids: array[int]) -> None:
        node, first = lock.node, 0
        if node.ref_count > 1 or node.children or node.parent is None:
            lock.node = Node(node.namespace, node, tokens, page_ids)
            lock.node.ref_count, lock.node.last_used = 1, self._clock
            lock.node.link(self.page_size)
            self.num_nodes += 1
        else:  # No other lock holds the node, so it grows in place: one node less per publish.
            self._count(node, -1)
            first = len(node.page_ids)
            node.key += tokens
            node.page_ids += page_ids
        self._count(lock.node)
        self.owned.add(node.namespace, len(page_ids))
        for on_stored in self._on_stored:
            on_stored(lock.node, first)

    def _split(self, lower: Node, num_pages: int) -> Node:
        """Split a node after ``num_pages``; return the new node, which has the front part.

        The old node keeps the rest, so that locks, children and the eviction index still refer to
        the right end. The caller must lock the new node at once.
        """
        upper = lower.cut_front(num_pages, self.page_size)
        upper.link(self.page_size)
        lower.parent = upper
        lower.link(self.page_size)
        self.num_nodes += 1
        self.epoch += 1
        return upper

    # -- counts

    def _count(self, node: Node, sign: int = 1) -> None:
        """Add a node's pages to the counts; with ``sign=-1`` subtract them."""
        count = sign * len(node.page_ids)
        self.num_pages += count
        if node.ref_count:
            self.num_locked_pages += count
        if node.pins:
            self.num_pinned_pages += count
            if not node.is_borrowed:
                self.num_yielding_pages += count

    # -- locks

    def _hold(self, node: Node, lock: LockHandle) -> None:
        if node.ref_count == 0 and not node.children and node.parent is not None:
            self._index.remove(node)
        self._count(node, -1)
        node.ref_count += 1
        node.pins += lock.is_pin
        self._count(node)
        node.last_used = self._clock

    def _let_go(self, node: Node, lock: LockHandle) -> None:
        self._count(node, -1)
        node.ref_count -= 1
        node.pins -= lock.is_pin
        self._count(node)
        node.last_used = self._clock

    def _require_live(self, lock: LockHandle) -> None:
        if lock not in self._locks:
            raise ValueError("the lock was released already, or belongs to another tree")

    # -- shrinking

    def _settle(self, node: Node) -> None:
        """Add a node that has become an unlocked leaf to the index, or drop an unused root."""
        if node.ref_count or node.children:
            return
        if node.parent is None:
            del self._roots[node.namespace]
            self._index.forget(node.namespace)
            self.owned.forget(node.namespace)
        else:
            self._index.add(node)

    def _drop_upwards(self, leaves: Iterable[Node]) -> array[int]:
        """Drop unlocked leaves, then parents that become unlocked leaves; return the pages."""
        freed = array("q")
        for node in leaves:
            while node.parent is not None and not node.ref_count and not node.children:
                self._index.remove(node)
                freed += self._drop(node, "flushed")
                node = node.parent
        return freed

    def _drop(self, leaf: Node, cause: Cause) -> array[int]:
        """Drop a leaf that is no longer in the eviction index; return its pages."""
        for on_dropped in self._on_dropped:
            on_dropped(leaf, 0, cause)
        parent = leaf.unlink(self.page_size)
        self.num_nodes -= 1
        self._count(leaf, -1)
        self.owned.add(leaf.namespace, -len(leaf.page_ids))
        self.epoch += 1
        self._settle(parent)
        return leaf.page_ids

    def _trim(self, leaf: Node, num_pages: int) -> array[int]:
        """Remove the last pages of a leaf that is no longer in the eviction index; add it again."""
        first = len(leaf.page_ids) - num_pages
        for on_dropped in self._on_dropped:
            on_dropped(leaf, first, "evicted")
        self._count(leaf, -1)
        tail = leaf.cut_tail(num_pages, self.page_size)
        self._count(leaf)
        self.owned.add(leaf.namespace, -num_pages)
        self.epoch += 1
        self._index.add(leaf)
        return tail

"""A compressed radix tree over pages of tokens: which prefix is cached, in which pages."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator

from . import audit
from .eviction import EvictionIndex, NamespaceQuota
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
    """Cached prefixes and the pages that hold them, one tree for each namespace.

    `match` looks and changes nothing. `lock` holds a match, `unlock` gives it back; both refresh
    its recency. `insert_below` grows what a lock holds. `evict` takes unlocked leaves in the
    order of their last use; those of namespaces that own more than ``quota`` pages first, unless
    there is only one namespace or another was not used while ``idle_after`` pages were evicted.
    Raises ValueError for a page size below one token.
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
        self.num_pages = 0  # owned by nodes
        self.num_locked_pages = 0  # those of them that some lock holds
        self.num_pinned_pages = 0  # that some pin holds
        self.num_yielding_pages = 0  # that pins alone hold
        self.owned = NamespaceQuota(quota, idle_after)
        self.num_nodes = 0  # roots not counted
        self.num_evicted = 0  # pages, ever
        self.num_evicted_by_quota = 0  # those of them whose namespace had too many
        self._page_bytes = page_size * ITEM_SIZE
        self._on_stored: list[OnStored] = []
        self._on_dropped = [] if on_dropped is None else [on_dropped]
        self._roots: dict[str | None, Node] = {}  # those with a child or a lock
        self._index = EvictionIndex()  # unlocked leaves, no roots
        self._locks: set[LockHandle] = set()  # live locks
        self._clock = 0  # one tick per lock, growth and unlock
        self.epoch = 0  # one tick per node cut or dropped: older matches are void

    def add_observer(self, observer: CacheObserver) -> None:
        """Tell ``observer`` of every page that joins the tree or leaves it from now on."""
        self._on_stored.append(observer.stored)
        self._on_dropped.append(observer.dropped)

    @property
    def version(self) -> int:
        """A number that changes whenever the tree does."""
        return self._clock + self.epoch

    def match(
        self, tokens: array[int], *, namespace: str | None = None, limit: int | None = None
    ) -> Match:
        """The longest cached prefix within ``limit`` tokens, in whole pages; changes nothing.

        Recency stays as it was: a scheduler may look at requests that it does not admit.
        O(len(tokens) + depth), at memcmp speed.
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
        """Hold exactly the pages of ``match``, cutting the last node where the match ends.

        Without the cut, a short match into a long node would hold pages that no request reads.
        Raises ValueError when the tree has cut or dropped a node since. O(depth + log n).
        """
        if match.epoch != self.epoch:
            raise ValueError("the match is stale: the tree has cut or dropped nodes since")
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
        """Release a lock, exactly once; ValueError the second time. O(depth + log n)."""
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
        """`insert_below` the namespace's root; nothing stays held. O(len(tokens) + log n).

        Without ``page_ids``, for a tree of tokens alone, the id of every page is 0.
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
        """Cache the tokens that follow what ``lock`` holds, and move the lock to their end.

        Returns the page ids that the tree already had for the first of these tokens: the caller
        keeps its own copies of those. The rest of ``page_ids`` belongs to the tree from now on.
        Raises ValueError for a released lock or tokens that do not fill their pages.
        O(len(tokens) + nodes passed), however long the prefix above is.
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
        """Drop unlocked pages and return their ids, exactly ``num_pages`` if there are so many.

        Leaves go in the order of their last use. While namespaces are beyond their quota, those of
        idle ones go first, then their own until they keep to it. Of the last leaf only the tail
        that is needed goes, for the front of a prefix is worth more than its end. O(log n) per
        leaf, O(1) per page, O(namespaces beyond) for both.
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
        """Drop every unlocked node of these namespaces (of all by default); return its pages.

        O(leaves + nodes dropped).
        """
        leaves = list(self._index)
        if namespaces:
            named = frozenset(namespaces)
            leaves = [leaf for leaf in leaves if leaf.namespace in named]
        return self._drop_upwards(leaves)

    def flush_below(self, match: Match) -> array[int]:
        """Drop every unlocked node that goes through the end of ``match``; return its pages.

        The pages on the way there go as well, up to where others branch off. O(nodes below).
        """
        nodes = [] if match.node is None else match.node.below()
        return self._drop_upwards([node for node in nodes if not node.children])

    def roots(self) -> Iterator[Node]:
        """The roots of all namespaces, each a node without tokens. O(namespaces)."""
        return iter(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included, parents first. O(n)."""
        return (node for root in self._roots.values() for node in root.below())

    def check(self) -> None:
        """Assert every invariant of the tree. O(pages), for tests and for idle moments."""
        audit.run(self.checks())

    def checks(self, locks: Iterable[LockHandle] | None = None) -> audit.Steps:
        """`check` in steps; ``locks``, where given, are to be all locks that are out."""
        if locks is not None:
            assert set(locks) == self._locks, "the live locks are not those of the live leases"
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
        """Move a lock down the nodes that hold ``data``; return their page ids."""
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
        else:  # held by this lock alone: growing in place avoids one node per publish
            self._count(node, -1)
            first = len(node.page_ids)
            node.key += tokens
            node.page_ids += page_ids
        self._count(lock.node)
        self.owned.add(node.namespace, len(page_ids))
        for on_stored in self._on_stored:
            on_stored(lock.node, first)

    def _split(self, lower: Node, num_pages: int) -> Node:
        """Cut a node after ``num_pages``: a new one above it takes the front.

        The node itself stays the lower half, so locks, children and the eviction index still
        point at the right end. The caller holds the upper half at once.
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
        """Add a node's pages to the counts; with -1 subtract them, before the node changes."""
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
        """File a node that has become an unlocked leaf; forget a root that holds nothing."""
        if node.ref_count or node.children:
            return
        if node.parent is None:
            del self._roots[node.namespace]
            self._index.forget(node.namespace)
            self.owned.forget(node.namespace)
        else:
            self._index.add(node)

    def _drop_upwards(self, leaves: Iterable[Node]) -> array[int]:
        """Drop leaves, then those above them, for as long as they are unlocked leaves."""
        freed = array("q")
        for node in leaves:
            while node.parent is not None and not node.ref_count and not node.children:
                self._index.remove(node)
                freed += self._drop(node, "flushed")
                node = node.parent
        return freed

    def _drop(self, leaf: Node, cause: Cause) -> array[int]:
        """Forget a leaf that is out of the index; return its pages."""
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
        """Take the last pages of a leaf that is out of the index, and file it again."""
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

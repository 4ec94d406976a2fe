"""Nodes of a radix tree, and the types that its methods return."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol

Cause = Literal["evicted", "flushed"]
LossCause = Literal[Cause, "late", "unsound", "state_not_kept"]
"""Cause of the loss of pages: the tier that kept them may be too slow, or a page damaged.

With ``state_not_kept`` the pages are cached, but no recurrent state was kept at the end of one.
"""
OnStored = Callable[["Node", int], None]
"""Called with a node and the index of the first of its pages that have just joined the tree."""
OnDropped = Callable[["Node", int, Cause], None]
"""Called with a node and the index of the first of its pages that are about to leave the tree."""


class CacheObserver(Protocol):
    """An observer of the pages that join or leave the tree.

    Each call is about the pages ``node.page_ids[first:]``. The tree's thread makes the calls, in
    the order of the events. Pages never change while they are in the tree. An observer must not
    change the tree and must not raise.
    """

    def stored(self, node: Node, first: int) -> None:
        """Handle pages that have just joined the tree.

        The earlier pages of the node were in the tree before.
        """

    def dropped(self, node: Node, first: int, cause: Cause) -> None:
        """Handle pages that are about to leave the tree.

        The node still has the pages during the call.
        """


ITEM_SIZE = array("q").itemsize


def token_bytes(tokens: array[int], limit: int | None = None) -> bytes:
    """Return the bytes of the first ``limit`` tokens, by default of all.

    Raises TypeError if ``tokens`` is not an ``array("q")``. O(len).
    """
    if not isinstance(tokens, array) or tokens.typecode != "q":
        raise TypeError('tokens must be an array("q")')
    if limit is None or limit >= len(tokens):
        return tokens.tobytes()
    return tokens[: max(limit, 0)].tobytes()


def _no_ids() -> array[int]:
    return array("q")


@dataclass(slots=True, eq=False)
class Node:
    """An edge of the tree and the position at its end.

    A root is a node without tokens. A node has at least as many locks as each of its children, so
    every node below an unlocked one is unlocked.
    """

    namespace: str | None  # the parent's namespace; None: the shared default
    parent: Node | None = None  # None for a root
    key: array[int] = field(default_factory=_no_ids)  # tokens, [len(page_ids) * page_size]
    page_ids: array[int] = field(default_factory=_no_ids)  # KV of ``key``; owned by this node
    children: dict[bytes, Node] = field(default_factory=dict)  # by the bytes of their first page
    ref_count: int = 0  # live locks at or below this node
    pins: int = 0  # pins among the live locks
    num_hits: int = 0  # requests that hit this node; shown on the dashboard
    last_used: int = 0  # tick of the last lock or unlock; nodes with equal ticks lie on one path

    def common_pages(self, data: bytes, start: int) -> int:
        """Return how many leading pages equal ``data`` (bytes of tokens) from byte ``start`` on.

        One memory comparison is enough if all are equal; otherwise a bisection compares every page
        at most once. O(len).
        """
        if data.startswith(self.key, start):
            return len(self.page_ids)
        page_size = len(self.key) // len(self.page_ids)
        page_bytes = page_size * self.key.itemsize
        same, bound = 0, min(len(self.page_ids), (len(data) - start) // page_bytes)
        while same < bound:
            middle = (same + bound + 1) // 2
            piece = self.key[same * page_size : middle * page_size]
            if data.startswith(piece, start + same * page_bytes):
                same = middle
            else:
                bound = middle - 1
        return same

    def link(self, page_size: int) -> None:
        """Add this node to its parent's children."""
        assert self.parent is not None, "a root cannot be linked: it has no parent"
        self.parent.children[self.key[:page_size].tobytes()] = self

    def unlink(self, page_size: int) -> Node:
        """Remove this node from its parent's children; return the parent."""
        assert self.parent is not None, "a root cannot be unlinked: it has no parent"
        del self.parent.children[self.key[:page_size].tobytes()]
        return self.parent

    def cut_front(self, num_pages: int, page_size: int) -> Node:
        """Move the first ``num_pages`` to a new node and return it.

        The new node gets this node's locks and pins and becomes its parent's child. The caller
        makes it the parent of this node. O(len).
        """
        cut = num_pages * page_size
        upper = Node(self.namespace, self.parent, self.key[:cut], self.page_ids[:num_pages])
        upper.ref_count, upper.pins, upper.num_hits = self.ref_count, self.pins, self.num_hits
        del self.key[:cut], self.page_ids[:num_pages]
        return upper

    def cut_tail(self, num_pages: int, page_size: int) -> array[int]:
        """Remove the last ``num_pages`` and return their ids. O(pages)."""
        tail = self.page_ids[-num_pages:]
        del self.page_ids[-num_pages:], self.key[-num_pages * page_size :]
        return tail

    def boundary_tokens(self, page: int, page_size: int) -> bytes:
        """Return the tokens of a page and of the page before it, if any. O(page size)."""
        first = page * page_size
        before = self.key[max(0, first - page_size) : first]
        if not before and self.parent is not None:
            before = self.parent.key[-page_size:]
        return (before + self.key[first : first + page_size]).tobytes()

    @property
    def is_borrowed(self) -> bool:
        """Whether a lease or a transfer holds the node; pins alone do not count."""
        return self.ref_count > self.pins

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one. O(depth)."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]

    def below(self) -> Iterator[Node]:
        """Iterate over this node and all nodes below it, parents first. O(n)."""
        stack = [self]
        while stack:
            yield (node := stack.pop())
            stack.extend(node.children.values())


class Match(NamedTuple):
    """The longest cached prefix of some tokens, in whole pages.

    A match holds no lock. It can be locked until a node of the tree is cut or dropped.
    """

    num_tokens: int  # a multiple of the page size
    page_ids: array[int]  # copy of the ids of the matched pages
    namespace: str | None
    node: Node | None  # the deepest node reached; None when the namespace is unknown
    num_node_pages: int  # number of pages of ``node`` that matched
    epoch: int  # epoch of the tree at the time of the match

    @property
    def num_idle_pages(self) -> int:
        """Number of pages of the match that no lease borrows. O(depth)."""
        if self.node is None:
            return 0
        *above, last = self.node.path()
        num_pages = 0 if last.is_borrowed else self.num_node_pages
        return num_pages + sum(len(node.page_ids) for node in above if not node.is_borrowed)


@dataclass(slots=True, eq=False)
class LockHandle:
    """A lock that holds every page from the root to the end of ``node`` until it is released.

    If a node is split, the lower half remains the same object, so ``node`` stays valid.
    """

    node: Node  # deepest node that the lock holds
    num_pages: int  # pages from the root to ``node``; 0 once released
    is_pin: bool = False  # whether this is the lock of a pin
    is_live: bool = True  # False once released


@dataclass(frozen=True, slots=True)
class Eviction:
    """The loss of cached pages: its cause, and its time on the clock of `PrefixCache.tick`."""

    cause: LossCause
    time: float  # seconds


class StateRank(IntEnum):
    """Eviction order of kept states: the lowest rank first, states of pinned pages last."""

    GRID = 0  # state kept at a regular interval of a prompt, to limit recomputation
    USED = 1  # state from which a request is likely to resume


@dataclass(slots=True, eq=False)
class KeptState:
    """The recurrent state at the end of a page, kept for later requests."""

    page_id: int  # owned by a node of the tree
    slot: int  # owned by `StateSlots.attached`
    rank: StateRank
    last_used: int  # tick at which this state was kept, or last found by a request
    num_readers: int = 0  # leases whose uncommitted first step copies this state


@dataclass(slots=True, eq=False)
class StateLease:
    """The state slot and the log of one request, and the page ends whose states are to be kept."""

    slot: int  # owned by this lease
    log: int  # owned by this lease

    # state that the first step copies to ``slot``; None after its commit
    source: KeptState | None = None
    # Tokens that the state in ``slot`` covers, always whole pages; 0: no state, or an invalid one.
    position: int = 0
    # Tokens to compute again although their pages were cached; counted with the first step.
    num_recomputed: int = 0
    # (position, rank) of page ends whose states the next steps keep; ascending.
    wanted: list[tuple[int, StateRank]] = field(default_factory=list)
    # (position, slot, rank) of states that the running step keeps; this lease owns the slots.
    keeps: list[tuple[int, int, StateRank]] = field(default_factory=list)

    def want(self, position: int, rank: StateRank = StateRank.USED) -> None:
        """Request that the state at the end of a page is kept when a step passes it. O(wanted)."""
        at = bisect_left(self.wanted, (position, StateRank.GRID))
        if at < len(self.wanted) and self.wanted[at][0] == position:
            self.wanted[at] = position, max(rank, self.wanted[at][1])
        else:
            self.wanted.insert(at, (position, rank))


@dataclass(slots=True, eq=False)
class KVLease:
    """The pages that one request may use, from `PrefixCache.acquire` to `PrefixCache.release`."""

    page_ids: array[int]  # page table: num_shared_pages owned by the tree, then pages of this lease
    lock: LockHandle  # holds the shared pages; owned by this lease
    num_cached_tokens: int  # tokens found at acquire; their KV need not be computed
    namespace: str | None  # cache salt; None is the shared default

    # Loss of the first page that was not found, if it had been cached before.
    eviction: Eviction | None = None
    state: StateLease | None = None  # None without recurrent states, and once released

    # Tokens whose pages were found at acquire. Without their state, not all are cached tokens.
    num_found_tokens: int = 0

    @property
    def num_shared_pages(self) -> int:
        """Number of leading pages that the tree lends; 0 once released."""
        return self.lock.num_pages

    def require_live(self) -> None:
        """Raise ValueError if the lease was released."""
        if not self.lock.is_live:
            raise ValueError("the lease was released already")

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
"""The cause for pages that a request lacks: a tier that had them may be too slow, or damaged.

With ``state_not_kept`` the pages are there, but not the recurrent state at the end of one of them.
"""
OnStored = Callable[["Node", int], None]
"""Called with a node and the index of the first of its pages that have just joined the tree."""
OnDropped = Callable[["Node", int, Cause], None]
"""Called with a node and the index of the first of its pages that are about to leave the tree."""


class CacheObserver(Protocol):
    """Told which pages join the tree and which leave it, each time ``node.page_ids[first:]``.

    Called on the tree's thread, in the order in which it happens. Pages never change while they are
    in the tree. An observer must not change the tree, nor raise.
    """

    def stored(self, node: Node, first: int) -> None:
        """Note pages that have just joined the tree. Those before them are in it."""

    def dropped(self, node: Node, first: int, cause: Cause) -> None:
        """Note pages that are about to leave the tree: they are the node's for the last time."""


ITEM_SIZE = array("q").itemsize


def token_bytes(tokens: array[int], limit: int | None = None) -> bytes:
    """The bytes of the first ``limit`` tokens (of all by default): comparing them is a memcmp.

    Raises TypeError when ``tokens`` is not an ``array("q")``. O(len).
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
    """An edge of the tree together with the place it leads to.

    A root is a node without tokens. Locks only grow towards the root, so below an unlocked node
    everything is unlocked.
    """

    namespace: str | None  # cache salt whose tree this is; same as the parent's
    parent: Node | None = None  # None for a root
    key: array[int] = field(default_factory=_no_ids)  # tokens, [len(page_ids) * page_size]
    page_ids: array[int] = field(default_factory=_no_ids)  # KV of ``key``; owned by this node
    children: dict[bytes, Node] = field(default_factory=dict)  # by the bytes of their first page
    ref_count: int = 0  # live locks at or below this node
    pins: int = 0  # those of them that are pins
    num_hits: int = 0  # requests that found it; shown on the dashboard
    last_used: int = 0  # tick when it was last locked or unlocked; equal ticks lie on one path

    def common_pages(self, data: bytes, start: int) -> int:
        """Leading pages of this node equal to ``data`` (bytes of tokens) from byte ``start`` on.

        One memory comparison when all are, else a bisection that compares each half once: O(len).
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
        assert self.parent is not None, "a root has no parent to be linked to"
        self.parent.children[self.key[:page_size].tobytes()] = self

    def unlink(self, page_size: int) -> Node:
        """Remove this node from its parent's children; return the parent."""
        assert self.parent is not None, "a root is never dropped as a leaf"
        del self.parent.children[self.key[:page_size].tobytes()]
        return self.parent

    def cut_front(self, num_pages: int, page_size: int) -> Node:
        """Take the first ``num_pages`` out and return them as a node of their own.

        It gets this node's locks and pins and stands between this node and the parent. O(len).
        """
        cut = num_pages * page_size
        upper = Node(self.namespace, self.parent, self.key[:cut], self.page_ids[:num_pages])
        upper.ref_count, upper.pins, upper.num_hits = self.ref_count, self.pins, self.num_hits
        del self.key[:cut], self.page_ids[:num_pages]
        return upper

    def cut_tail(self, num_pages: int, page_size: int) -> array[int]:
        """Drop the last ``num_pages`` and return them. O(pages)."""
        tail = self.page_ids[-num_pages:]
        del self.page_ids[-num_pages:], self.key[-num_pages * page_size :]
        return tail

    def boundary_tokens(self, page: int, page_size: int) -> bytes:
        """The tokens of one of its pages and of the page before that, if any. O(page size)."""
        first = page * page_size
        before = self.key[max(0, first - page_size) : first]
        if not before and self.parent is not None:
            before = self.parent.key[-page_size:]
        return (before + self.key[first : first + page_size]).tobytes()

    @property
    def is_borrowed(self) -> bool:
        """Whether a lease needs it; what pins alone hold can be had back."""
        return self.ref_count > self.pins

    def path(self) -> list[Node]:
        """Nodes from the root to this one. O(depth)."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]

    def below(self) -> Iterator[Node]:
        """The node and all below it, parents first. O(n)."""
        stack = [self]
        while stack:
            yield (node := stack.pop())
            stack.extend(node.children.values())


class Match(NamedTuple):
    """The longest cached prefix of some tokens, in whole pages.

    It borrows nothing: it can be locked until the tree next cuts or drops a node.
    """

    num_tokens: int  # a multiple of the page size
    page_ids: array[int]  # a copy
    namespace: str | None
    node: Node | None  # the deepest node reached; None when the namespace is unknown
    num_node_pages: int  # how many of that node's pages matched
    epoch: int  # of the tree when it was matched

    @property
    def num_idle_pages(self) -> int:
        """Pages of the match that no lease borrows now. O(depth)."""
        if self.node is None:
            return 0
        *above, last = self.node.path()
        num_pages = 0 if last.is_borrowed else self.num_node_pages
        return num_pages + sum(len(node.page_ids) for node in above if not node.is_borrowed)


@dataclass(slots=True, eq=False)
class LockHandle:
    """A lock: it holds every page from the root to the end of ``node`` until unlocked.

    Splitting leaves the lower half in place, so a lock stays valid.
    """

    node: Node  # the deepest node held
    num_pages: int  # held pages, root to ``node``; 0 once released
    is_pin: bool = False  # whether there is a pin behind it, not a lease
    is_live: bool = True  # False once released


@dataclass(frozen=True, slots=True)
class Eviction:
    """Cached pages that were lost: why, and when on the clock of `PrefixCache.tick`."""

    cause: LossCause
    time: float  # seconds


class StateRank(IntEnum):
    """Order in which kept states give way: the lowest rank first, last those of pins."""

    GRID = 0  # every so many tokens of a prompt: bounds what a miss computes anew
    USED = 1  # a request is likely to go on from there


@dataclass(slots=True, eq=False)
class KeptState:
    """The state at the end of a page, attached to it."""

    page_id: int  # owned by a node of the tree
    slot: int  # owned by `StateSlots.attached`
    rank: StateRank
    last_used: int  # tick when it was last attached, or found by a request
    num_readers: int = 0  # leases that copy it at the start of a step, not committed yet


@dataclass(slots=True, eq=False)
class StateLease:
    """The slot and the log of one request, and the page ends whose states it keeps."""

    slot: int  # owned by this lease
    log: int  # owned by this lease
    source: KeptState | None = None  # copied to ``slot`` by the first step, until that is committed
    # Tokens that the state in ``slot`` covers: a page's end. 0: none, no step yet, or void.
    position: int = 0
    # Tokens behind its beginning whose pages were cached: counted with the first step.
    num_recomputed: int = 0
    # page ends to keep when a step passes them, by position; rising
    wanted: list[tuple[int, StateRank]] = field(default_factory=list)
    # (position, slot, rank) of page ends that the step under way keeps; the slots are owned by this
    keeps: list[tuple[int, int, StateRank]] = field(default_factory=list)

    def want(self, position: int, rank: StateRank = StateRank.USED) -> None:
        """Keep the state at this page end, once a step passes it. O(wanted)."""
        at = bisect_left(self.wanted, (position, StateRank.GRID))
        if at < len(self.wanted) and self.wanted[at][0] == position:
            self.wanted[at] = position, max(rank, self.wanted[at][1])
        else:
            self.wanted.insert(at, (position, rank))


@dataclass(slots=True, eq=False)
class KVLease:
    """The pages that one request may use, from `PrefixCache.acquire` to `PrefixCache.release`."""

    page_ids: array[int]  # page table; the first num_shared_pages owned by the tree, rest by this
    lock: LockHandle  # holds the shared pages; owned by this lease
    num_cached_tokens: int  # found at acquire; their KV need not be computed
    namespace: str | None  # cache salt; None is the shared default
    # when the first page that was not found had been cached before
    eviction: Eviction | None = None
    state: StateLease | None = None  # of models with recurrent states, until released
    # Tokens whose pages were found at acquire; with states maybe more than num_cached_tokens.
    num_found_tokens: int = 0

    @property
    def num_shared_pages(self) -> int:
        """Number of the first pages that the tree lends; 0 once released."""
        return self.lock.num_pages

    def require_live(self) -> None:
        """Raise ValueError once it was released."""
        if not self.lock.is_live:
            raise ValueError("the lease was released already")

"""What a radix tree is made of, and what it hands out."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple


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
    locks: int = 0  # live receipts at or below this node
    last_used: int = 0  # tick when it was last locked or unlocked; equal ticks lie on one path
    num_hits: int = 0  # receipts that ever held it
    priority: int = 0  # of the most important receipt that ever held it; lower matters more

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

    def path(self) -> list[Node]:
        """Nodes from the root to this one. O(depth)."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]


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
    def num_unlocked_pages(self) -> int:
        """Pages of the match that no receipt pins now. O(depth)."""
        if self.node is None:
            return 0
        *above, last = self.node.path()
        num_pages = 0 if last.locks else self.num_node_pages
        return num_pages + sum(len(node.page_ids) for node in above if not node.locks)


@dataclass(slots=True, eq=False)
class Lock:
    """A receipt: it pins every page from the root to the end of ``node`` until unlocked.

    Splitting leaves the lower half in place, so a receipt never has to be told of it.
    """

    node: Node  # the deepest node pinned
    num_pages: int  # pinned pages, root to ``node``; 0 once released
    priority: int = 0  # of the request behind it; lower matters more
    is_live: bool = True  # False once released

"""PrefixSource: continues an earlier request that began with all tokens of this one.

Its name in ``--draft``, usage and metrics is ``radix``, after the tree in which it looks up.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...core.interface.request import Request
from ...radix_cache import Node, RadixTree
from .merge import common_len
from .source import Guess, Priors, Source

SINGLE, FORKED = 0, 1  # kinds: one continuation was ever seen, or several
FIRST_WAIT = 16  # tokens until a request that left the tree searches again
KEEP_SHARE = 15 / 16  # is kept once a bound is exceeded: an eviction repairs all cursors
MAX_NODES = 2**15  # each takes some 450 bytes beside its tokens (measured)


@dataclass(slots=True)
class _TreeCursor:
    """Place in the tree up to which a request's tokens run.

    Nodes grow at their ends without notice; when one was cut or dropped the tree's epoch differs.
    """

    node: Node | None  # None: what was here is gone, or nothing was ever kept in the namespace
    offset: int  # tokens of ``node.key`` that are equal
    length: int  # tokens of the request that are equal
    epoch: int  # of the tree
    wait: int  # tokens of the request between two searches in vain
    retry_at: int  # tokens of the request
    forked: bool = False  # whether the answer has passed a fork


class PrefixSource(Source):
    """Continues the most recent request that began with all of this one's tokens.

    It has a radix tree of token ids without KV, so tokens outlive their KV: ``max_tokens`` in all,
    in ``max_nodes``; the least recently used are dropped first. Requests are inserted when they
    end.
    """

    name = "radix"
    priors = Priors.constant(0.9, 0.7)

    def __init__(self, *, max_tokens: int = 1_000_000, max_nodes: int = MAX_NODES) -> None:
        self._max_tokens, self._max_nodes = max_tokens, max_nodes
        self._tree = RadixTree(page_size=1)
        self._cursors: dict[Request, _TreeCursor] = {}

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        """O(new tokens + most), and O(depth) more where the tree was cut since."""
        if request.cache.is_private:
            return ()
        draft, forked = self._draft(request, most)
        if not draft:
            return ()
        kind = FORKED if forked or self._cursors[request].forked else SINGLE
        return (Guess(draft, self.name, kind),)

    def leave(self, request: Request) -> None:
        """Insert the request's tokens. O(len(tokens)), by memcmp where the tree has them."""
        self._cursors.pop(request, None)
        if not request.num_output or request.cache.is_private:
            return
        tokens, tree = request.tokens, self._tree
        tree.insert(tokens, namespace=request.namespace)
        if tree.num_pages > self._max_tokens:
            tree.evict(tree.num_pages - int(self._max_tokens * KEEP_SHARE))
        while tree.num_nodes > self._max_nodes:
            tree.evict(tree.num_pages - int(tree.num_pages * KEEP_SHARE))

    def flush(self, *namespaces: str | None) -> None:
        """Drop the tokens of ended requests in these namespaces, in all when none is named."""
        self._tree.flush(*namespaces)

    # -- the cursor

    def _draft(self, request: Request, most: int) -> tuple[array[int], bool]:
        """The tokens behind the request, and whether past a fork; empty if it left the tree."""
        cursor = self._follow(request)
        if cursor.node is None or cursor.length < len(request.tokens):
            return array("q"), False
        return _run_on(cursor.node, cursor.offset, most)

    def _follow(self, request: Request) -> _TreeCursor:
        """Bring the request's cursor up to the tree and to the newest token."""
        cursor = self._cursors.get(request)
        if cursor is None:
            return self._search(request, FIRST_WAIT)
        if cursor.epoch != self._tree.epoch:
            cursor.node = _repair(cursor)
            cursor.epoch = self._tree.epoch
        if cursor.node is None and len(request.tokens) >= cursor.retry_at:
            return self._search(request, 2 * cursor.wait)
        _advance(cursor, request)
        return cursor

    def _search(self, request: Request, wait: int) -> _TreeCursor:
        """Match from the root. O(len(tokens)); so every search in vain doubles the wait."""
        match = self._tree.match(request.tokens, namespace=request.namespace)
        retry_at = len(request.tokens) + wait
        cursor = _TreeCursor(
            match.node, match.num_node_pages, match.num_tokens, match.epoch, wait, retry_at
        )
        cursor.forked = _passed_fork(cursor, request.prompt_len)
        self._cursors[request] = cursor
        return cursor


def _repair(cursor: _TreeCursor) -> Node | None:
    """The cursor's node after nodes were cut or dropped, None if it was; sets the offset. O(depth).

    A cut leaves a node its lower half, so the place may now be at the end of a node above.
    """
    node = cursor.node
    if node is None or not _is_attached(node):
        return None
    start = sum(len(above.key) for above in node.path()[:-1])
    while start >= cursor.length and node.parent is not None:
        node = node.parent
        start -= len(node.key)
    cursor.offset = cursor.length - start
    return node if node.parent is not None and cursor.offset <= len(node.key) else None


def _is_attached(node: Node) -> bool:
    path = node.path()
    return all(up.children.get(down.key[:1].tobytes()) is down for up, down in pairwise(path))


def _advance(cursor: _TreeCursor, request: Request) -> None:
    """Go on along the tree for as long as the request's tokens do. O(new tokens)."""
    tokens, node = request.tokens, cursor.node
    while node is not None and cursor.length < len(tokens):
        if cursor.offset == len(node.key):
            node = _enter_child(cursor, node, request)
            continue
        if node.key[cursor.offset] != tokens[cursor.length]:
            return
        new = tokens[cursor.length : cursor.length + len(node.key) - cursor.offset]
        same = common_len(new, node.key[cursor.offset : cursor.offset + len(new)])
        cursor.offset += same
        cursor.length += same


def _enter_child(cursor: _TreeCursor, node: Node, request: Request) -> Node | None:
    token = request.tokens[cursor.length : cursor.length + 1]
    child = node.children.get(token.tobytes())
    if child is not None:
        cursor.forked |= len(node.children) > 1 and cursor.length >= request.prompt_len
        cursor.node, cursor.offset = child, 0
    return child


def _passed_fork(cursor: _TreeCursor, prompt_len: int) -> bool:
    """Whether other answers left the path to the cursor after the prompt's end. O(depth)."""
    node, end = cursor.node, cursor.length - cursor.offset
    while node is not None and node.parent is not None and end >= prompt_len:
        node = node.parent
        if len(node.children) > 1:
            return True
        end -= len(node.key)
    return False


def _run_on(node: Node, offset: int, most: int) -> tuple[array[int], bool]:
    """Follow the tree from a place in a node, into the most recent child each time.

    Returns up to ``most`` tokens, and whether others once went on otherwise before the last.
    """
    draft = node.key[offset : offset + most]
    forked = False
    while len(draft) < most and node.children:
        forked = forked or len(node.children) > 1
        node = _latest(node)
        draft += node.key[: most - len(draft)]
    return draft, forked


def _latest(node: Node) -> Node:
    if len(node.children) == 1:
        return next(iter(node.children.values()))
    return max(node.children.values(), key=_last_used)


def _last_used(node: Node) -> int:
    return node.last_used

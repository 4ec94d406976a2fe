"""PrefixSource: drafts from an earlier request that began with all tokens of this one.

Its name in ``--draft``, usage and metrics is ``radix``, after the radix tree that it searches.
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

SINGLE, FORKED = 0, 1  # kinds of guesses: a single continuation was seen, or several
FIRST_WAIT = 16  # tokens until a request that left the tree searches it again
# share of the tokens that an eviction keeps; evictions must be rare, because each one makes all
# cursors look up their node again
KEEP_SHARE = 15 / 16
MAX_NODES = 2**15  # maximum number of nodes, of about 450 bytes each without tokens (measured)


@dataclass(slots=True)
class _TreeCursor:
    """The position in the tree up to which it contains a request's tokens.

    A node may grow at its end at any time; when a node is cut or dropped, the tree's epoch changes.
    """

    node: Node | None  # None: the node was dropped, or the namespace has no tokens in the tree
    offset: int  # number of matching tokens in ``node.key``
    length: int  # number of matching tokens of the request
    epoch: int  # epoch of the tree for which ``node`` and ``offset`` are right
    wait: int  # tokens between the last search and the next one
    retry_at: int  # length of the request, in tokens, at which the next search is due
    forked: bool = False  # whether the answer has passed a fork


class PrefixSource(Source):
    """Drafts from the most recent request that began with all of this one's tokens.

    The source has its own radix tree of token ids, which keeps tokens longer than the KV cache
    keeps their KV. Requests are inserted when they end. The tree keeps at most ``max_tokens``
    tokens and ``max_nodes`` nodes; the least recently used are dropped first.
    """

    name = "radix"
    priors = Priors.constant(0.9, 0.7)

    def __init__(self, *, max_tokens: int = 1_000_000, max_nodes: int = MAX_NODES) -> None:
        self._max_tokens, self._max_nodes = max_tokens, max_nodes
        self._tree = RadixTree(page_size=1)
        self._cursors: dict[Request, _TreeCursor] = {}

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        """Return up to ``most`` tokens of the earlier request as the only guess, if there is one.

        O(new tokens + most); plus O(depth) if a node of the tree was cut or dropped since the last
        call.
        """
        if request.cache.is_private:
            return ()
        draft, forked = self._draft(request, most)
        if not draft:
            return ()
        kind = FORKED if forked or self._cursors[request].forked else SINGLE
        return (Guess(draft, self.name, kind),)

    def leave(self, request: Request) -> None:
        """Insert the request's tokens into the tree.

        O(len(tokens)); tokens that are already in the tree are compared with memcmp.
        """
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
        """Drop the tokens of ended requests in some namespaces, by default in all."""
        self._tree.flush(*namespaces)

    # -- the cursor

    def _draft(self, request: Request, most: int) -> tuple[array[int], bool]:
        """Return up to ``most`` next tokens, and whether there is a fork between them.

        Returns no tokens if the tree does not contain all tokens of the request.
        """
        cursor = self._follow(request)
        if cursor.node is None or cursor.length < len(request.tokens):
            return array("q"), False
        return _run_on(cursor.node, cursor.offset, most)

    def _follow(self, request: Request) -> _TreeCursor:
        """Return the request's cursor, updated to the tree's epoch and to the newest token."""
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
        """Match the request's tokens from the root, and return a new cursor.

        If the match fails, the next search is due after ``wait`` more tokens. A search takes
        O(len(tokens)), so the caller doubles ``wait`` each time.
        """
        match = self._tree.match(request.tokens, namespace=request.namespace)
        retry_at = len(request.tokens) + wait
        cursor = _TreeCursor(
            match.node, match.num_node_pages, match.num_tokens, match.epoch, wait, retry_at
        )
        cursor.forked = _passed_fork(cursor, request.prompt_len)
        self._cursors[request] = cursor
        return cursor


def _repair(cursor: _TreeCursor) -> Node | None:
    """Find the cursor's node again after nodes were cut or dropped, and set the cursor's offset.

    Returns None if the node was dropped. A cut moves the upper part of a node to a new parent, so
    the position may now be in a node above. O(depth).
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
    """Advance the cursor while the tree matches the request's new tokens. O(new tokens)."""
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
    """Whether the path to the cursor has a fork after the end of the prompt. O(depth)."""
    node, end = cursor.node, cursor.length - cursor.offset
    while node is not None and node.parent is not None and end >= prompt_len:
        node = node.parent
        if len(node.children) > 1:
            return True
        end -= len(node.key)
    return False


def _run_on(node: Node, offset: int, most: int) -> tuple[array[int], bool]:
    """Follow the tree from an offset in a node, entering the most recently used child each time.

    Returns up to ``most`` tokens, and whether there is a fork before the last of them.
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

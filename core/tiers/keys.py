"""Keys of cached pages, by which other processes identify the pages.

A key determines all tokens up to the end of its page: it is the hash of the previous page's key and
of the page's tokens. The first key is made from the fingerprint, which stands for all inputs that
determine the bits of KV, and from the namespace. So equal keys mean equal bytes of KV. The hash
resists deliberate collisions, because a key decides which requests may read a page.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from ...radix_cache import RadixTree
from ...radix_cache.audit import Steps
from ...radix_cache.node import ITEM_SIZE, CacheObserver, Cause, Node

KEY_BYTES, TAG_BYTES = 32, 8  # a key ends with the tag, which names its namespace
NO_KEY = bytes(KEY_BYTES)


def root_key(fingerprint: bytes, namespace: str | None) -> bytes:
    """Return the key from which the key of a namespace's first page is made, 32 bytes.

    A mark distinguishes the default namespace from an empty salt. The salt is hashed first, because
    it may be long.
    """
    mark = b"\0" if namespace is None else b"\1"
    salt = hashlib.blake2b((namespace or "").encode(), digest_size=KEY_BYTES).digest()
    return hashlib.blake2b(fingerprint + mark + salt, digest_size=KEY_BYTES).digest()


def chain_keys(before: bytes, tokens: array[int], page_size: int) -> Iterator[bytes]:
    """Yield the keys of the whole pages of ``tokens``, which follow the page with key ``before``.

    Each key takes about a microsecond.
    """
    data, size, tag = tokens.tobytes(), page_size * ITEM_SIZE, tag_of(before)
    for start in range(0, len(data) - size + 1, size):
        page = data[start : start + size]
        before = hashlib.blake2b(before + page, digest_size=KEY_BYTES - TAG_BYTES).digest() + tag
        yield before


def tag_of(key: bytes) -> bytes:
    """Return the last 8 bytes of a key, which all keys of a namespace have in common."""
    return key[-TAG_BYTES:]


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Consecutive pages of a text that were published to the tree."""

    namespace: str | None
    page_ids: array[int]  # [num_pages]
    keys: list[bytes]  # [num_pages]
    before: bytes | None  # key of the page before these; None at the beginning of a text
    tokens: array[int]  # [num_pages * page_size]


class KeyObserver(Protocol):
    """Observer of the pages that join the tree or leave it, with their keys."""

    def stored(self, pages: StoredPages) -> None:
        """Note pages that have just joined the tree."""

    def dropped(self, namespace: str | None, keys: list[bytes], cause: Cause) -> None:
        """Note pages that leave the tree, by their keys."""


class PageKeys(CacheObserver):
    """Keys of all pages in a tree, by page id; a `CacheObserver`.

    ``counters[page_id]`` increases whenever the page leaves the tree. Cached pages never change, so
    a copy of a page is correct if the counter has the same value before and after the copying. Any
    thread may read ``counters``; only the tree's thread may use everything else.
    """

    def __init__(self, fingerprint: bytes, num_pages: int, page_size: int) -> None:
        self.page_size = page_size  # tokens in a page
        self.counters = array("Q", bytes(8 * num_pages))
        self._fingerprint = fingerprint
        self._keys = bytearray(KEY_BYTES * num_pages)
        self._observers: list[KeyObserver] = []

    def add_observer(self, observer: KeyObserver) -> None:
        """Pass every page that joins the tree or leaves it to ``observer`` from now on."""
        self._observers.append(observer)

    def key(self, page_id: int) -> bytes:
        """Return the key of a page; `NO_KEY` if the page is not cached. O(1)."""
        at = page_id * KEY_BYTES
        return bytes(self._keys[at : at + KEY_BYTES])

    def cached(self) -> Iterator[bytes]:
        """Yield the keys of all cached pages, in arbitrary order. O(pages of the pool)."""
        keys = map(self.key, range(len(self.counters)))
        return (key for key in keys if key != NO_KEY)

    def root(self, namespace: str | None) -> bytes:
        """Return the key from which the key of a namespace's first page is made."""
        return root_key(self._fingerprint, namespace)

    @override
    def stored(self, node: Node, first: int) -> None:
        before = self._key_before(node, first)
        tokens, page_ids = node.key[first * self.page_size :], node.page_ids[first:]
        keys = list(chain_keys(before or self.root(node.namespace), tokens, self.page_size))
        for page_id, key in zip(page_ids, keys, strict=True):
            self._set(page_id, key)
        for observer in self._observers:
            observer.stored(StoredPages(node.namespace, page_ids, keys, before, tokens))

    @override
    def dropped(self, node: Node, first: int, cause: Cause) -> None:
        page_ids = node.page_ids[first:]
        keys = [self.key(page_id) for page_id in page_ids]
        for page_id in page_ids:
            self.counters[page_id] += 1
            self._set(page_id, NO_KEY)
        for observer in self._observers:
            observer.dropped(node.namespace, keys, cause)

    def _set(self, page_id: int, key: bytes) -> None:
        at = page_id * KEY_BYTES
        self._keys[at : at + KEY_BYTES] = key

    def _key_before(self, node: Node, first: int) -> bytes | None:
        if first:
            return self.key(node.page_ids[first - 1])
        above = node.parent
        return self.key(above.page_ids[-1]) if above is not None and above.page_ids else None

    def checks(self, tree: RadixTree) -> Steps:
        """Assert that every cached page has the key of its tokens, and no other page has a key."""
        assert tree.page_size == self.page_size, "the tree has pages of another size"
        num_keys = 0
        for node in tree.nodes():
            before = self._key_before(node, 0) or self.root(node.namespace)
            expected = chain_keys(before, node.key, self.page_size)
            for page_id, key in zip(node.page_ids, expected, strict=True):
                assert self.key(page_id) == key, f"page {page_id} has the key of other tokens"
                num_keys += 1
                yield
        yield from self._check_count(num_keys)

    def _check_count(self, num_keys: int) -> Steps:
        num_known = 0
        for page_id in range(len(self.counters)):
            num_known += self.key(page_id) != NO_KEY
            yield
        assert num_known == num_keys, f"{num_known} pages have keys, {num_keys} are cached"

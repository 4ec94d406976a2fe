"""Observers of a cache know at any time which pages it holds, and of which tokens."""

from __future__ import annotations

import random
from array import array

import pytest

from foretoken.radix_cache import Node, PrefixCache
from foretoken.radix_cache.node import Cause

Prefix = tuple[str | None, bytes]


class Mirror:
    """Pages of the tree as its observer sees them: the tokens up to each page's end, by its id."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.prefixes: dict[int, Prefix] = {}
        self.causes: list[Cause] = []

    def stored(self, node: Node, first: int) -> None:
        for index in range(first, len(node.page_ids)):
            page_id = node.page_ids[index]
            assert page_id not in self.prefixes, "a page joined twice"
            before = self.before(node, index)
            page = node.key[index * self.page_size : (index + 1) * self.page_size]
            self.prefixes[page_id] = (node.namespace, before + page.tobytes())

    def before(self, node: Node, index: int) -> bytes:
        if index:
            return self.prefixes[node.page_ids[index - 1]][1]
        assert node.parent is not None
        return self.prefixes[node.parent.page_ids[-1]][1] if node.parent.page_ids else b""

    def dropped(self, node: Node, first: int, cause: Cause) -> None:
        self.causes.append(cause)
        for page_id in node.page_ids[first:]:
            del self.prefixes[page_id]


def pages_of(cache: PrefixCache) -> dict[int, Prefix]:
    """Pages that the tree itself holds."""
    found: dict[int, Prefix] = {}
    for node in cache.tree.nodes():
        before = array("q")
        for each in node.path()[:-1]:
            before += each.key
        for index, page_id in enumerate(node.page_ids):
            upto = node.key[: (index + 1) * cache.page_size]
            found[page_id] = (node.namespace, (before + upto).tobytes())
    return found


@pytest.mark.parametrize("page_size", [1, 2, 5])
def test_a_mirror_fed_by_events_alone_is_the_tree(page_size: int) -> None:
    rng = random.Random(page_size)
    cache, mirror = PrefixCache(12, page_size), Mirror(page_size)
    cache.tree.add_observer(mirror)
    for _ in range(3_000):
        tokens = array("q", rng.choices(range(2), k=rng.randrange(1, 9 * page_size)))
        namespace = rng.choice([None, "", "a"])
        lease = cache.acquire(tokens, namespace=namespace)
        assert cache.extend(lease, len(tokens))
        for upto in sorted(rng.choices(range(lease.num_cached_tokens, len(tokens) + 1), k=2)):
            cache.publish(lease, tokens, upto)
        cache.release(lease, tokens, len(tokens), keep=rng.random() < 0.8)
        if rng.random() < 0.02:
            cache.flush(*rng.choice([(), (None,), ("a", "")]))
        if rng.random() < 0.05 and len(tokens) >= page_size:
            cache.flush_prefix(tokens[:page_size], namespace=namespace)
        assert mirror.prefixes == pages_of(cache)
    assert set(mirror.causes) == {"evicted", "flushed"}

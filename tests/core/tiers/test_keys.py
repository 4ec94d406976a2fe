"""Keys of pages: equal for equal beginnings alone, and always those of what the tree holds."""

from __future__ import annotations

import random
from array import array

import pytest

from foretoken.core.tiers.keys import NO_KEY, PageKeys, StoredPages, chain_keys, root_key
from foretoken.radix_cache import PrefixCache
from foretoken.radix_cache.audit import run
from foretoken.radix_cache.node import Cause


class News:
    """Keys of cached pages as an observer of keys sees them."""

    def __init__(self) -> None:
        self.keys: dict[bytes, str | None] = {}
        self.stored_pages: list[StoredPages] = []

    def stored(self, pages: StoredPages) -> None:
        self.stored_pages.append(pages)
        self.keys.update((key, pages.namespace) for key in pages.keys)

    def dropped(self, namespace: str | None, keys: list[bytes], cause: Cause) -> None:
        del cause
        for key in keys:
            assert self.keys.pop(key) == namespace


def keyed(num_pages: int = 12, page_size: int = 2) -> tuple[PrefixCache, PageKeys]:
    cache, keys = PrefixCache(num_pages, page_size), PageKeys(b"fp", num_pages, page_size)
    cache.tree.add_observer(keys)
    return cache, keys


def serve(cache: PrefixCache, tokens: array[int], namespace: str | None = None) -> None:
    lease = cache.acquire(tokens, namespace=namespace)
    assert cache.extend(lease, len(tokens))
    cache.release(lease, tokens, len(tokens))


def seq(*tokens: int) -> array[int]:
    return array("q", tokens)


@pytest.mark.parametrize("page_size", [1, 3])
def test_keys_are_those_of_the_tree_whatever_happens(page_size: int) -> None:
    rng = random.Random(page_size)
    cache, keys = keyed(10, page_size)
    news = News()
    keys.add_observer(news)
    for _ in range(1_500):
        tokens = array("q", rng.choices(range(2), k=rng.randrange(1, 7 * page_size)))
        serve(cache, tokens, rng.choice([None, "", "a"]))
        if rng.random() < 0.05:
            cache.flush(*rng.choice([(), (None,), ("a",)]))
        run(keys.checks(cache.tree))
        assert len(news.keys) == cache.tree.num_pages
    cache.flush()
    assert news.keys == {}


def test_a_key_names_the_tokens_from_the_beginning() -> None:
    cache, keys = keyed()
    serve(cache, seq(1, 2, 3, 4))
    serve(cache, seq(5, 6, 3, 4))
    first, second = (cache.tree.match(seq(*t)).page_ids for t in ((1, 2, 3, 4), (5, 6, 3, 4)))
    assert keys.key(first[1]) != keys.key(second[1])
    chain = chain_keys(keys.root(None), seq(1, 2, 3, 4, 9), 2)
    assert list(chain) == [keys.key(each) for each in first]


def test_namespaces_and_fingerprints_share_no_key() -> None:
    roots = [
        root_key(b"one", None),
        root_key(b"one", ""),
        root_key(b"one", "a" * 64),
        root_key(b"one", "a" * 64 + "b"),
        root_key(b"two", None),
    ]
    assert len(set(roots)) == len(roots)
    assert len({next(chain_keys(root, seq(1, 2), 2)) for root in roots}) == len(roots)


def test_a_counter_grows_when_its_page_leaves_the_tree_and_only_then() -> None:
    cache, keys = keyed(2, 2)
    serve(cache, seq(1, 2, 3, 4))
    page_ids = cache.tree.match(seq(1, 2, 3, 4)).page_ids
    assert [keys.counters[each] for each in page_ids] == [0, 0]
    serve(cache, seq(1, 2, 7, 8))  # the second page makes room
    assert [keys.counters[each] for each in page_ids] == [0, 1]
    cache.flush()
    assert [keys.counters[each] for each in page_ids] == [1, 2]
    assert [keys.key(each) for each in page_ids] == [NO_KEY, NO_KEY]


def test_what_is_told_of_stored_pages_follows_on_what_was_told_before() -> None:
    cache, keys = keyed()
    news = News()
    keys.add_observer(news)
    serve(cache, seq(1, 2, 3, 4), "salt")
    serve(cache, seq(1, 2, 3, 4, 5, 6), "salt")
    one, two = news.stored_pages
    assert (one.namespace, one.before, one.tokens) == ("salt", None, seq(1, 2, 3, 4))
    assert (two.before, two.tokens, len(two.page_ids)) == (one.keys[-1], seq(5, 6), 1)


def test_the_audit_finds_a_wrong_and_a_stale_key() -> None:
    cache, keys = keyed()
    serve(cache, seq(1, 2, 3, 4))
    (page_id, _) = cache.tree.match(seq(1, 2, 3, 4)).page_ids
    right = keys.key(page_id)
    keys._set(page_id, b"x" * 32)
    with pytest.raises(AssertionError, match="the key of other tokens"):
        run(keys.checks(cache.tree))
    keys._set(page_id, right)
    keys._set(next(each for each in range(12) if keys.key(each) == NO_KEY), right)
    with pytest.raises(AssertionError, match="3 pages have keys, 2 are cached"):
        run(keys.checks(cache.tree))

"""Transfers: pages are held for a reader until it has them or its time is over."""

from __future__ import annotations

import random
from array import array

import pytest

from foretoken.radix_cache import HeldPages, PrefixCache
from foretoken.radix_cache.transfers import MAX_SECONDS, SECONDS, TransferLocks


def seq(num_tokens: int, first: int = 0) -> array[int]:
    return array("q", range(first, first + num_tokens))


def serve(cache: PrefixCache, tokens: array[int], namespace: str | None = None) -> None:
    """A request comes, computes all of its tokens, and goes."""
    lease = cache.acquire(tokens, namespace=namespace)
    assert cache.extend(lease, len(tokens))
    cache.release(lease, tokens, len(tokens))


def held(cache: PrefixCache, num_tokens: int, first: int = 0) -> HeldPages:
    tokens = seq(num_tokens, first)
    serve(cache, tokens)
    pages = cache.transfers.hold(tokens, num_tokens)
    assert pages is not None
    cache.check(())
    return pages


def test_held_pages_outlive_any_pressure_until_their_reader_is_done() -> None:
    cache = PrefixCache(16, 4)
    pages = held(cache, 32)
    assert len(pages.page_ids) == 8
    assert cache.transfers.words[pages.slot] == pages.nonce != 0
    lease = cache.acquire(array("q"))
    assert not cache.extend(lease, 9 * 4), "what is held does not yield"
    assert cache.extend(lease, 8 * 4)
    assert cache.flush() == 0
    assert cache.match_len(seq(33)) == 32
    assert cache.transfers.end(pages.name)
    assert cache.transfers.words[pages.slot] == 0
    assert cache.extend(lease, 16 * 4)
    cache.check([lease])
    assert not cache.transfers.end(pages.name), "the second note of a reader is ignored"
    assert cache.transfers.ended == {"done": 1, "expired": 0}


def test_a_transfer_ends_after_a_time_that_its_reader_can_renew() -> None:
    cache = PrefixCache(64, 4)
    cache.tick(100.0)
    first, second = held(cache, 32), held(cache, 32, 1000)
    cache.tick(100.0 + SECONDS / 2)
    cache.transfers.renew(second.name)
    cache.transfers.renew("unknown")
    cache.tick(100.0 + SECONDS)
    assert cache.transfers.words[first.slot] == 0 != cache.transfers.words[second.slot]
    cache.check(())
    cache.tick(100.0 + 1.5 * SECONDS)
    assert (len(cache.transfers), cache.transfers.num_pages) == (0, 0)
    assert cache.transfers.ended == {"done": 0, "expired": 2}
    cache.check(())


def test_a_reader_that_renews_for_ever_does_not_hold_pages_for_ever() -> None:
    cache = PrefixCache(64, 4)
    cache.tick(100.0)
    pages = held(cache, 32)
    while cache.transfers.words[pages.slot]:
        assert cache.transfers.now < 100.0 + MAX_SECONDS
        cache.transfers.renew(pages.name)
        cache.tick(cache.transfers.now + SECONDS / 2)
    assert cache.transfers.now == 100.0 + MAX_SECONDS
    assert cache.transfers.ended == {"done": 0, "expired": 1}


def test_nothing_is_held_that_is_not_cached_or_for_which_there_is_no_room() -> None:
    cache = PrefixCache(64, 4)
    assert cache.transfers.hold(seq(32), 32) is None
    serve(cache, seq(32), "salt")
    assert cache.transfers.hold(seq(32), 32) is None
    assert cache.transfers.hold(seq(3), 3, namespace="salt") is None
    for _ in range(6):
        assert cache.transfers.hold(seq(32), 32, namespace="salt") is not None
    assert cache.transfers.is_full
    assert cache.transfers.hold(seq(32), 32, namespace="salt") is None
    cache.check(())
    cache.transfers.close()
    assert (cache.transfers.num_pages, cache.flush()) == (0, 8)
    few = TransferLocks(cache.tree, max_pages=64, max_transfers=1)
    serve(cache, seq(32))
    assert few.hold(seq(32), 32) is not None
    assert few.is_full
    assert few.hold(seq(32), 32) is None


def test_an_audit_finds_a_transfer_that_is_not_locked_or_has_no_word() -> None:
    cache = PrefixCache(64, 4)
    pages = held(cache, 32)
    cache.transfers.words[pages.slot] += 1
    with pytest.raises(AssertionError, match="would reject held pages"):
        cache.check(())
    cache.transfers.words[pages.slot] -= 1
    cache.transfers.words[pages.slot - 1] = 7
    with pytest.raises(AssertionError, match="not held"):
        cache.check(())


def test_random_actors_leave_no_page_locked() -> None:
    rng, cache, names, now = random.Random(5), PrefixCache(64, 4), [], 0.0
    for _ in range(2000):
        match rng.randrange(6):
            case 0 | 1:
                serve(cache, seq(4 * rng.randrange(1, 9), 100 * rng.randrange(12)))
            case 2 | 3:
                tokens = seq(4 * rng.randrange(1, 9), 100 * rng.randrange(12))
                pages = cache.transfers.hold(tokens, len(tokens))
                names += [] if pages is None else [pages.name]
            case 4 if names:
                name = names.pop(rng.randrange(len(names)))
                cache.transfers.renew(name) if rng.random() < 0.3 else cache.transfers.end(name)
            case _:
                now += rng.random() * 4
                cache.tick(now)
        cache.check(())
    assert min(cache.transfers.ended.values()) > 20
    cache.transfers.close()
    assert cache.num_evictable_pages == cache.tree.num_pages

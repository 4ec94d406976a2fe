"""Pins: what they keep, for how long, and when they give way."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest

from foretoken.radix_cache import KVLease, PrefixCache, pins


def seq(num_tokens: int, first: int = 0) -> array[int]:
    return array("q", range(first, first + num_tokens))


def serve(cache: PrefixCache, tokens: array[int], namespace: str | None = None) -> None:
    """A request comes, computes all of its tokens, and goes."""
    lease = cache.acquire(tokens, namespace=namespace)
    assert cache.extend(lease, len(tokens))
    cache.release(lease, tokens, len(tokens))


def fill(cache: PrefixCache) -> None:
    """Push out whatever may be pushed out without pins giving way."""
    lease = cache.acquire(array("q"))
    room = cache.num_free_pages + cache.num_evictable_pages
    assert cache.extend(lease, room * cache.page_size)
    cache.release(lease, array("q"), 0)


def pinned(cache: PrefixCache, num_tokens: int, *, first: int = 0, **options) -> array[int]:
    """Tokens that were served and pinned."""
    tokens = seq(num_tokens, first)
    serve(cache, tokens, options.get("namespace"))
    options = {"ttl": 10.0, **options}
    assert cache.pin(tokens, num_tokens, **options) > 0
    cache.check([])
    return tokens


def test_a_pinned_prefix_survives_what_pushes_out_everything_else() -> None:
    cache = PrefixCache(8, 2)
    other = seq(4, 50)
    serve(cache, other)
    tokens = pinned(cache, 4)
    fill(cache)
    assert cache.match_len(seq(6)) == 4
    assert cache.match_len(seq(6, 50)) == 0
    assert cache.num_pinned_pages == 2
    assert len(tokens) == 4


def test_a_pin_decays_to_ordinary_cache_when_its_time_is_over() -> None:
    cache = PrefixCache(8, 2)
    cache.tick(100.0)
    pinned(cache, 4, ttl=10.0)
    cache.tick(109.9)
    assert cache.num_pinned_pages == 2
    cache.tick(110.0)
    assert cache.num_pinned_pages == 0
    assert cache.match_len(seq(6)) == 4
    fill(cache)
    assert cache.match_len(seq(6)) == 0
    cache.check([])


def test_a_hit_begins_the_time_of_a_pin_anew() -> None:
    cache = PrefixCache(8, 2)
    pinned(cache, 4, ttl=10.0)
    cache.tick(9.0)
    serve(cache, seq(5))
    cache.tick(18.0)
    assert cache.num_pinned_pages == 2
    serve(cache, seq(3))  # it reads less than the pin keeps
    cache.tick(19.0)
    assert cache.num_pinned_pages == 0


def test_pinning_again_prolongs_and_never_shortens() -> None:
    cache = PrefixCache(8, 2)
    tokens = pinned(cache, 4, ttl=100.0)
    cache.pin(tokens, 4, ttl=1.0)
    assert len(cache.pins) == 1
    cache.tick(99.0)
    assert cache.num_pinned_pages == 2


def test_pinning_again_for_longer_lasts_as_long() -> None:
    cache = PrefixCache(8, 2)
    tokens = pinned(cache, 4, ttl=1.0)
    cache.pin(tokens, 4, ttl=100.0)
    cache.tick(99.0)
    assert cache.num_pinned_pages == 2


def test_only_whole_cached_pages_are_pinned() -> None:
    cache = PrefixCache(16, 4)
    serve(cache, seq(11))
    assert cache.pin(seq(11), 7, ttl=1.0) == 4
    assert cache.pin(seq(11), 3, ttl=1.0) == 0
    assert cache.pin(seq(20), 20, ttl=1.0) == 8
    cache.check([])


def test_pages_under_two_pins_count_once() -> None:
    cache = PrefixCache(32, 2)
    tokens = pinned(cache, 8)
    cache.pin(tokens, 4, ttl=5.0)
    assert len(cache.pins) == 2
    assert cache.num_pinned_pages == 4
    assert cache.pins.num_pages(None) == 4
    cache.tick(6.0)
    assert cache.num_pinned_pages == 4
    cache.check([])


def test_a_namespace_beyond_its_quota_loses_its_own_oldest_pin() -> None:
    cache = PrefixCache(32, 1)  # a quota of 8 pages
    pinned(cache, 4, namespace="other", first=500)
    pinned(cache, 4, first=0)
    pinned(cache, 4, first=100)
    serve(cache, seq(5))  # makes the first the younger one
    pinned(cache, 2, first=200)
    assert [p.lock.node.key[0] for p in cache.pins.of(None)] == [0, 200]
    assert cache.pins.num_pages("other") == 4


def test_a_pin_under_a_longer_one_is_not_given_up_in_vain() -> None:
    cache = PrefixCache(32, 1)  # a quota of 8 pages
    tokens = pinned(cache, 6)
    cache.pin(tokens, 2, ttl=10.0)
    serve(cache, seq(7))  # makes the longer one the younger
    pinned(cache, 4, first=100)
    assert [p.lock.num_pages for p in cache.pins.of(None)] == [2, 4]


def test_a_pin_longer_than_the_quota_keeps_the_front() -> None:
    cache = PrefixCache(16, 1)
    tokens = seq(10)
    serve(cache, tokens)
    assert cache.pin(tokens, 10, ttl=1.0) == 4
    fill(cache)
    assert cache.match_len(seq(11)) == 4


def test_all_together_pin_at_most_half_and_the_biggest_namespace_gives_way() -> None:
    cache = PrefixCache(32, 1)  # 8 each, 16 together
    for first in (0, 100):
        pinned(cache, 4, namespace="big", first=first)
    pinned(cache, 6, namespace="middle", first=200)
    pinned(cache, 3, namespace="late", first=300)
    assert cache.num_pinned_pages <= 16
    assert cache.pins.num_pages("big") == 4
    assert cache.pins.num_pages("middle") == 6
    assert cache.pins.num_pages("late") == 3


def test_without_a_quota_nothing_is_pinned() -> None:
    cache = PrefixCache(8, 1, pin_quota=0.0)
    serve(cache, seq(4))
    assert cache.pin(seq(4), 4, ttl=9.0) == 0
    cache.check([])


@pytest.mark.parametrize("quota", [0.25, 0.5, 1.0])
def test_a_request_of_the_whole_pool_is_served_whatever_is_pinned(quota: float) -> None:
    cache = PrefixCache(32, 2, pin_quota=quota)
    for index in range(8):
        namespace = f"tenant {index}"
        pinned(cache, 16, namespace=namespace, first=1000 * index, ttl=1e6)
    big = seq(63, 50_000)
    assert cache.usage == 0
    assert cache.would_fit(big, 64)
    lease = cache.acquire(big)
    assert cache.extend(lease, 64)
    assert cache.num_pinned_pages == 0
    cache.check([lease])
    cache.release(lease, big, 63)
    cache.check([])


def test_the_least_recently_used_pin_gives_way_first_and_no_more_than_needed() -> None:
    cache = PrefixCache(16, 1, pin_quota=1.0)
    for first in (0, 100, 200):
        pinned(cache, 4, first=first)
    serve(cache, seq(5))
    lease = cache.acquire(array("q"))
    assert cache.extend(lease, 6)
    assert [p.lock.node.key[0] for p in cache.pins.of(None)] == [200, 0]
    cache.check([lease])


def test_pins_of_pages_that_a_request_reads_do_not_give_way_in_vain() -> None:
    cache = PrefixCache(12, 1, pin_quota=1.0)
    pinned(cache, 4, first=0)
    reader = cache.acquire(seq(5))
    other = seq(4, 100)
    later = cache.acquire(other)
    assert cache.extend(later, 4)
    cache.release(later, other, 4)
    cache.pin(other, 4, ttl=10.0)
    lease = cache.acquire(array("q"))
    assert not cache.would_fit(seq(9, 900), 9)
    assert cache.extend(lease, 8)
    assert [p.lock.node.key[0] for p in cache.pins.of(None)] == [0]
    assert not cache.extend(lease, 9)
    cache.check([reader, lease])


def test_a_request_that_fits_only_over_its_own_pins_fits_by_reading_them() -> None:
    cache = PrefixCache(8, 1, pin_quota=1.0)
    tokens = pinned(cache, 7)
    longer = tokens + seq(1, 70)
    assert cache.would_fit(longer, 8)
    lease = cache.acquire(longer)
    assert lease.num_cached_tokens == 7
    assert cache.extend(lease, 8)
    assert cache.usage == 1


def test_flushing_a_namespace_takes_its_pins() -> None:
    cache = PrefixCache(32, 1)
    pinned(cache, 4, namespace="a")
    pinned(cache, 4, namespace="b")
    assert cache.flush("a") == 4
    assert cache.num_pinned_pages == 4
    assert cache.flush() == 4
    assert cache.num_free_pages == 32
    cache.check([])


def test_flushing_a_prefix_takes_what_begins_with_it_and_its_pins_and_nothing_else() -> None:
    cache = PrefixCache(64, 2)
    prompts = [seq(4) + seq(4, 10), seq(4) + seq(6, 20), seq(2) + seq(4, 30), seq(4, 40)]
    for prompt in prompts:
        serve(cache, prompt)
        cache.pin(prompt, len(prompt), ttl=9.0)
    assert cache.flush_prefix(seq(4)) == 1 + 2 + 3  # the page of 2, 3 and what follows it
    left = [cache.match_len(prompt + seq(1, 99)) for prompt in prompts]
    assert left == [2, 2, 6, 4]
    assert len(cache.pins) == 2
    cache.check([])


def test_flushing_a_prefix_leaves_what_a_request_borrows() -> None:
    cache = PrefixCache(64, 2)
    serve(cache, seq(8))
    serve(cache, seq(4) + seq(4, 50))
    lease = cache.acquire(seq(9))
    assert cache.flush_prefix(seq(4)) == 2
    cache.check([lease])


def test_flushing_a_prefix_that_is_not_cached_does_nothing() -> None:
    cache = PrefixCache(16, 2)
    serve(cache, seq(4))
    assert cache.flush_prefix(seq(6)) == 0
    assert cache.flush_prefix(seq(4), namespace="other") == 0
    with pytest.raises(ValueError, match="shorter than a page"):
        cache.flush_prefix(seq(1))
    assert cache.match_len(seq(5)) == 4


def test_what_was_lost_is_known_by_when_and_why() -> None:
    cache = PrefixCache(8, 2)
    serve(cache, seq(8))
    cache.tick(5.0)
    lease = cache.acquire(array("q"))
    assert cache.extend(lease, 12)  # pushes the last two pages out
    cache.release(lease, array("q"), 0)
    lease = cache.acquire(seq(9))
    assert lease.num_cached_tokens == 4
    assert lease.eviction is not None
    assert (lease.eviction.cause, lease.eviction.time) == ("evicted", 5.0)
    cache.release(lease, seq(9), 4)
    cache.tick(7.0)
    cache.flush()
    lease = cache.acquire(seq(9))
    assert lease.eviction is not None
    assert (lease.eviction.cause, lease.eviction.time) == ("flushed", 7.0)
    assert cache.acquire(seq(9), namespace="other").eviction is None
    assert cache.acquire(seq(9, 70)).eviction is None


def test_what_was_lost_below_a_fork_is_known_by_what_came_before_it() -> None:
    cache = PrefixCache(32, 2)
    for end in (10, 20):
        serve(cache, seq(4) + seq(4, end))
    serve(cache, seq(4, 50))
    cache.flush_prefix(seq(4) + seq(2, 10))
    assert cache.acquire(seq(4) + seq(5, 10)).eviction is not None
    assert cache.acquire(seq(4, 50) + seq(5, 10)).eviction is None


def test_no_more_losses_are_remembered_than_the_log_holds() -> None:
    cache = PrefixCache(2, 1)
    for first in range(10_000):
        serve(cache, seq(1, first))
    assert 5_000 < len(cache.eviction_log) < 9_000


def num_steps(act: Callable[[], object]) -> int:
    """Instructions of the pins' own code that run meanwhile."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal count
        if frame.f_code.co_filename != pins.__file__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 must know before that opcodes are traced
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_pin_gives_way_in_as_many_steps_however_many_there_are(is_asked, is_packed) -> None:
    steps = []
    for num_pins in (16, 256):
        cache = PrefixCache(2 * num_pins, 1)
        keep = partial(cache.pin, ttl=9.0) if is_asked else partial(cache.pin_session, session="s")
        for number in range(num_pins):
            serve(cache, seq(1), f"{number}")
            keep(seq(1), 1, namespace=f"{number}")
        assert len(cache.pins) == num_pins
        serve(cache, seq(1), "new")
        if is_packed:
            lease = cache.acquire(array("q"))
            steps.append(num_steps(partial(cache.extend, lease, num_pins + 1)))
            assert len(cache.pins) == num_pins - 1
        else:
            steps.append(num_steps(partial(keep, seq(1), 1, namespace="new")))
            assert len(cache.pins) == num_pins
            assert not cache.pins.of("0")
    assert steps[0] == steps[1] > 0


class Tenants:
    """Random requests of several tenants, pins and time, on a small pool; one seed drives all."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.page_size = self.random.choice([1, 2, 4])
        quota = self.random.choice([0.1, 0.25, 0.6, 1.0])
        ttl = self.random.choice([0.5, 300.0])
        self.cache = PrefixCache(
            self.random.randrange(8, 40), self.page_size, pin_quota=quota, session_ttl=ttl
        )
        self.leases: list[tuple[KVLease, array[int]]] = []
        self.now = 0.0
        self.most = 0

    def turn(self) -> None:
        rng, cache = self.random, self.cache
        rng.choice([self.serve, self.serve, self.borrow, self.leave, self.wait, self.flush])()
        self.most = max(self.most, cache.num_pinned_pages)
        cache.check([lease for lease, _ in self.leases])

    def draw(self) -> tuple[array[int], str | None]:
        length = self.random.randrange(1, 9 * self.page_size)
        tokens = array("q", self.random.choices(range(2), k=length))
        return tokens, self.random.choice([None, "a", "b"])

    def serve(self) -> None:
        """Served if `would_fit` says so, and then pinned now and then."""
        tokens, namespace = self.draw()
        fits = self.cache.would_fit(tokens, len(tokens), namespace=namespace)
        lease = self.cache.acquire(tokens, namespace=namespace)
        assert self.cache.extend(lease, len(tokens)) == fits
        num_computed = len(tokens) if fits else lease.num_cached_tokens
        self.cache.release(lease, tokens, num_computed)
        if self.random.random() < 0.7:
            ttl = self.random.uniform(0.1, 9)
            self.cache.pin(tokens, self.random.randrange(1, 40), ttl=ttl, namespace=namespace)
        if self.random.random() < 0.7:
            session = self.random.choice("xyz")
            began = self.now - self.random.random()
            self.cache.pin_session(
                tokens, num_computed, session=session, namespace=namespace, began=began
            )
            if self.random.random() < 0.8:
                self.cache.expect(session, self.random.choice("12"), namespace=namespace)
        if self.random.random() < 0.1:
            self.cache.end_session(self.random.choice("xyz"))

    def borrow(self) -> None:
        tokens, namespace = self.draw()
        lease = self.cache.acquire(tokens, namespace=namespace)
        if self.cache.extend(lease, len(tokens)):
            self.cache.publish(lease, tokens, len(tokens))
        self.leases.append((lease, tokens))

    def leave(self) -> None:
        if self.leases:
            lease, tokens = self.leases.pop(self.random.randrange(len(self.leases)))
            num_computed = min(len(tokens), lease.num_shared_pages * self.page_size)
            self.cache.release(lease, tokens, num_computed, keep=self.random.random() < 0.8)

    def wait(self) -> None:
        self.now += self.random.expovariate(1)
        self.cache.tick(self.now)

    def flush(self) -> None:
        tokens, namespace = self.draw()
        if self.random.random() < 0.2:
            self.cache.flush(namespace)
        elif len(tokens) >= self.page_size:
            self.cache.flush_prefix(tokens, namespace=namespace)

    def fill_the_pool(self) -> None:
        """With every lease gone, whatever is pinned, one request may have all of it."""
        while self.leases:
            self.leave()
        num_tokens = self.cache.num_total_pages * self.page_size
        lease = self.cache.acquire(array("q"))
        assert self.cache.extend(lease, num_tokens)
        self.cache.check([lease])
        assert not self.cache.pins
        self.cache.release(lease, array("q"), 0)
        assert self.cache.num_free_pages == self.cache.num_total_pages


def test_random_tenants_lose_no_page_and_never_lock_the_pool() -> None:
    most = 0
    for seed in range(150):
        tenants = Tenants(seed)
        for _ in range(60):
            tenants.turn()
        tenants.fill_the_pool()
        most = max(most, tenants.most)
    assert most > 10

"""Random verbs in random order, against a cache too naive to be wrong: see naive_cache.py.

Whatever the tree splits, grows, trims, counts or indexes must not show.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from foretoken.radix_cache import PrefixCache
from support.naive_cache import Borrower, NaiveCache, Prefix, nth, prefix_of

pytestmark = pytest.mark.slow

TOKENS = st.lists(st.integers(0, 2), max_size=14)
NAMES = [None, "a", "b"]
NAMESPACES = st.sampled_from(NAMES)


class CacheMachine(RuleBasedStateMachine):
    """Every verb, on a pool so small that eviction is the rule."""

    borrowers: Bundle[Borrower] = Bundle("borrowers")

    @initialize(
        num_pages=st.integers(12, 40),
        page_size=st.integers(1, 4),
        quota=st.sampled_from([1.0, 0.5, 0.25, 0.01]),
        pin_quota=st.sampled_from([0.0, 0.25, 0.5]),
    )
    def start(self, num_pages: int, page_size: int, quota: float, pin_quota: float) -> None:
        self.cache = PrefixCache(num_pages, page_size, cache_quota=quota, pin_quota=pin_quota)
        self.cache.tree.owned.idle_after = math.inf  # the oracle does not know of idle namespaces
        most = None if quota == 1.0 else max(1, int(num_pages * quota))
        self.oracle = NaiveCache(page_size, set(range(num_pages)), most)

    @rule(
        target=borrowers,
        tokens=TOKENS,
        namespace=NAMESPACES,
        limit=st.none() | st.integers(0, 14),
    )
    def acquire(self, tokens: list[int], namespace: str | None, limit: int | None) -> Borrower:
        bound = min(len(tokens) - 1, len(tokens) if limit is None else limit)
        shared = self.oracle.match(namespace, tokens[: max(bound, 0)])
        ids = array("q", tokens)
        num_cached = self.cache.match_len(ids, namespace=namespace, limit=limit)
        foreseen = {
            upto: self.cache.would_fit(ids, upto, namespace=namespace)
            for upto in range(num_cached, num_cached + 60, 7)
            if limit is None
        }
        lease = self.cache.acquire(ids, namespace=namespace, limit=limit)
        assert num_cached == lease.num_cached_tokens == len(shared) * self.oracle.page_size
        self.oracle.hit(shared)
        self.oracle.live.append(borrower := Borrower(lease, tokens, shared))
        for upto, fits in foreseen.items():
            needed = -(-upto // self.oracle.page_size) - len(shared)
            assert fits == (needed <= len(self.oracle.free) + len(self.oracle.idle()))
        return borrower

    @rule(borrower=borrowers, more=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def decode(self, borrower: Borrower, more: list[int]) -> None:
        borrower.tokens = borrower.tokens + more

    @rule(borrower=borrowers, beyond=st.integers(-3, 5), evict=st.booleans())
    def extend(self, borrower: Borrower, beyond: int, evict: bool) -> None:
        oracle, lease = self.oracle, borrower.lease
        upto = len(borrower.tokens) + beyond
        held = len(borrower.shared) + len(borrower.private)
        needed = max(-(-upto // oracle.page_size) - held, 0)
        available = len(oracle.free) + (len(oracle.idle()) if evict else 0)
        fits = needed <= available
        assert self.cache.extend(lease, upto, evict=evict) == fits
        if not fits:
            return
        for end in self.lost_pins():
            lacking = needed - len(oracle.free) - len(oracle.evictable())
            assert lacking > 0, "a pin gave way in vain"
            oracle.unpin(end)
        oracle.evict(needed - len(oracle.free))
        taken = lease.page_ids[held:].tolist()
        assert len(taken) == needed
        assert oracle.free.issuperset(taken), "handed out a page that another owns"
        assert set(self.cache.take_newly_allocated_pages()) == set(taken)
        oracle.free.difference_update(taken)
        borrower.private += taken

    @rule(borrower=borrowers, beyond=st.integers(-3, 5))
    def shrink(self, borrower: Borrower, beyond: int) -> None:
        upto = len(borrower.tokens) + beyond
        self.cache.shrink(borrower.lease, upto)
        keep = max(0, -(-upto // self.oracle.page_size) - len(borrower.shared))
        self.oracle.free.update(borrower.private[keep:])
        del borrower.private[keep:]

    @rule(tokens=st.lists(st.integers(0, 2), min_size=4, max_size=14), namespace=NAMESPACES)
    def serve(self, tokens: list[int], namespace: str | None) -> None:
        borrower = self.acquire(tokens, namespace, None)
        self.extend(borrower, 0, evict=True)
        self.release(borrower, 1.0, keep=True)

    @rule(which=st.integers(0, 99), more=TOKENS, ttl=st.integers(1, 3), most=st.integers(1, 14))
    def pin(self, which: int, more: list[int], ttl: int, most: int) -> None:
        cache, oracle = self.cache, self.oracle
        namespace, cached = nth(oracle.pages, which) if oracle.pages else (None, ())
        tokens = [*cached, *more]
        num_pinned = cache.pin(array("q", tokens), most, ttl=float(ttl), namespace=namespace)
        limit = min(most, cache.pins.quota * oracle.page_size)
        found = oracle.match(namespace, tokens[:limit])
        assert num_pinned == len(found) * oracle.page_size
        if found:
            oracle.pin(found, float(ttl))
        for end in self.lost_pins():
            assert end != found[-1], "the newest pin gave way"
            quotas = cache.pins.quota, cache.pins.total_quota
            assert oracle.pins_too_much(end[0], *quotas), "a pin gave way and need not have"
            oracle.unpin(end)

    @rule(seconds=st.integers(0, 2))
    def tick(self, seconds: int) -> None:
        self.oracle.tick(seconds)
        self.cache.tick(self.oracle.now)

    def lost_pins(self) -> list[Prefix]:
        """Pins that the cache has no more, the oldest first."""
        left = {prefix_of(lock) for lock in self.cache.pins.locks()}
        return [end for end in self.oracle.pins if end not in left]

    @rule(which=st.integers(0, 99), more=st.lists(st.integers(0, 2), max_size=2))
    def flush_prefix(self, which: int, more: list[int]) -> None:
        oracle = self.oracle
        if not oracle.pages:
            return
        namespace, cached = nth(oracle.pages, which)
        tokens = [*cached, *more]
        *above, top = oracle.prefixes(namespace, tokens)
        below = [p for p in oracle.pages if p[0] == namespace and p[1][: len(top[1])] == top[1]]
        freed = self.cache.flush_prefix(array("q", tokens), namespace=namespace)
        oracle.unpin(*[end for end in oracle.pins if end in below])
        assert freed == oracle.flush([*above, *below] if below else [])

    @rule(borrower=borrowers, share=st.floats(0, 1))
    def publish(self, borrower: Borrower, share: float) -> None:
        num_computed = self.num_computed(borrower, share)
        self.cache.publish(borrower.lease, array("q", borrower.tokens), num_computed)
        self.oracle.publish(borrower, num_computed)

    @rule(borrower=consumes(borrowers), share=st.floats(0, 1), keep=st.booleans())
    def release(self, borrower: Borrower, share: float, keep: bool) -> None:
        num_computed = self.num_computed(borrower, share)
        tokens = array("q", borrower.tokens)
        self.cache.release(borrower.lease, tokens, num_computed, keep=keep)
        if keep:
            self.oracle.publish(borrower, num_computed)
        self.oracle.release(borrower)

    @rule(namespace=NAMESPACES, everything=st.booleans())
    def flush(self, namespace: str | None, everything: bool) -> None:
        oracle = self.oracle
        oracle.unpin(*[p for p in oracle.pins if everything or p[0] == namespace])
        freed = self.cache.flush() if everything else self.cache.flush(namespace)
        assert freed == oracle.flush([p for p in oracle.pages if everything or p[0] == namespace])

    def num_computed(self, borrower: Borrower, share: float) -> int:
        held = (len(borrower.shared) + len(borrower.private)) * self.oracle.page_size
        return int(min(held, len(borrower.tokens)) * share)

    @invariant()
    def the_ledger_is_that_of_the_oracle(self) -> None:
        oracle, cache = self.oracle, self.cache
        cache.check(b.lease for b in oracle.live)
        assert cache.num_free_pages == len(oracle.free)
        assert cache.num_evictable_pages == len(oracle.evictable())
        assert cache.tree.num_pages == len(oracle.pages)
        assert cache.num_pinned_pages == len(oracle.pinned())
        assert [prefix_of(lock) for lock in cache.pins.locks()] == list(oracle.pins)
        times = {prefix_of(p.lock): p.until for name in NAMES for p in cache.pins.of(name)}
        assert times == {end: pin.until for end, pin in oracle.pins.items()}
        assert cache.tree.owned.num_pages == Counter(name for name, _ in oracle.pages)
        assert cache.tree.owned.over_quota() == oracle.beyond()
        for borrower in oracle.live:
            table = [oracle.pages[prefix] for prefix in borrower.shared] + borrower.private
            assert borrower.lease.page_ids.tolist() == table
            assert borrower.lease.num_shared_pages == len(borrower.shared)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    database=None,
)

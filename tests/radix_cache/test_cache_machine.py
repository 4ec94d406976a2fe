"""Random verbs in random order, against a cache too naive to be wrong.

The oracle knows no nodes: it keeps one entry per cached page, under the whole token prefix, and
evicts page by page, by quota and recency. Whatever the tree splits, grows, trims, counts or
indexes must not show.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile

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

from foretoken.radix_cache import KVLease, PrefixCache

Prefix = tuple[str | None, tuple[int, ...]]  # namespace, tokens up to the end of the page


@dataclass(eq=False)
class Borrower:
    lease: KVLease
    tokens: list[int]
    shared: list[Prefix] = field(default_factory=list)  # pages lent to it
    private: list[int] = field(default_factory=list)  # page ids of its own


@dataclass(eq=False)
class NaiveCache:
    """Pages by prefix; O(everything) at every turn."""

    page_size: int
    free: set[int]
    quota: int | None  # pages of one namespace beyond which they go first
    pages: dict[Prefix, int] = field(default_factory=dict)
    used: dict[Prefix, int] = field(default_factory=dict)
    live: list[Borrower] = field(default_factory=list)
    clock: int = 0

    def prefixes(self, namespace: str | None, tokens: list[int]) -> list[Prefix]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def match(self, namespace: str | None, tokens: list[int]) -> list[Prefix]:
        return list(takewhile(self.pages.__contains__, self.prefixes(namespace, tokens)))

    def is_last(self, prefix: Prefix) -> bool:
        namespace, tokens = prefix
        end = len(tokens)
        return not any(
            ns == namespace and t[:end] == tokens and len(t) > end for ns, t in self.pages
        )

    def evictable(self) -> set[Prefix]:
        return set(self.pages).difference(*(b.shared for b in self.live))

    def evict(self, num_pages: int) -> None:
        for _ in range(num_pages):
            last = [p for p in self.evictable() if self.is_last(p)]
            beyond = self.beyond()
            first = [p for p in last if p[0] in beyond] or last
            self.drop(min(first, key=self.used.__getitem__))

    def beyond(self) -> set[str | None]:
        owned = Counter(namespace for namespace, _ in self.pages)
        if self.quota is None or len(owned) == 1:
            return set()
        return {name for name, count in owned.items() if count > self.quota}

    def drop(self, prefix: Prefix) -> None:
        self.free.add(self.pages.pop(prefix))

    def publish(self, borrower: Borrower, num_computed: int) -> None:
        namespace = borrower.lease.namespace
        for prefix in self.prefixes(namespace, borrower.tokens[:num_computed]):
            if prefix in borrower.shared:
                continue
            own = borrower.private.pop(0)
            if prefix in self.pages:
                self.free.add(own)
            self.pages.setdefault(prefix, own)
            borrower.shared.append(prefix)

    def release(self, borrower: Borrower) -> None:
        self.clock += 1
        self.used.update(dict.fromkeys(borrower.shared, self.clock))
        self.free.update(borrower.private)
        self.live.remove(borrower)


TOKENS = st.lists(st.integers(0, 2), max_size=14)
NAMESPACES = st.sampled_from([None, "a", "b"])


class CacheMachine(RuleBasedStateMachine):
    """Every verb, on a pool so small that eviction is the rule."""

    borrowers: Bundle[Borrower] = Bundle("borrowers")

    @initialize(
        num_pages=st.integers(12, 40),
        page_size=st.integers(1, 4),
        quota=st.sampled_from([1.0, 0.5, 0.25, 0.01]),
    )
    def start(self, num_pages: int, page_size: int, quota: float) -> None:
        self.cache = PrefixCache(num_pages, page_size, cache_quota=quota)
        most = None if quota == 1.0 else max(1, int(num_pages * quota))
        self.oracle = NaiveCache(page_size, set(range(num_pages)), most)

    @rule(
        target=borrowers,
        tokens=TOKENS,
        namespace=NAMESPACES,
        limit=st.none() | st.integers(0, 14),
        priority=st.integers(-1, 1),
    )
    def acquire(
        self, tokens: list[int], namespace: str | None, limit: int | None, priority: int
    ) -> Borrower:
        bound = min(len(tokens) - 1, len(tokens) if limit is None else limit)
        shared = self.oracle.match(namespace, tokens[: max(bound, 0)])
        ids = array("q", tokens)
        num_cached = self.cache.match_len(ids, namespace=namespace, limit=limit)
        foreseen = {
            upto: self.cache.would_fit(ids, upto, namespace=namespace)
            for upto in range(num_cached, num_cached + 60, 7)
            if limit is None
        }
        lease = self.cache.acquire(ids, namespace=namespace, limit=limit, priority=priority)
        assert num_cached == lease.num_cached_tokens == len(shared) * self.oracle.page_size
        self.oracle.live.append(borrower := Borrower(lease, tokens, shared))
        for upto, fits in foreseen.items():
            needed = -(-upto // self.oracle.page_size) - len(shared)
            assert fits == (needed <= len(self.oracle.free) + len(self.oracle.evictable()))
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
        available = len(oracle.free) + (len(oracle.evictable()) if evict else 0)
        fits = needed <= available
        assert self.cache.extend(lease, upto, evict=evict) == fits
        if not fits:
            return
        oracle.evict(needed - len(oracle.free))
        taken = lease.page_ids[held:].tolist()
        assert len(taken) == needed
        assert oracle.free.issuperset(taken), "handed out a page that another owns"
        assert set(self.cache.take_fresh_pages()) == set(taken)
        oracle.free.difference_update(taken)
        borrower.private += taken

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
        gone = [p for p in self.oracle.evictable() if everything or p[0] == namespace]
        freed = self.cache.flush() if everything else self.cache.flush(namespace)
        assert freed == len(gone)
        for prefix in gone:
            self.oracle.drop(prefix)

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
        assert cache.tree.owned.num_pages == Counter(name for name, _ in oracle.pages)
        assert cache.tree.owned.beyond() == oracle.beyond()
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

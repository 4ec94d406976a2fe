"""A crowd of requests shakes the cache, and every page they read must hold what it claims.

A fake model "computes" a position by writing a hash of the namespace and of the whole token prefix
into its page. Every step each request checks all it is about to read: I7, a page's content is
the KV of exactly the tokens on its path. A second pool of pages, like a draft model's, lags behind
and relies on `take_newly_allocated_pages` alone.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest

from foretoken.radix_cache import KVLease, PrefixCache

NAN = "NaN"
VOCABULARY = 3
CHUNK = 9  # tokens
MAX_DRAFT = 5  # tokens
Pool = dict[tuple[int, int], object]  # (page id, slot in the page) -> hash of the prefix


@dataclass(eq=False)
class Actor:
    """A request: tokens and one cursor."""

    namespace: str | None
    tokens: array[int]
    goal: int  # tokens at which it ends
    publishes: bool  # at every chunk, not only at the end
    lease: KVLease | None = None
    num_computed: int = 0
    hashes: list[int] = field(default_factory=list)

    def expected(self, tokens: array[int]) -> list[int]:
        """Content of each position of ``tokens``, which begin as this actor's own do."""
        hashes = self.hashes if tokens is self.tokens else self.hashes.copy()
        for token in tokens[len(hashes) :]:
            hashes.append(hash((hashes[-1] if hashes else self.namespace, token)))
        return hashes


class Crowd:
    """Scheduler, model and clients in one, all driven by one seed."""

    def __init__(self, seed: int, page_size: int) -> None:
        self.random = random.Random(seed)
        self.page_size = page_size
        num_pages = self.random.randrange(12, 41) * 4 // max(page_size, 4)  # tight at 16 as well
        self.cache = PrefixCache(num_pages, page_size)
        self.longest = min(self.cache.num_total_pages * page_size - MAX_DRAFT, 120)
        self.prompts = [self.draw(self.random.randrange(1, self.longest // 2)) for _ in range(4)]
        self.kv: Pool = {}
        self.draft_kv: Pool = {}
        self.waiting: list[Actor] = []
        self.running: list[Actor] = []
        self.seen: set[str] = set()  # which events happened at all

    def draw(self, num_tokens: int) -> array[int]:
        return array("q", self.random.choices(range(VOCABULARY), k=num_tokens))

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def arrive(self) -> None:
        prompt = self.random.choice(self.prompts)
        tokens = prompt[: self.random.randrange(1, len(prompt) + 1)] + self.draw(2)
        goal = min(len(tokens) + self.random.randrange(1, 20), self.longest)
        namespace = self.random.choice([None, None, "a", "b"])
        self.waiting.append(Actor(namespace, tokens, goal, self.chance(0.7)))

    def admit(self) -> None:
        actor = self.waiting.pop(0)
        limit = self.random.choice([None, None, None, 5, len(actor.tokens) // 2])
        found = self.cache.match_len(actor.tokens, namespace=actor.namespace, limit=limit)
        actor.lease = self.cache.acquire(
            actor.tokens,
            namespace=actor.namespace,
            limit=limit,
        )
        assert actor.lease.num_cached_tokens == found
        actor.num_computed = found
        self.running.append(actor)
        self.seen.add("hit" if found else "miss")

    def leave(self, actor: Actor, event: str, *, keep: bool = True) -> None:
        assert actor.lease is not None
        self.cache.release(actor.lease, actor.tokens, actor.num_computed, keep=keep)
        self.running.remove(actor)
        actor.lease = None
        self.seen.add(event)

    def make_room(self, actor: Actor, upto: int) -> bool:
        """Preempts the newest until the chunk fits; False when that was the actor itself."""
        while True:
            assert actor.lease is not None
            if self.cache.extend(actor.lease, upto):
                return True
            victim = self.running[-1]
            self.leave(victim, "preempt")
            self.waiting.insert(0, victim)
            if victim is actor:
                return False

    def place(self, actor: Actor, position: int) -> tuple[int, int]:
        assert actor.lease is not None
        return actor.lease.page_ids[position // self.page_size], position % self.page_size

    def void_fresh_pages(self) -> None:
        for page_id in self.cache.take_newly_allocated_pages():
            for slot in range(self.page_size):
                self.draft_kv.pop((page_id, slot), None)

    def read(self, actor: Actor) -> None:
        expected = actor.expected(actor.tokens)
        for position in range(actor.num_computed):
            place = self.place(actor, position)
            assert self.kv[place] == expected[position], "read a page of other tokens"
            guess = self.draft_kv.get(place, expected[position])
            assert guess == expected[position], "a fresh page was not declared void"

    def step(self, actor: Actor) -> None:
        pending = len(actor.tokens) - actor.num_computed
        chunk = min(pending, self.random.randrange(1, CHUNK))
        if not self.make_room(actor, actor.num_computed + chunk):
            return
        self.void_fresh_pages()
        self.read(actor)
        if chunk == pending:
            self.speculate(actor, chunk)
        elif self.compute(actor, actor.tokens, chunk):
            self.commit(actor, chunk)

    def compute(self, actor: Actor, tokens: array[int], num_tokens: int) -> bool:
        """Writes the KV of a chunk of ``tokens``; sometimes the whole request fails over it."""
        expected = actor.expected(tokens)
        failed = self.chance(0.02)
        for position in range(actor.num_computed, actor.num_computed + num_tokens):
            place = self.place(actor, position)
            self.kv[place] = NAN if failed else expected[position]
            self.draft_kv.pop(place, None)
            if self.chance(0.5):
                self.draft_kv[place] = self.kv[place]
        if failed:
            self.leave(actor, "fail", keep=False)
        return not failed

    def speculate(self, actor: Actor, chunk: int) -> None:
        """Writes drafts beyond the cursor, accepts some, then one token of the target's own."""
        assert actor.lease is not None
        upto = len(actor.tokens) + self.random.randrange(MAX_DRAFT + 1)
        fits = self.cache.extend(actor.lease, upto, evict=False)
        self.void_fresh_pages()
        draft = self.draw(upto - len(actor.tokens) if fits else 0)
        if not self.compute(actor, actor.tokens + draft, chunk + len(draft)):
            return
        num_accepted = self.random.randrange(len(draft) + 1)
        self.seen.add("accept" if num_accepted else "reject")
        actor.tokens = actor.tokens + draft[:num_accepted] + self.draw(1)
        self.commit(actor, chunk + num_accepted)
        if len(actor.tokens) >= actor.goal:
            self.leave(actor, "finish")

    def commit(self, actor: Actor, num_tokens: int) -> None:
        assert actor.lease is not None
        actor.num_computed += num_tokens
        if actor.publishes:
            self.cache.publish(actor.lease, actor.tokens, actor.num_computed)

    def turn(self) -> None:
        if self.chance(0.6) and len(self.waiting) < 5:
            self.arrive()
        while self.waiting and len(self.running) < 5 and self.chance(0.8):
            self.admit()
        if self.chance(0.02):
            self.cache.flush(*self.random.choice([(), (None,), ("a",), ("a", "b")]))
        for actor in list(self.running):
            if actor.lease is None:
                continue
            if self.chance(0.02):
                self.leave(actor, "abort", keep=self.chance(0.5))
            else:
                self.step(actor)
            self.check()

    def check(self) -> None:
        self.cache.check(actor.lease for actor in self.running if actor.lease is not None)

    def drain(self) -> None:
        for actor in list(self.running):
            self.leave(actor, "abort")
        self.check()
        self.cache.flush()
        assert self.cache.num_free_pages == self.cache.num_total_pages
        self.check()


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16])
def test_a_crowd_of_requests_never_reads_a_foreign_page(page_size: int) -> None:
    seen: set[str] = set()
    for seed in range(60):
        crowd = Crowd(seed, page_size)
        for _ in range(70):
            crowd.turn()
        crowd.drain()
        seen |= crowd.seen
    assert seen == {"hit", "miss", "preempt", "finish", "fail", "abort", "accept", "reject"}

"""Accounting of KV pages: each page belongs to the free list, to one tree node, or to one lease."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

from . import audit
from .attached import NOTHING_PINNED, StateSlots
from .eviction import EvictionLog
from .node import Eviction, KVLease, Match, StateLease, StateRank
from .pins import PinnedPrefixes
from .transfers import POOL_SHARE, TransferLocks
from .tree import RadixTree

PIN_QUOTA = 0.25  # share of the pool, 0 to 1
SESSION_TTL = 300.0  # seconds
NO_QUOTA = 1.0
IDLE_AFTER = 3  # an unused namespace is idle once this many times the pool was evicted


class PrefixCache:
    """Lends KV pages to requests and keeps their computed KV for later requests.

    Four methods move pages: `acquire` borrows the longest cached prefix, `extend` adds private
    pages, `publish` gives finished pages to the tree, and `release` ends the lease. `pin` protects
    cached pages from eviction for a time, and `tick` sets the current time.

    ``pin_quota``: share of the pool that one namespace may pin; all namespaces together may pin
    twice as much. ``session_ttl``: seconds for which the last turn of a session stays pinned; 0 for
    no pins. ``cache_quota``: share of the pool above which the pages of a namespace are evicted
    before other pages. A namespace is idle if no request used it while three times the pool was
    evicted; its pages are evicted even earlier. Raises ValueError for invalid sizes.

    ``states``: slots for recurrent states, for a model that has them. Its requests can resume only
    at the end of a page whose state was kept, so `match_len`, `would_fit` and `acquire` find a
    prefix only up to the last such page.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        pin_quota: float = PIN_QUOTA,
        session_ttl: float = SESSION_TTL,
        cache_quota: float = NO_QUOTA,
        states: StateSlots | None = None,
    ) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}")
        self.page_size = page_size  # tokens
        self.session_ttl = session_ttl
        self.num_total_pages = num_pages
        self.num_queries = 0  # tokens looked up, over all acquires
        self.num_hits = 0  # looked-up tokens that were cached
        self.eviction_log = EvictionLog(page_size)
        quota = None if cache_quota >= 1 else max(1, int(num_pages * cache_quota))
        self.tree = RadixTree(  # owns the cached pages; the other objects only observe it
            page_size,
            quota=quota,
            idle_after=IDLE_AFTER * num_pages,
            on_dropped=self.eviction_log.dropped,
        )
        self.pins = PinnedPrefixes(
            self.tree,
            quota=int(num_pages * pin_quota),
            num_pages=num_pages,
            session_ttl=session_ttl,
        )
        self.transfers = TransferLocks(self.tree, max_pages=int(num_pages * POOL_SHARE))
        # the arguments of the last call of `_match`, and its match
        self._last_match: tuple[tuple[object, ...], Match] | None = None
        # free pages, as a stack: the last one is lent next
        self._free = array("q", range(num_pages - 1, -1, -1))
        self.states = states  # owns the state slots that no lease owns
        if states is not None:
            self.tree.add_observer(states)
        # Pages allocated since take_newly_allocated_pages; owned by their leases.
        self._newly_allocated = array("q")

    @property
    def num_free_pages(self) -> int:
        """Number of pages in the free list. O(1)."""
        return len(self._free)

    @property
    def num_evictable_pages(self) -> int:
        """Number of cached pages that no lock holds. O(1)."""
        return self.tree.num_pages - self.tree.num_locked_pages

    @property
    def num_pinned_pages(self) -> int:
        """Number of cached pages that a pin keeps, each counted once. O(1)."""
        return self.tree.num_pinned_pages

    @property
    def num_available_pages(self) -> int:
        """Number of pages that `extend` can use: free, evictable, or held by pins only. O(1)."""
        return self.num_free_pages + self.num_evictable_pages + self.tree.num_yielding_pages

    @property
    def usage(self) -> float:
        """Share of the pool that is in use, 0 to 1; available pages do not count."""
        return 1 - self.num_available_pages / self.num_total_pages

    def match_len(
        self, tokens: array[int], *, namespace: str | None = None, limit: int | None = None
    ) -> int:
        """Return how many cached tokens `acquire` would find. O(len + depth)."""
        return self._num_resumable(self._match(tokens, namespace, limit)) * self.page_size

    def _match(self, tokens: array[int], namespace: str | None, limit: int | None) -> Match:
        """Return the match of a request that is not admitted yet; it is only read.

        While the tree does not change, the last match is returned again: the first of the waiting
        requests is looked up in every step.
        """
        limit = _borrowable(len(tokens), limit)
        # ``tokens`` may grow in place, which only the limit shows.
        key = self.tree.version, namespace, limit, tokens
        if self._last_match is None or self._last_match[0] != key:
            match = self.tree.match(tokens, namespace=namespace, limit=limit)
            self._last_match = key, match
        return self._last_match[1]

    def _num_resumable(self, match: Match) -> int:
        """Return how many leading pages of a match a request can resume from."""
        page_ids = match.page_ids
        return len(page_ids) if self.states is None else self.states.num_resumable(page_ids)

    def _resumable(self, match: Match, tokens: array[int]) -> Match:
        """Return the part of a match of ``tokens`` that a request can resume from."""
        num_pages = self._num_resumable(match)
        if num_pages == len(match.page_ids):
            return match
        limit = num_pages * self.page_size
        return self.tree.match(tokens, namespace=match.namespace, limit=limit)

    def would_fit(
        self,
        tokens: array[int],
        upto: int,
        *,
        namespace: str | None = None,
        limit: int | None = None,
        slack: int = 0,
    ) -> bool:
        """Whether `acquire` and then `extend` to ``upto`` would leave ``slack`` pages available.

        Cached pages that the request would borrow no longer count as available. Pages that only
        pins hold are available. The cache is not changed. O(len + depth), and O(slots) for models
        with recurrent states, which need an available slot, too.
        """
        match = self._resumable(self._match(tokens, namespace, limit), tokens)
        if self.states is not None and not self.states.has_room(match.page_ids):
            return False
        num_pages = max(-(-upto // self.page_size), len(match.page_ids))
        needed = num_pages - len(match.page_ids) + match.num_idle_pages
        return needed + slack <= self.num_available_pages

    def acquire(
        self,
        tokens: array[int],
        *,
        namespace: str | None = None,
        limit: int | None = None,
        is_first: bool = True,
    ) -> KVLease:
        """Borrow the longest cached prefix, in whole pages, of at most ``limit`` tokens.

        The last token is never borrowed, because its logits must be computed. Pins on the path are
        renewed. ``is_first=False`` leaves the hit counters unchanged, for a preempted request,
        which finds its own pages. Raises RuntimeError if the model has states and no slot is
        available. O(len + depth + log n).
        """
        limit = _borrowable(len(tokens), limit)
        found = self.tree.match(tokens, namespace=namespace, limit=limit)
        match = self._resumable(found, tokens)
        state = self._lend_state(match)
        lock = self.tree.lock(match)
        if is_first:
            self.num_queries += len(tokens)
            self.num_hits += match.num_tokens
            for node in lock.node.path():
                node.num_hits += 1
        self.pins.touch(lock.node)
        eviction = self.eviction_log.find(namespace, tokens, match.num_tokens)
        lease = KVLease(match.page_ids, lock, match.num_tokens, namespace, eviction, state)
        if state is not None:
            self._note_found(lease, found.num_tokens)
        return lease

    def _lend_state(self, match: Match) -> StateLease | None:
        if self.states is None:
            return None
        return self.states.lend(match.page_ids, self.pinned_states())

    def pinned_states(self) -> Collection[int]:
        """Return, for each pin, its last page that has a state; nothing while slots are free.

        Later requests for the pinned prefixes resume from these states. It takes as long as
        `PinnedPrefixes.last_pages`.
        """
        if self.states is None or self.states.num_free:
            return NOTHING_PINNED
        return self.pins.last_pages(self.states.attached)

    def _note_found(self, lease: KVLease, num_found: int) -> None:
        """Record the number of cached tokens; it exceeds the borrowed ones if a state is missing.

        Losing one page is normal, because a request's last state is kept before its last token. A
        larger loss is recorded as an eviction.
        """
        lease.num_found_tokens = num_found
        if lease.state is None:
            return
        num_lacking = lease.state.num_recomputed = num_found - lease.num_cached_tokens
        if num_lacking > self.page_size:
            lease.eviction = Eviction("state_not_kept", self.eviction_log.now)

    # -- states of a lease, of models that have them

    def keep_states(self, lease: KVLease, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return (position, slot) of the states to keep in a step over the rows ``[start, stop)``.

        These are the states at the wanted page ends after ``start`` and up to ``stop``, in
        ascending order. The lease owns the slots until the step is published. A page end is skipped
        if no slot can be freed. O(page ends * log slots), plus the time of `pinned_states`.
        """
        state = lease.state
        if self.states is None or state is None:
            return ()
        while state.wanted and state.wanted[0][0] <= stop:
            position, rank = state.wanted.pop(0)
            if position <= start:
                continue
            if (slot := self.states.take(rank, self.pinned_states())) is not None:
                state.keeps.append((position, slot, rank))
        return tuple((position, slot) for position, slot, _ in state.keeps)

    def settle_state(self, lease: KVLease, stop: int) -> None:
        """Record the state's position after a step that computed the rows up to ``stop``. O(1).

        The position is the last page end before the step's last row.
        """
        if self.states is not None and lease.state is not None:
            self.states.settle(lease.state, (stop - 1) // self.page_size * self.page_size)

    def void_state(self, lease: KVLease) -> None:
        """Mark the lease's state as invalid, because a step failed. O(1)."""
        if self.states is not None and lease.state is not None:
            self.states.settle(lease.state, 0)

    def _attach_keeps(self, lease: KVLease, num_computed: int) -> None:
        """Attach the states that the last step kept, now that the tree owns their pages."""
        state = lease.state
        if self.states is None or state is None:
            return
        for position, slot, rank in state.keeps:
            if position <= num_computed:
                self.states.attach(lease.page_ids[position // self.page_size - 1], slot, rank)
        state.keeps = [kept for kept in state.keeps if kept[0] > num_computed]

    def _release_state(self, lease: KVLease, *, keep: bool) -> None:
        """Attach a lease's own state to the page at its position, or free its slot."""
        state, lease.state = lease.state, None
        if self.states is None or state is None:
            return
        num_pages = state.position // self.page_size
        if keep and 0 < num_pages <= lease.num_shared_pages:
            self.states.attach(lease.page_ids[num_pages - 1], state.slot, StateRank.USED)
            self.states.end(state)
        else:
            self.states.give_back(state)

    # -- states from tiers

    def begin_state_load(self) -> int | None:
        """Return a slot into which a state can be loaded, or None; `end_state_load` must follow."""
        return None if self.states is None else self.states.begin_load(self.pinned_states())

    def end_state_load(self, slot: int, lease: KVLease | None = None, position: int = 0) -> None:
        """End the loading of a state.

        Without a lease, the slot is freed. With a lease, the state is kept for the page that ends
        at ``position``, and the lease resumes from it; the page must have been published. O(log
        slots).
        """
        if self.states is None:
            return
        page_id = None if lease is None else lease.page_ids[position // self.page_size - 1]
        self.states.end_load(slot, page_id)
        if page_id is not None and lease is not None and lease.state is not None:
            self.states.resume_from(lease.state, page_id)
            lease.state.num_recomputed = max(0, lease.num_found_tokens - position)

    def free_state(self, lease: KVLease) -> None:
        """Free the slot and the log of a lease that will compute no step. O(1)."""
        state, lease.state = lease.state, None
        if self.states is not None and state is not None:
            self.states.give_back(state)

    # -- pages of a lease

    def extend(self, lease: KVLease, upto: int, *, evict: bool = True) -> bool:
        """Extend the page table to position ``upto`` (exclusive), completely or not at all.

        Returns False, without a change, if there are not enough pages. With ``evict=False`` only
        free pages are taken, because drafts must not evict cached pages. Pins are removed if no
        other page is left. Raises ValueError for a released lease. O(pages added + log n per
        evicted leaf), plus the time of `PinnedPrefixes.evict_pin` for each removed pin.
        """
        lease.require_live()
        needed = -(-upto // self.page_size) - len(lease.page_ids)
        if needed <= 0:
            return True
        if needed > (self.num_available_pages if evict else self.num_free_pages):
            return False
        if needed > len(self._free):
            self._free += self._evict(needed - len(self._free))
        taken = self._free[-needed:]
        taken.reverse()
        del self._free[-needed:]
        # a new array: a step under way may read the old table
        lease.page_ids = lease.page_ids + taken
        self._newly_allocated += taken
        return True

    def _evict(self, num_pages: int) -> array[int]:
        while num_pages > self.num_evictable_pages:
            self.pins.evict_pin()
        if self.pins.waits.predicts and self.pins.waiting:
            return self.pins.waiting.evict(num_pages, self.pins.now)
        return self.tree.evict(num_pages)

    def shrink(self, lease: KVLease, upto: int) -> None:
        """Free private pages that positions below ``upto`` do not need.

        Drafts get pages in advance; if the lease kept unused ones, other pages would be evicted
        later. Raises ValueError for a released lease. O(pages freed).
        """
        lease.require_live()
        keep = max(lease.num_shared_pages, -(-upto // self.page_size))
        self._free += lease.page_ids[keep:][::-1]
        del lease.page_ids[keep:]

    def publish(self, lease: KVLease, tokens: array[int], num_computed: int) -> range:
        """Give the whole pages of ``tokens[:num_computed]`` to the tree, and borrow them.

        If the tree has the same prefix already, the lease adopts the tree's pages and frees its own
        copies. Returns the positions that were not cached before. Raises ValueError for a released
        lease, or if ``num_computed`` exceeds the tokens or the page table. O(new pages + nodes
        passed).
        """
        lease.require_live()
        if not 0 <= num_computed <= min(len(tokens), len(lease.page_ids) * self.page_size):
            raise ValueError(f"{num_computed} computed tokens exceed the tokens or the page table")
        start, stop = lease.num_shared_pages, num_computed // self.page_size
        if start >= stop:
            return range(0)
        own = lease.page_ids[start:stop]
        new_tokens = tokens[start * self.page_size : stop * self.page_size]
        adopted = self.tree.insert_below(lease.lock, new_tokens, own)
        lease.page_ids[start : start + len(adopted)] = adopted
        self._free += own[: len(adopted)]
        if lease.state is not None:
            self._attach_keeps(lease, num_computed)
        return range((start + len(adopted)) * self.page_size, stop * self.page_size)

    def release(
        self, lease: KVLease, tokens: array[int], num_computed: int, *, keep: bool = True
    ) -> range:
        """End a lease: publish its computed pages, free the rest, unlock the borrowed pages.

        With ``keep=False`` nothing is published, because the KV of a failed request may be invalid.
        Returns the positions that were not cached before. Raises ValueError for a released lease,
        or if ``num_computed`` exceeds the tokens or the page table. O(new pages + depth + log n).
        """
        lease.require_live()
        written = self.publish(lease, tokens, num_computed) if keep else range(0)
        if lease.state is not None:
            self._release_state(lease, keep=keep)
        self._free += lease.page_ids[lease.num_shared_pages :]
        self.tree.unlock(lease.lock)
        lease.page_ids = array("q")  # a new array: a running step may still read the old one
        return written

    def pin(
        self,
        tokens: array[int],
        num_tokens: int,
        *,
        ttl: float,
        namespace: str | None = None,
    ) -> int:
        """Pin the first ``num_tokens`` for ``ttl`` seconds, beginning with the last `tick`.

        Each hit restarts this time. Only whole pages are pinned, as far as they are cached and the
        namespace's quota allows it. Returns the number of pinned tokens. Older pins are removed if
        the quotas require it. O(num_tokens + depth), plus the time of `PinnedPrefixes.keep`.
        """
        match = self._pinnable(tokens, num_tokens, namespace)
        if match.num_tokens:
            self.pins.keep(match, ttl)
        return match.num_tokens

    def pin_session(
        self,
        tokens: array[int],
        num_tokens: int,
        *,
        session: str,
        namespace: str | None = None,
        began: float | None = None,
    ) -> None:
        """Pin the first ``num_tokens`` as a session's last turn, for `session_ttl` seconds.

        Only full cached pages within the namespace's quota are pinned. Pins of the session's
        earlier turns that this turn continues are removed. A pin that a request asked for is never
        removed. ``began``: time when the turn began to read the cache, by which later waits of the
        session are predicted; None for a prompt that is computed before its turn, which ends no
        wait. O(num_tokens + depth), plus the time of `PinnedPrefixes.keep`.
        """
        match, name = self._pinnable(tokens, num_tokens, namespace), (namespace, session)
        ttl = self.pins.waits.ttl(name) if began is None else self.session_ttl
        if not match.num_tokens or not ttl:
            return
        self.pins.keep(match, ttl, session)
        whole = self.tree.match(tokens, namespace=namespace, limit=num_tokens)
        if whole.num_tokens > match.num_tokens and whole.node is not None:
            self.pins.waiting.add(name, whole.node)  # longer than the quota
        self.pins.waiting.mark(self.pins.now)
        if began is not None:
            label = self.pins.waits.turn(name, began, self.pins.now)
            if label is not None:
                self.pins.expect(name, label)

    def expect(
        self,
        session: str,
        label: str,
        *,
        namespace: str | None = None,
        is_running: bool = False,
    ) -> None:
        """Predict the next turn of a session by the label of its wait, and fit its pin to that.

        ``label`` names a kind of wait, such as a tool. ``is_running``: whether a turn of the
        session is running, so that the label may belong to the next wait. Unknown sessions are
        ignored. It takes as long as `PinnedPrefixes.expect`.
        """
        self.pins.expect((namespace, session), label, is_running=is_running)

    def end_session(self, session: str) -> bool:
        """Unpin the pages of a session in all namespaces, and let them be evicted first.

        Return whether the session had any pages. O(sessions + depth).
        """
        return self.pins.end_session(session)

    def retire(self, tokens: array[int], num_tokens: int, *, namespace: str | None = None) -> None:
        """Let the cached pages of the first ``num_tokens`` be evicted first.

        Pages that are in use, are pinned or begin other prompts are not changed. O(num_tokens).
        """
        match = self.tree.match(tokens, namespace=namespace, limit=num_tokens)
        if match.node is not None and match.num_node_pages == len(match.node.page_ids):
            self.tree.retire(match.node)

    def _pinnable(self, tokens: array[int], num_tokens: int, namespace: str | None) -> Match:
        limit = min(num_tokens, self.pins.quota * self.page_size)
        return self.tree.match(tokens, namespace=namespace, limit=limit)

    def tick(self, now: float) -> None:
        """Set the time in seconds; remove expired pins and end expired transfers.

        O(transfers), and O(depth + log n) for each pin or transfer that ends.
        """
        self.eviction_log.now = now
        self.pins.expire(now)
        self.transfers.now = now
        if self.transfers.num_pages:
            self.transfers.expire()

    def take_newly_allocated_pages(self) -> array[int]:
        """Return the pages allocated since the last call, each once.

        In other KV pools that use the same page ids, their content is now invalid. This method must
        be called before the step that writes the pages.
        """
        fresh = array("q", dict.fromkeys(self._newly_allocated))
        self._newly_allocated = array("q")
        return fresh

    def return_newly_allocated_pages(self, page_ids: array[int]) -> None:
        """Put back the new pages of a step that failed, so that the next call returns them."""
        self._newly_allocated = page_ids + self._newly_allocated

    def flush(self, *namespaces: str | None) -> int:
        """Drop cached pages that no lease borrows, in some namespaces, by default in all.

        ``flush(None)`` empties the shared default namespace only. Pins are removed, too. Returns
        how many pages became free. O(leaves + nodes dropped + pins).
        """
        self.pins.drop(*namespaces)
        freed = self.tree.flush(*namespaces)
        self._free += freed
        return len(freed)

    def flush_prefix(self, tokens: array[int], *, namespace: str | None = None) -> int:
        """Drop all cached continuations of ``tokens``, pinned or not, except borrowed pages.

        The pages of ``tokens`` are dropped as well, from the last branch to another prefix on.
        Returns how many pages became free. Raises ValueError if the tokens do not fill a page.
        O(len + nodes below).
        """
        limit = len(tokens) // self.page_size * self.page_size
        if not limit:
            raise ValueError(f"a prefix of {len(tokens)} tokens is shorter than a page")
        match = self.tree.match(tokens, namespace=namespace, limit=limit)
        if match.num_tokens < limit or match.node is None:
            return 0
        self.pins.drop_below(match.node)
        freed = self.tree.flush_below(match)
        self._free += freed
        return len(freed)

    def check(self, leases: Iterable[KVLease]) -> None:
        """Assert that every page has exactly one owner. O(pages).

        ``leases``: all live leases.
        """
        audit.run(self.checks(leases))

    def checks(self, leases: Iterable[KVLease]) -> audit.Steps:
        """Run `check` in steps.

        Between the steps, no lease may gain or lose pages, and ``tree.version`` must not change.
        """
        leases = list(leases)
        locks = [*(lease.lock for lease in leases), *self.pins.locks(), *self.transfers.locks()]
        yield from self.tree.checks(locks)
        self.pins.check()
        self.transfers.check()
        for lease in leases:
            audit.check_lease(lease, self.page_size)
            yield
        yield from audit.check_owners(self._free, self.tree.nodes(), leases, self.num_total_pages)
        if self.states is not None:
            yield from audit.check_states(self.states, self.tree.nodes(), leases)


def _borrowable(num_tokens: int, limit: int | None) -> int:
    longest = max(num_tokens - 1, 0)
    return longest if limit is None else min(limit, longest)

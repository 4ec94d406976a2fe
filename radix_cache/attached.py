"""State slots, for models with recurrent states: each is free, lent, or keeps the state of a page.

A model with recurrent states can resume from a cached prefix only at the end of a page whose state
was kept. So a page of the tree may have a slot with that state. Slots are few and large. Kept
states are evicted by rank; within a rank, the least recently used state is evicted first.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator

from sortedcontainers import SortedDict

from .node import Cause, KeptState, Node, StateLease, StateRank

NOTHING_PINNED: Collection[int] = frozenset()


class StateSlots:
    """All state slots; each one is free or is owned by a page, a lease or a load from a tier.

    ``counters[slot]`` grows whenever the slot leaves its page. A kept state never changes, so a
    copy is valid if the counter has the same value before and after copying. Any thread may read
    ``counters``; everything else belongs to the scheduler's thread. ``on_attached`` is called with
    each state that was kept.

    ``num_logs``: maximum number of running requests; each has a log of the rows since its state's
    position. ``interval``: number of prompt tokens after which a state is always kept; 0 for no
    such states. As an observer of the tree, this object frees the slot of a page that leaves the
    tree. Raises ValueError for fewer than two slots: a request needs one in addition to the state
    from which it resumes.
    """

    def __init__(self, num_slots: int, num_logs: int, *, interval: int = 0) -> None:
        if num_slots < 2 or num_logs < 1:
            raise ValueError(
                f"at least 2 slots and 1 log are needed, not {num_slots} and {num_logs}"
            )
        self.num_total, self.num_logs = num_slots, num_logs
        self.interval = interval  # tokens
        self.num_evicted = 0
        # tokens that were computed again, because their pages were cached without a state
        self.num_recomputed_tokens = 0

        # kept states by page id; this table owns their slots
        self.attached: dict[int, KeptState] = {}
        # kept states by rank and last use
        self._by_rank: SortedDict[tuple[int, int], KeptState] = SortedDict()
        self.loading: set[int] = set()  # slots into which a state is being read from a tier
        self.counters = array("Q", bytes(8 * num_slots))
        self.on_attached: Callable[[KeptState], None] = lambda _: None
        self._free = array("q", range(num_slots - 1, -1, -1))  # free slots, a stack
        self._free_logs = array("q", range(num_logs - 1, -1, -1))  # free logs, a stack
        self._clock = 0

    @property
    def num_free(self) -> int:
        """Number of slots in the free list. O(1)."""
        return len(self._free)

    @property
    def num_private(self) -> int:
        """Number of slots owned by leases and loads. O(1)."""
        return self.num_total - len(self._free) - len(self.attached)

    @property
    def free(self) -> array[int]:
        """Copy of the free slots. O(slots)."""
        return self._free[:]

    @property
    def free_logs(self) -> array[int]:
        """Copy of the free logs. O(logs)."""
        return self._free_logs[:]

    # -- leases

    def num_resumable(self, page_ids: array[int]) -> int:
        """Return the number of pages up to the last page with a kept state. O(pages)."""
        for index in range(len(page_ids) - 1, -1, -1):
            if page_ids[index] in self.attached:
                return index + 1
        return 0

    def has_room(self, page_ids: array[int]) -> bool:
        """Whether a request that resumes after these pages can get a slot and a log. O(slots)."""
        source = self.attached[page_ids[-1]] if page_ids else None
        is_free = any(kept.num_readers == 0 and kept is not source for kept in self._states())
        return bool(self._free_logs) and (bool(self._free) or is_free)

    def lend(self, page_ids: array[int], pinned: Collection[int] = NOTHING_PINNED) -> StateLease:
        """Lend a state slot and a log to a request that resumes after the pages ``page_ids``.

        Raises RuntimeError if `has_room` is False. O(slots).
        """
        if not self.has_room(page_ids):
            raise RuntimeError("no state slot is free: check `would_fit` before `acquire`")
        source = self.attached[page_ids[-1]] if page_ids else None
        if source is not None:
            source.num_readers += 1
            self._use(source)
        slot = self.take(None, pinned)
        assert slot is not None, "no slot is free, although has_room() was true"
        return StateLease(slot, self._free_logs.pop(), source)

    def take(self, rank: StateRank | None, pinned: Collection[int] = NOTHING_PINNED) -> int | None:
        """Return a slot for a new state, or None if no slot can be freed.

        ``rank``: rank of the new state; None if a request needs the slot. Kept states of at most
        this rank may be evicted, and states of any rank for a request: the lowest rank first, then
        the least recently used. States of ``pinned`` pages are evicted only for a request, after
        all others. O(log slots), and O(slots) if many states are pinned or being copied.
        """
        if self._free:
            return self._free.pop()
        last: KeptState | None = None
        for kept in self._states():
            if rank is not None and kept.rank > rank:
                break
            if kept.num_readers:
                continue
            if kept.page_id not in pinned:
                return self._evict(kept)
            last = last or kept
        return None if last is None or rank is not None else self._evict(last)

    def settle(self, lease: StateLease, position: int) -> None:
        """Record that a step of the lease moved its state to ``position``. O(1)."""
        self._forget_source(lease)
        lease.position = position
        self.num_recomputed_tokens += lease.num_recomputed
        lease.num_recomputed = 0

    def give_back(self, lease: StateLease) -> None:
        """End a lease that still owns its slot; free the slot and the log. O(1)."""
        self._free.append(lease.slot)
        self.end(lease)

    def end(self, lease: StateLease) -> None:
        """End a lease whose slot now belongs to a page; free the log. O(1)."""
        self._forget_source(lease)
        self._free.extend(slot for _, slot, _ in lease.keeps)
        lease.keeps = []
        self._free_logs.append(lease.log)

    def _forget_source(self, lease: StateLease) -> None:
        if lease.source is not None:
            lease.source.num_readers -= 1
            lease.source = None

    # -- states from tiers

    def begin_load(self, pinned: Collection[int] = NOTHING_PINNED) -> int | None:
        """Return a slot into which a kept state can be loaded, or None. O(slots)."""
        slot = self.take(StateRank.USED, pinned)
        if slot is not None:
            self.loading.add(slot)
        return slot

    def end_load(self, slot: int, page_id: int | None) -> None:
        """Attach the state that was loaded into a slot to its page; without a page, free the slot.

        O(log n).
        """
        self.loading.remove(slot)
        if page_id is None:
            self._free.append(slot)
        else:
            self.attach(page_id, slot, StateRank.USED)

    def resume_from(self, lease: StateLease, page_id: int) -> None:
        """Let a lease that has not computed a step resume from the state of a page. O(log n)."""
        self._forget_source(lease)
        lease.source = self.attached[page_id]
        lease.source.num_readers += 1
        self._use(lease.source)

    # -- kept states

    def attach(self, page_id: int, slot: int, rank: StateRank) -> None:
        """Give a slot with a state to a page; free the slot if the page has a state. O(log n)."""
        kept = self.attached.get(page_id)
        if kept is None:
            kept = KeptState(page_id, slot, rank, 0)
            self.attached[page_id] = kept
            self._file(kept)
            self.on_attached(kept)
        else:
            self._free.append(slot)
            del self._by_rank[kept.rank, kept.last_used]
            kept.rank = max(kept.rank, rank)
            self._file(kept)

    def stored(self, node: Node, first: int) -> None:
        """Do nothing: a page that joins the tree has no state yet."""

    def dropped(self, node: Node, first: int, cause: Cause) -> None:  # noqa: ARG002
        """Free the slots of pages that leave the tree. O(pages)."""
        for page_id in node.page_ids[first:]:
            if (kept := self.attached.get(page_id)) is not None:
                self._free.append(self._detach(kept))

    def _states(self) -> Iterator[KeptState]:
        """Return the kept states in eviction order."""
        return iter(self._by_rank.values())

    def _evict(self, kept: KeptState) -> int:
        self.num_evicted += 1
        return self._detach(kept)

    def _detach(self, kept: KeptState) -> int:
        assert kept.num_readers == 0, (
            "a state cannot be evicted while a request is about to copy it"
        )
        del self.attached[kept.page_id], self._by_rank[kept.rank, kept.last_used]
        self.counters[kept.slot] += 1
        return kept.slot

    def _use(self, kept: KeptState) -> None:
        del self._by_rank[kept.rank, kept.last_used]
        self._file(kept)

    def _file(self, kept: KeptState) -> None:
        self._clock += 1
        kept.last_used = self._clock
        self._by_rank[kept.rank, kept.last_used] = kept

    def check(self) -> None:
        """Assert that the index by rank contains every kept state exactly once. O(slots)."""
        filed = list(self._by_rank.items())
        assert len(filed) == len(self.attached), "a kept state is filed twice, or not at all"
        for key, kept in filed:
            assert self.attached[kept.page_id] is kept, "a kept state is attached to another page"
            assert key == (kept.rank, kept.last_used), (
                "a kept state is filed under another rank or time"
            )

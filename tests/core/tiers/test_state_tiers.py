"""Recurrent states in tiers: what is saved, what is found, and what a load leaves behind."""

from __future__ import annotations

from array import array

import pytest

from foretoken.core.tiers.keys import PageKeys
from foretoken.core.tiers.tiers import StateTiers, Tiers
from foretoken.radix_cache import KVLease, PrefixCache, StateRank, StateSlots
from support.fake_tiers import DictStore

PAGE_SIZE, NUM_PAGES = 4, 16
TOKENS = array("q", range(17))


class Bytes:
    """`SlotRecords`, and those of pages: eight bytes each."""

    num_bytes = 8

    def __init__(self) -> None:
        self.rows = {index: bytes([index] * 8) for index in range(NUM_PAGES)}
        self.positions: dict[int, int] = {}
        self._staged = bytearray(8)

    def read(self, index: int) -> memoryview:
        return memoryview(self.rows[index])

    def target(self, index: int) -> memoryview:
        del index
        return memoryview(self._staged)

    def write(self, index: int) -> None:
        self.rows[index] = bytes(self._staged)

    def set_position(self, slot: int, position: int) -> None:
        self.positions[slot] = position


class Scene:
    """A cache of which the stores keep pages and states."""

    def __init__(self, pages: DictStore, states: DictStore) -> None:
        self.pages, self.states, self.records = pages, states, Bytes()
        self.slots = StateSlots(3, 2)
        self.cache = PrefixCache(NUM_PAGES, PAGE_SIZE, states=self.slots)
        keys = PageKeys(b"states", NUM_PAGES, PAGE_SIZE)
        self.cache.tree.add_observer(keys)
        kept = StateTiers(self.slots, self.records, [states])
        self.tiers = Tiers(self.cache.tree, keys, Bytes(), [pages], states=kept, least_tokens=1)

    def compute(self, *ends: int, tokens: array[int] = TOKENS) -> KVLease:
        """Compute four pages; keep the states at these page ends."""
        lease = self.cache.acquire(tokens)
        self.cache.extend(lease, 17)
        assert lease.state is not None
        for end in ends:
            lease.state.want(end)
        self.cache.keep_states(lease, 0, 16)
        self.cache.publish(lease, tokens, 16)
        return lease

    def save(self) -> None:
        while self.tiers.has_saves:
            self.tiers.save()

    def check(self, *leases: KVLease) -> None:
        self.cache.check(leases)
        self.slots.check()


@pytest.fixture
def scene() -> Scene:
    return Scene(DictStore(), DictStore())


def test_what_is_found_ends_at_the_last_page_whose_state_is_kept(scene: Scene) -> None:
    lease = scene.compute(4, 12)
    scene.save()
    assert len(scene.pages) == 4
    assert len(scene.states) == 2
    assert len(scene.tiers.find(TOKENS, None, 0)) == 3
    assert len(scene.tiers.find(TOKENS[:11], None, 0)) == 1
    assert scene.tiers.find(TOKENS, None, 3) == []
    scene.tiers.flush([None])
    assert len(scene.states) == 0
    scene.check(lease)


def test_states_do_not_wait_until_no_page_is_left_to_save(scene: Scene) -> None:
    """One call saves a page or a state: pages that come later go behind a state."""
    lease = scene.compute(12)
    for round in range(1, 4):
        scene.cache.release(lease, TOKENS, 0, keep=False)
        lease = scene.compute(tokens=array("q", range(100 * round, 100 * round + 17)))
        for _ in range(4):
            scene.tiers.save()
        assert (len(scene.pages), len(scene.states)) == (4 * round - (round > 1), round > 1)
        assert scene.tiers.has_saves


def test_a_state_that_gave_way_while_it_was_written_is_not_kept(scene: Scene) -> None:
    """The slot has another state by then."""
    lease = scene.compute(4, 12)
    scene.cache.release(lease, TOKENS, 0, keep=False)

    def give_way(name: str) -> None:
        while name == "put" and scene.slots.attached:
            assert scene.slots.take(None) is not None

    scene.states.before = give_way
    scene.save()
    assert len(scene.states) == 0


def test_a_state_that_is_loaded_has_one_owner_all_the_while(scene: Scene) -> None:
    lease = scene.compute(12)
    scene.save()
    (key,) = scene.states.pages
    slot = scene.cache.begin_state_load()
    assert slot is not None
    scene.check(lease)
    scene.records.rows[slot] = b""
    assert scene.tiers.load_state(key, slot, 12)
    assert scene.records.rows[slot] == scene.states.pages[key][1]
    assert scene.records.positions == {slot: 12}
    scene.cache.end_state_load(slot, lease, 12)  # the page has a state already: ours is freed
    assert scene.slots.num_free == 1
    assert lease.state is not None
    assert lease.state.source is scene.slots.attached[lease.page_ids[2]]
    scene.check(lease)


def test_a_damaged_state_is_not_taken_and_its_slot_is_free_again(scene: Scene) -> None:
    lease = scene.compute(12)
    scene.save()
    (key,) = scene.states.damaged = set(scene.states.pages)
    slot = scene.cache.begin_state_load()
    assert slot is not None
    assert not scene.tiers.load_state(key, slot, 12)
    assert scene.records.positions == {}
    scene.cache.end_state_load(slot)
    scene.check(lease)


def test_no_slot_is_taken_from_a_state_that_is_about_to_be_read(scene: Scene) -> None:
    first = scene.compute(16)
    second = scene.cache.acquire(array("q", [*TOKENS, 1, 2]))
    assert second.num_cached_tokens == 16
    assert scene.slots.take(StateRank.USED) is None
    assert scene.cache.begin_state_load() is None
    scene.check(first, second)

"""Tiers: what is saved has stayed, stores are asked in order, a bad one is left alone."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from foretoken.core.tiers.keys import PageKeys, chain_keys, root_key, tag_of
from foretoken.core.tiers.stores.peer_store import PeerStore
from foretoken.core.tiers.tiers import CLOSED_SECONDS, MAX_CLOSED_SECONDS, MAX_QUEUED, Tiers
from foretoken.radix_cache import PrefixCache
from foretoken.radix_cache.audit import run
from support.fake_tiers import DictStore, failing
from support.loopback import LoopbackReader

PAGE_SIZE, NUM_PAGES, RECORD_BYTES = 2, 32, 8
FINGERPRINT = b"unit"


class Rows:
    """`Records` in a list of bytearrays."""

    num_bytes = RECORD_BYTES

    def __init__(self) -> None:
        self.rows = [bytearray(RECORD_BYTES) for _ in range(NUM_PAGES)]
        self.written: list[int] = []

    def read(self, page_id: int) -> memoryview:
        return memoryview(self.rows[page_id])

    def target(self, page_id: int) -> memoryview:
        return memoryview(self.rows[page_id])

    def write(self, page_id: int) -> None:
        self.written.append(page_id)


class Scene:
    """Tiers over a cache whose pages hold the bytes of their tokens."""

    def __init__(self, *stores: DictStore, peers: PeerStore | None = None) -> None:
        self.now = 0.0
        self.cache = PrefixCache(NUM_PAGES, PAGE_SIZE)
        self.keys = PageKeys(FINGERPRINT, NUM_PAGES, PAGE_SIZE)
        self.cache.tree.add_observer(self.keys)
        self.rows = Rows()
        self.tiers = Tiers(
            self.cache.tree, self.keys, self.rows, stores, peers, clock=lambda: self.now
        )

    def serve(self, *tokens: int, namespace: str | None = None) -> array[int]:
        """Compute tokens and leave them in the cache; returns their pages."""
        ids = array("q", tokens)
        lease = self.cache.acquire(ids, namespace=namespace)
        assert self.cache.extend(lease, len(ids))
        for at, page_id in enumerate(lease.page_ids):
            if at >= lease.num_shared_pages:
                self.rows.rows[page_id][:] = content(tokens[: (at + 1) * PAGE_SIZE])
        self.cache.release(lease, ids, len(ids))
        return self.cache.tree.match(ids, namespace=namespace).page_ids

    def save_all(self) -> None:
        while self.tiers.has_saves:
            self.tiers.save()

    def find(self, *tokens: int, namespace: str | None = None, first: int = 0) -> int:
        """Number of pages that are found from the beginning on."""
        found = self.tiers.find(array("q", tokens), namespace, first)
        assert found == keys_of(*tokens, namespace=namespace)[: len(found)]
        return len(found)

    def load(self, *tokens: int, namespace: str | None = None) -> int:
        keys = keys_of(*tokens, namespace=namespace)
        return self.tiers.load(
            keys, array("q", range(NUM_PAGES - 1, NUM_PAGES - 1 - len(keys), -1))
        )

    def state(self, index: int = 0) -> Any:
        return self.tiers.describe()[index]


def content(tokens: Any) -> bytes:
    return bytes([sum(tokens) % 251, *tokens[-2:], len(tokens)]).ljust(RECORD_BYTES, b"\1")


def keys_of(*tokens: int, namespace: str | None = None) -> list[bytes]:
    return list(chain_keys(root_key(FINGERPRINT, namespace), array("q", tokens), PAGE_SIZE))


def put(store: DictStore, key: bytes, page: bytes = bytes(RECORD_BYTES)) -> None:
    store.pages[key] = (b"", page)


# -- saves ----------------------------------------------------------------------------------------


def test_pages_that_join_the_tree_are_saved_with_their_keys_bytes_and_tags() -> None:
    store = DictStore()
    scene = Scene(store)
    scene.serve(1, 2, 3, 4)
    scene.serve(1, 2, 3, 4, namespace="salt")
    assert store.pages == {}, "nothing is done on the loop"
    scene.save_all()
    for namespace in (None, "salt"):
        tag = tag_of(root_key(FINGERPRINT, namespace))
        one, two = keys_of(1, 2, 3, 4, namespace=namespace)
        assert store.pages[one] == (tag, content((1, 2)))
        assert store.pages[two] == (tag, content((1, 2, 3, 4)))
    assert len(store) == 4
    assert scene.state().saved_pages == 4
    assert sum(scene.state().dropped_pages.values()) == 7, "those of the store"


class Evicting(DictStore):
    """Between reading a page and its last check, the page leaves the tree and is written anew."""

    scene: Scene
    left = 1
    then: tuple[int, ...] = (7, 7, 8, 8)

    def put(self, key: bytes, tag: bytes, page: memoryview, is_valid: Callable[[], bool]) -> bool:
        data = bytes(page)

        def late() -> bool:
            if self.left:
                self.left -= 1
                self.scene.cache.flush()
                self.scene.serve(*self.then)
            return is_valid()

        return super().put(key, tag, memoryview(data), late)


def test_a_page_that_left_the_tree_while_it_was_written_is_not_kept() -> None:
    store = Evicting()
    store.scene = scene = Scene(store)
    scene.serve(1, 2, 3, 4)
    scene.save_all()
    assert set(store.pages) == set(keys_of(7, 7, 8, 8))
    assert store.pages[keys_of(7, 7)[0]][1] == content((7, 7))
    assert scene.state().dropped_pages["left_the_pool"] == 2
    assert scene.state().saved_pages == 2


def test_a_page_that_left_the_tree_and_came_back_is_not_taken_for_the_old_one() -> None:
    """The same page id has the same key again, but was void in between."""
    store = Evicting()
    store.scene = scene = Scene(store)
    store.then = (7, 7)
    pages = scene.serve(7, 7)
    scene.tiers.save()
    assert len(store) == 0
    assert scene.cache.tree.match(array("q", [7, 7])).page_ids == pages
    scene.save_all()
    assert set(store.pages) == set(keys_of(7, 7)), "the second time"


def test_a_page_that_is_gone_before_its_turn_costs_the_store_nothing() -> None:
    store = DictStore()
    scene = Scene(store)
    scene.serve(1, 2, 3, 4)
    scene.cache.flush()
    scene.save_all()
    assert store.calls == []
    assert scene.state().dropped_pages["left_the_pool"] == 2


def test_a_full_queue_takes_no_more_pages_and_counts_them() -> None:
    store = DictStore()
    scene = Scene(store)
    room = MAX_QUEUED * NUM_PAGES
    for first in range(1, room + 4):
        scene.serve(first, 200, 201, 202)
    assert scene.state().queued_pages == room
    assert scene.state().dropped_pages["queue_full"] == 2 * (room + 3) - room
    scene.save_all()
    assert scene.state().queued_pages == 0
    scene.serve(1, 1)
    assert scene.state().queued_pages == 1


def test_one_call_saves_a_few_pages_and_whoever_waits_for_saves_is_told() -> None:
    scene, told = Scene(DictStore()), []
    scene.tiers.watch_saves(lambda: told.append(scene.tiers.has_saves))
    scene.serve(*range(1, 13))
    assert told == [True]
    assert scene.tiers.pages_per_call == NUM_PAGES // 16
    scene.tiers.save()
    assert scene.state().saved_pages == 2
    assert scene.tiers.has_saves


def test_every_store_gets_the_page_and_one_that_fails_keeps_no_other_from_it() -> None:
    bad, good = DictStore("host"), DictStore("disk")
    bad.before = failing("put")
    scene = Scene(bad, good)
    scene.serve(1, 2, 3, 4)
    scene.save_all()
    assert (len(bad), len(good)) == (0, 2)
    assert bad.calls == ["put"], "it is left alone"
    assert [each.is_open for each in scene.tiers.describe()] == [False, True]


# -- what is found and loaded ---------------------------------------------------------------------


def test_a_prefix_may_begin_in_one_tier_and_go_on_in_another_and_back() -> None:
    first, second = DictStore("host"), DictStore("disk")
    scene = Scene(first, second)
    keys = keys_of(*range(1, 13))
    for at, key in enumerate(keys):
        put([first, second][at // 2 % 2], key, bytes([at]) * RECORD_BYTES)
    assert scene.find(*range(1, 14)) == 6
    assert scene.load(*range(1, 13)) == 6
    loaded = [scene.rows.rows[page_id][0] for page_id in scene.rows.written]
    assert loaded == [0, 1, 2, 3, 4, 5]
    assert [each.loaded_pages for each in scene.tiers.describe()] == [4, 2]


def test_the_last_token_is_left_to_be_computed() -> None:
    store = DictStore()
    scene = Scene(store)
    for key in keys_of(1, 2, 3, 4):
        put(store, key)
    assert [scene.find(1, 2, 3, 4), scene.find(1, 2, 3, 4, 5)] == [1, 2]


def test_what_the_pool_has_need_not_be_in_a_tier() -> None:
    store = DictStore()
    scene = Scene(store)
    keys = keys_of(*range(1, 9))
    for key in keys[2:]:
        put(store, key)
    tokens = range(1, 10)
    assert [scene.find(*tokens, first=at) for at in (0, 1, 2, 3)] == [0, 0, 4, 4]


def test_tiers_are_asked_in_order_and_the_first_that_has_a_page_gives_it() -> None:
    first, second = DictStore("host"), DictStore("disk")
    scene = Scene(first, second)
    for store, item in ((first, 1), (second, 2)):
        put(store, keys_of(1, 2)[0], bytes([item]) * RECORD_BYTES)
    assert scene.load(1, 2) == 1
    assert second.calls == []
    assert scene.rows.rows[NUM_PAGES - 1] == b"\1" * RECORD_BYTES


def test_an_unsound_page_comes_from_the_next_tier_and_else_ends_the_load() -> None:
    first, second = DictStore("host"), DictStore("disk")
    scene = Scene(first, second)
    keys = keys_of(*range(1, 9))
    for key in keys:
        put(first, key)
    put(second, keys[1], b"\2" * RECORD_BYTES)
    first.damaged = {keys[1], keys[2]}
    assert scene.load(*range(1, 9)) == 2
    assert scene.rows.written == [NUM_PAGES - 1, NUM_PAGES - 2], "the third is not written"
    assert scene.rows.rows[NUM_PAGES - 2] == b"\2" * RECORD_BYTES
    assert scene.tiers.is_open, "damage is no failure"


@pytest.mark.parametrize("num_lied", [-3, -1, 0, 3, 10_000])
def test_a_store_may_lie_about_what_it_has(num_lied: int) -> None:
    liar, store = DictStore("host"), DictStore("disk")
    scene = Scene(liar, store)
    keys = keys_of(*range(1, 9))
    for key in keys[:2]:
        put(store, key)
    liar.num_lied = num_lied
    found = scene.tiers.find(array("q", range(1, 10)), None, 0)
    assert found == keys[: len(found)], "no more keys than there are, and the right ones"
    assert scene.load(*range(1, 9)) == 2


def test_another_namespace_and_another_fingerprint_find_nothing() -> None:
    store = DictStore()
    scene = Scene(store)
    scene.serve(1, 2, 3, 4, namespace="a" * 64)
    scene.save_all()
    for namespace in (None, "", "a" * 65, "b"):
        assert scene.find(1, 2, 3, 4, 5, namespace=namespace) == 0
    assert scene.find(1, 2, 3, 4, 5, namespace="a" * 64) == 2


# -- a store that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["find", "get", "put", "flush"])
def test_a_store_that_raises_is_left_alone_for_a_while(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = DictStore()
    scene = Scene(store)
    scene.serve(1, 2, 3, 4)
    scene.save_all()
    store.before = failing(name)
    work = {
        "find": lambda: scene.find(1, 2, 3, 4, 5),
        "get": lambda: scene.load(1, 2, 3, 4),
        "put": lambda: (scene.serve(5, 6), scene.tiers.save()),
        "flush": lambda: scene.tiers.flush(["other"]),
    }[name]
    with caplog.at_level(logging.WARNING):
        assert work() in (0, None, (array("q", [2]), None))
    assert f"disk for 10 s: {name} failed" in caplog.text
    assert not scene.tiers.is_open
    store.calls.clear()
    assert (scene.find(1, 2, 3, 4, 5), scene.load(1, 2, 3, 4)) == (0, 0)
    assert store.calls == []
    store.before = failing()
    scene.now += CLOSED_SECONDS
    assert scene.tiers.is_open
    assert (scene.find(1, 2, 3, 4, 5), scene.load(1, 2, 3, 4)) == (2, 2)
    assert scene.state().times_closed == 1


def test_it_is_left_alone_twice_as_long_each_time_until_it_gives_a_page() -> None:
    store = DictStore()
    scene = Scene(store)
    put(store, keys_of(1, 2)[0])
    pauses = []
    for _ in range(9):
        store.before = failing("get")
        began = scene.now
        assert scene.load(1, 2) == 0
        while not scene.tiers.is_open:
            scene.now += CLOSED_SECONDS
        pauses.append(scene.now - began)
    expected = [min(CLOSED_SECONDS * 2**n, MAX_CLOSED_SECONDS) for n in range(9)]
    assert pauses == expected
    store.before = failing()
    assert scene.load(1, 2) == 1
    store.before = failing("find")
    scene.find(1, 2, 3)
    scene.now += CLOSED_SECONDS
    assert scene.tiers.is_open, "a page that came made it begin anew"


def test_a_store_that_is_closed_already_is_not_closed_for_longer() -> None:
    first, second = DictStore("host"), DictStore("disk")
    first.before = second.before = failing("find", "flush")
    scene = Scene(first, second)
    scene.find(1, 2, 3)
    scene.tiers.flush([])
    assert [each.times_closed for each in scene.tiers.describe()] == [1, 1]


class Late(DictStore):
    """The loop's patience ends while it looks for a page."""

    scene: Scene

    def get(self, key: bytes, into: memoryview) -> bool:
        self.scene.tiers.note_late()
        return super().get(key, into)


def test_two_late_loads_close_the_tier_that_the_thread_is_in() -> None:
    first, second = DictStore("host"), Late("disk")
    second.scene = scene = Scene(first, second)
    for key in keys_of(1, 2, 3, 4):
        put(second, key)
    scene.tiers.note_late()
    assert [each.is_open for each in scene.tiers.describe()] == [True, True], "it is in none"
    assert scene.load(1, 2, 3, 4) == 2, "and the next page is not asked for"
    assert [each.is_open for each in scene.tiers.describe()] == [True, False]


class LatePeers(PeerStore):
    """Pools of peers, of which one hangs: the loop's patience ends twice."""

    scene: Scene

    def find(self, keys: Sequence[bytes]) -> int:
        for _ in range(2):
            self.scene.tiers.note_late()
        return super().find(keys)


def test_a_peer_that_hangs_closes_no_tier() -> None:
    """The tier was closed as a whole, for up to ten minutes, and all other peers with it."""
    peers = LatePeers(LoopbackReader(RECORD_BYTES), RECORD_BYTES)
    peers.scene = scene = Scene(DictStore("host"), peers=peers)
    scene.find(1, 2, 3, 4, 5)
    assert [each.is_open for each in scene.tiers.describe()] == [True, True]


# -- flushes --------------------------------------------------------------------------------------


def test_a_flush_empties_every_tier_or_a_namespace_of_each() -> None:
    stores = DictStore("host"), DictStore("disk")
    scene = Scene(*stores)
    for namespace in (None, "a", "b"):
        scene.serve(1, 2, 3, 4, namespace=namespace)
    scene.save_all()
    scene.tiers.flush(["a"])
    found = [scene.find(1, 2, 3, 4, 5, namespace=each) for each in (None, "a", "b")]
    assert found == [2, 0, 2]
    scene.tiers.flush([None])
    assert scene.find(1, 2, 3, 4, 5) == 0
    scene.tiers.flush([])
    assert [len(store) for store in stores] == [0, 0]


def test_a_flush_that_failed_is_made_before_anything_is_found_again() -> None:
    store = DictStore()
    scene = Scene(store)
    for namespace in ("a", "b"):
        scene.serve(1, 2, 3, 4, namespace=namespace)
    scene.save_all()
    store.before = failing("flush")
    scene.tiers.flush(["a"])
    for _ in range(3):
        store.calls.clear()
        assert scene.find(1, 2, 3, 4, 5, namespace="a") == 0
        assert store.calls == []
        scene.now += MAX_CLOSED_SECONDS
        assert scene.find(1, 2, 3, 4, 5, namespace="a") == 0
        assert scene.load(1, 2, 3, 4, namespace="a") == 0
        assert store.calls == ["flush"], "it was tried once, and nothing else"
    store.before = failing()
    scene.now += MAX_CLOSED_SECONDS
    assert scene.find(1, 2, 3, 4, 5, namespace="a") == 0
    assert scene.find(1, 2, 3, 4, 5, namespace="b") == 2
    assert store.calls.count("flush") == 2


def test_a_closed_tier_is_flushed_nevertheless() -> None:
    store = DictStore()
    scene = Scene(store)
    scene.serve(1, 2, 3, 4)
    scene.save_all()
    store.before = failing("find")
    scene.find(1, 2, 3)
    scene.tiers.flush([])
    assert len(store) == 0


def test_a_flush_that_failed_is_made_before_the_store_is_closed() -> None:
    """The next process would find what was to be forgotten."""
    store = DictStore()
    scene = Scene(store)
    scene.serve(1, 2, 3, 4)
    scene.save_all()
    store.before = failing("flush")
    scene.tiers.flush([None])
    store.before = failing()
    scene.tiers.close()
    assert (len(store), store.is_closed) == (0, True)


def test_each_store_is_closed_though_another_one_raises() -> None:
    first, second = DictStore("host"), DictStore("disk")
    first.before = failing("close")
    Scene(first, second).tiers.close()
    assert (first.is_closed, second.is_closed) == (False, True)


# -- reports --------------------------------------------------------------------------------------


def test_the_estimate_of_a_load_is_what_pages_took_lately() -> None:
    store = DictStore()
    scene = Scene(store)
    for key in keys_of(*range(1, 9)):
        put(store, key)

    def slow(seconds: float) -> Callable[[str], None]:
        def before(name: str) -> None:
            scene.now += seconds

        return before

    assert scene.tiers.load_seconds(10) == 0.0
    store.before = slow(0.5)
    scene.load(*range(1, 9))
    assert scene.tiers.load_seconds(10) == pytest.approx(5.0)
    assert scene.state().load_seconds == pytest.approx(2.0)
    store.before = slow(0.1)
    scene.load(1, 2)
    assert 1.0 < scene.tiers.load_seconds(10) < 5.0


def test_it_says_how_each_tier_fares() -> None:
    store = DictStore("disk", capacity=5)
    scene = Scene(store)
    scene.serve(1, 2, 3, 4)
    scene.save_all()
    scene.serve(5, 6)
    scene.load(1, 2, 3, 4)
    state = scene.state()
    assert (state.medium, state.pages, state.capacity_pages) == ("disk", 2, 5)
    assert (state.saved_pages, state.loaded_pages, state.queued_pages) == (2, 2, 1)
    assert state.dropped_pages == {"left_the_pool": 0, "closed": 0, "queue_full": 0, "evicted": 7}
    assert (state.times_closed, state.is_open) == (0, True)


def test_the_audit_is_that_of_the_keys() -> None:
    scene = Scene(DictStore())
    (page_id,) = scene.serve(1, 2)
    run(scene.tiers.checks())
    scene.keys._set(page_id, b"x" * 32)
    with pytest.raises(AssertionError, match="the key of other tokens"):
        run(scene.tiers.checks())

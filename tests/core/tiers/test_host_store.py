"""The host tier: what was put is got, the oldest makes room, namespaces keep to their share."""

from __future__ import annotations

import random

from foretoken.core.tiers.stores.host_store import HostStore

PAGE_BYTES = 64
TAG, OTHER = b"one tag.", b"another."


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def page(number: int) -> memoryview:
    return memoryview(bytearray(random.Random(number).randbytes(PAGE_BYTES)))


def put(store: HostStore, number: int, tag: bytes = TAG, *, is_valid: bool = True) -> bool:
    return store.put(key(number), tag, page(number), lambda: is_valid)


def got(store: HostStore, number: int) -> bytes | None:
    into = memoryview(bytearray(PAGE_BYTES))
    return bytes(into) if store.get(key(number), into) else None


def test_random_work_agrees_with_a_dict_in_the_order_of_use() -> None:
    rng, store = random.Random(0), HostStore(PAGE_BYTES, 8 * PAGE_BYTES, pinned=False)
    known: dict[int, bool] = {}  # the oldest first
    for _ in range(3_000):
        number = rng.randrange(20)
        if rng.random() < 0.5:
            is_valid = rng.random() < 0.9
            assert put(store, number, is_valid=is_valid) == (is_valid or number in known)
            if number not in known and len(known) == store.capacity:
                del known[next(iter(known))]  # it made room before the page was judged
            if is_valid or number in known:
                known.pop(number, None)
                known[number] = True
        else:
            assert (got(store, number) == bytes(page(number))) == (number in known)
            if number in known:
                known[number] = known.pop(number)
        store.check()
        assert len(store) == len(known)


def test_a_namespace_beyond_its_share_makes_room_first() -> None:
    store = HostStore(PAGE_BYTES, 8 * PAGE_BYTES, pinned=False, quota=0.5)
    for number in range(2):
        put(store, number, OTHER)
    for number in range(2, 12):
        put(store, number)
    assert [number for number in range(12) if got(store, number)] == [0, 1, *range(6, 12)]


def test_a_flush_forgets_one_namespace_or_all() -> None:
    store = HostStore(PAGE_BYTES, 8 * PAGE_BYTES, pinned=False)
    put(store, 1)
    put(store, 2, OTHER)
    store.flush(TAG)
    assert (got(store, 1), got(store, 2)) == (None, bytes(page(2)))
    store.flush()
    assert len(store) == 0

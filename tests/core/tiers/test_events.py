"""KV events: bytes as readers of other projects expect them, and readers that miss nothing."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from foretoken.api.build.kv.events import events_of, keys_of, name_fingerprint
from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.extras.adapter import adapter_group, adapter_namespace
from foretoken.core.tiers import events
from foretoken.core.tiers.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventPublisher,
    block_hash,
    encode_batch,
)
from foretoken.core.tiers.keys import PageKeys, StoredPages
from foretoken.radix_cache import PrefixCache
from support.kv_subscriber import KVSubscriber

ANY = "tcp://127.0.0.1:0"
END = (7, 8)  # tokens of the page that a test publishes last


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    made = KVEventPublisher(ANY, ANY, heartbeat_seconds=0.02)
    yield made
    made.close()


def reader(publisher: KVEventPublisher) -> KVSubscriber:
    return KVSubscriber(publisher.address, publisher.replay_address)


def seq(*tokens: int) -> array[int]:
    return array("q", tokens)


def pages(*tokens: int, namespace: str | None = None, before: bytes | None = None) -> StoredPages:
    """Pages of two tokens, with keys of their own."""
    keys = [bytes([first]) * 32 for first in tokens[::2]]
    return StoredPages(namespace, seq(*range(len(keys))), keys, before, seq(*tokens))


def serve(cache: PrefixCache, tokens: array[int], namespace: str | None = None) -> None:
    lease = cache.acquire(tokens, namespace=namespace)
    assert cache.extend(lease, len(tokens))
    cache.release(lease, tokens, len(tokens))


def work(cache: PrefixCache) -> None:
    """Fill a small cache many times over, in three namespaces, and flush it now and then."""
    rng = random.Random(3)
    for _ in range(400):
        tokens = array("q", rng.choices(range(2), k=rng.randrange(1, 12)))
        serve(cache, tokens, rng.choice([None, None, "", "a"]))
        if rng.random() < 0.02:
            cache.flush()
    serve(cache, seq(0, 1, 0, 1, 0, 0))


def sizes(publisher: KVEventPublisher) -> list[int]:
    """Events in each batch so far, without the heartbeats, and a last one of one event."""
    publisher.stored_in("DISK", pages(*END))
    with reader(publisher) as late:
        found: list[list[dict[str, Any]]] = [[{}]]
        while found[-1][0].get("token_ids") != list(END):
            late.next_number()
            batches = [msgspec.msgpack.decode(batch)[1] for _, batch in late.replay(0)]
            found = [batch for batch in batches if batch]
    return [len(batch) for batch in found]


def unsalted_texts(cache: PrefixCache) -> list[tuple[int, ...]]:
    """The beginnings in a tree's default namespace, one for each page."""
    found = []
    for node in cache.tree.nodes():
        if node.namespace is None:
            text = tuple(token for each in node.path() for token in each.key)
            sizes = range(len(node.page_ids))
            found += [text[: len(text) - each * cache.page_size] for each in sizes]
    return sorted(found)


def tap(publisher: KVEventPublisher, num_pages: int = 12) -> PrefixCache:
    cache = PrefixCache(num_pages, 2)
    publish_pages(cache, publisher, "org/model")
    return cache


def publish_pages(
    cache: PrefixCache, publisher: KVEventPublisher, model: str, fingerprint: bytes | None = None
) -> PageKeys:
    """Give the pages of a cache keys, and publish them."""
    keys = keys_of(cache, fingerprint or name_fingerprint(model, cache.page_size))
    keys.add_observer(publisher)
    return keys


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            BlockStored(
                block_hashes=[2**63 + 1, 5],
                parent_block_hash=None,
                token_ids=[1, 300, 70_000, 4],
                block_size=2,
                medium="GPU",
            ),
            "93 cb3ff8000000000000 91 8a"
            " a474797065 ab426c6f636b53746f726564"
            " ac626c6f636b5f686173686573 92cf800000000000000105"
            " b1706172656e745f626c6f636b5f68617368 c0"
            " a9746f6b656e5f696473 9401cd012cce0001117004"
            " aa626c6f636b5f73697a65 02"
            " a76c6f72615f6964 c0"
            " a66d656469756d a3475055"
            " a96c6f72615f6e616d65 c0"
            " aa65787472615f6b657973 c0"
            " a967726f75705f696478 c0"
            " 00",
        ),
        (
            BlockRemoved(block_hashes=[9], medium="DISK"),
            "93 cb3ff8000000000000 91 84"
            " a474797065 ac426c6f636b52656d6f766564"
            " ac626c6f636b5f686173686573 9109"
            " a66d656469756d a44449534b"
            " a967726f75705f696478 c0"
            " 00",
        ),
        (
            AllBlocksCleared(),
            "93 cb3ff8000000000000 91 81 a474797065 b0416c6c426c6f636b73436c6561726564 00",
        ),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_bytes_of_each_event(
    event: BlockStored | BlockRemoved | AllBlocksCleared, expected: str
) -> None:
    assert encode_batch(1.5, [event]).hex() == expected.replace(" ", "")


def test_a_reader_rebuilds_the_tree_from_its_events(publisher: KVEventPublisher) -> None:
    cache = tap(publisher)
    with reader(publisher) as live:
        live.receive()
        work(cache)
        publisher.stored_in("DISK", pages(*END))
        live.wait_until_kept("DISK", END)
        assert live.texts() == unsalted_texts(cache) != []


def test_a_late_reader_of_a_silent_publisher_sees_its_gap_and_rebuilds_the_tree(
    publisher: KVEventPublisher,
) -> None:
    cache = tap(publisher)
    work(cache)
    publisher.stored_in("DISK", pages(*END))
    with reader(publisher) as live:
        live.wait_until_kept("DISK", END)
        live.receive()  # from here on there are heartbeats alone
    with reader(publisher) as late:
        last = late.receive()
        assert late.num_replayed >= last > 400
        assert late.texts() == unsalted_texts(cache) != []


def test_hashes_are_the_beginnings_of_keys(publisher: KVEventPublisher) -> None:
    cache = PrefixCache(12, 2)
    keys = publish_pages(cache, publisher, "org/model")
    serve(cache, seq(1, 2, 3, 4))
    with reader(publisher) as late:
        late.wait_until_kept("GPU", (1, 2, 3, 4))
        page_ids = cache.tree.match(seq(1, 2, 3, 4)).page_ids
        expected = {("GPU", int.from_bytes(keys.key(each)[:8], "big")) for each in page_ids}
        assert late.kept.keys() == expected


def test_keys_tell_fingerprints_models_and_page_sizes_apart(publisher: KVEventPublisher) -> None:
    roots = set()
    for model, size, fingerprint in (
        ("a", 2, None),
        ("b", 2, None),
        ("a", 4, None),
        ("a", 2, b"weights"),
    ):
        keys = publish_pages(PrefixCache(4, size), publisher, model, fingerprint)
        roots.add(keys.root(None))
    assert len(roots) == 4


def test_what_is_salted_is_not_published(publisher: KVEventPublisher) -> None:
    cache = tap(publisher)
    serve(cache, seq(1, 2), "salt")
    serve(cache, seq(1, 2), "")
    serve(cache, seq(1, 2), adapter_namespace(adapter_group("sql", 1, b""), None))
    cache.flush()
    publisher.stored_in("DISK", pages(1, 2, namespace="salt"))
    publisher.stored_in("DISK", pages(*END))
    with reader(publisher) as late:
        late.wait_until_kept("DISK", END)
        assert [each["type"] for each in late.events] == ["AllBlocksCleared", "BlockStored"]


def test_other_media_have_events_of_their_own(publisher: KVEventPublisher) -> None:
    first = pages(1, 2)
    publisher.stored(first)
    publisher.stored_in("CPU", first)
    publisher.stored_in("CPU", pages(3, 4, before=first.keys[0]))
    publisher.dropped(None, first.keys, "evicted")
    publisher.stored_in("DISK", pages(*END))
    with reader(publisher) as late:
        late.wait_until_kept("DISK", END)
        assert (late.texts("GPU"), late.texts("CPU")) == ([], [(1, 2), (1, 2, 3, 4)])
    publisher.dropped_from("CPU", [bytes([3]) * 32])
    with reader(publisher) as later:
        later.wait_until_kept("CPU", (1, 2))
        assert later.texts("CPU") == [(1, 2)]


def test_events_between_two_turns_of_the_loop_are_one_batch(publisher: KVEventPublisher) -> None:
    async def step(first: int) -> None:
        publisher.stored(pages(first, 2))
        publisher.stored(pages(first + 1, 2))

    async def steps() -> None:
        await step(1)
        await asyncio.sleep(0)
        await step(11)
        await asyncio.sleep(0)

    asyncio.run(steps())
    assert sizes(publisher) == [1, 2, 2, 1]


def test_silence_costs_one_batch_however_long_it_is(publisher: KVEventPublisher) -> None:
    publisher.stored(pages(1, 2))
    with reader(publisher) as live:
        seqs = [live.receive() for _ in range(8)]  # what is published, then silence
        assert len({*seqs[3:]}) == 1
        publisher.stored(pages(3, 4))
        live.wait_until_kept("GPU", (3, 4))
        assert live.last == seqs[-1] + 1


def test_a_topic_is_sent_with_batches_and_replays() -> None:
    topic = "kv@127.0.0.1:8000@org/model"
    made = KVEventPublisher(ANY, ANY, topic, heartbeat_seconds=0.02)
    with KVSubscriber(made.address, made.replay_address, topic=topic) as live:
        live.receive()
        assert live.topics == {topic.encode()}
    made.close()


def test_no_batch_is_larger_than_readers_take(publisher: KVEventPublisher) -> None:
    async def step() -> None:
        for index in range(5_000):
            publisher.dropped_from("DISK", [index.to_bytes(32, "big")])
        await asyncio.sleep(0)

    asyncio.run(step())
    assert sizes(publisher) == [1, 4096, 904, 1]


def test_a_replay_has_the_last_10_000_batches_and_a_whole_one_arrives(
    publisher: KVEventPublisher,
) -> None:
    page = StoredPages(None, seq(0), [bytes(32)], None, array("q", [70_000]) * 500)
    for _ in range(10_500):  # 25 MB: more than sockets buffer
        publisher.stored(page)
    with KVSubscriber(publisher.address, publisher.replay_address, max_waiting=1) as late:
        while (last := late.next_number()) <= 10_500:
            pass  # the heartbeat behind them is the last one
        late.ask(b"", bytes(8))
        assert late.is_answered()
        publisher.stored(page)
        while late.next_number() <= last:
            pass  # all has been sent, and nothing but its beginning read
        found = [number for number, _ in late.answer()]
        assert found == list(range(last - 9_999, last + 1))
        after = late.replay(last + 1)
        assert after[0] == (last + 1, encode_batch(*msgspec.msgpack.decode(after[0][1])[:2]))
        assert late.replay(2**40) == late.replay(2**64 - 1) == []


@pytest.mark.parametrize(
    "request_", [(b"",), (b"", b"123"), (b"", b"12345678", b""), (b"12345678",)]
)
def test_a_request_that_is_none_is_ignored(
    publisher: KVEventPublisher, request_: tuple[bytes, ...]
) -> None:
    with reader(publisher) as late:
        late.receive()
        late.ask(*request_)
        assert late.replay(0)


def test_a_request_that_is_too_long_ends_its_connection_alone(publisher: KVEventPublisher) -> None:
    with reader(publisher) as hostile, reader(publisher) as late:
        assert hostile.replay(0)
        hostile.ask(b"", b"x" * 5_000)
        assert hostile.is_disconnected()
        assert late.replay(0)


def test_kept_batches_have_a_limit_in_bytes(
    publisher: KVEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "KEPT_BYTES", 1_000)
    for _ in range(20):
        publisher.stored(StoredPages(None, seq(0), [bytes(32)], None, seq(*[1] * 200)))
    with reader(publisher) as late:
        while (last := late.next_number()) <= 20:
            pass  # the heartbeat behind them
        found = late.replay(0)
        assert 2 <= len(found) == last - found[0][0] + 1
        assert sum(len(batch) for _, batch in found) <= 1_000


def test_a_reader_that_does_not_read_delays_nothing(publisher: KVEventPublisher) -> None:
    with KVSubscriber(publisher.address, publisher.replay_address, max_waiting=1) as slow:
        slow.receive()
        big = StoredPages(None, seq(0), [bytes(32)], None, array("q", [70_000]) * 100_000)
        for _ in range(60):  # 30 MB: more than sockets buffer
            publisher.stored(big)
        publisher.close()


def test_closing_sends_what_is_left_and_frees_the_addresses() -> None:
    first = KVEventPublisher(ANY, ANY, heartbeat_seconds=0.02)
    with reader(first) as live:
        live.receive()

        async def last_step() -> None:
            first.stored(pages(*END))
            first.close()

        asyncio.run(last_step())
        live.wait_until_kept("GPU", END)
    second = KVEventPublisher(first.address, first.replay_address)
    second.close()
    second.close()
    second.stored(pages(1, 2))  # of an engine that is closed; nobody reads it


def test_a_publisher_that_nobody_closed_ends_with_its_engine() -> None:
    made = KVEventPublisher(ANY, ANY)
    address = made.address
    del made
    KVEventPublisher(address, ANY).close()


def taken() -> tuple[socket.socket, str]:
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.listen()
    return held, f"tcp://127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("option", ["kv_events", "kv_events_replay"])
def test_a_taken_port_is_refused_by_the_name_of_its_option(option: str) -> None:
    held, address = taken()
    options = {"kv_events": ANY, "kv_events_replay": ANY} | {option: address}
    reason = f"^{option}: cannot listen on {address}: address already in use$"
    with held, pytest.raises(InvalidRequest, match=reason):
        open_events(**options)


def open_events(**options: str) -> None:
    with events_of(EngineConfig(**options)):  # type: ignore[arg-type]
        pass


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^kv_events: cannot listen on "):
        open_events(kv_events="tcp://203.0.113.1:0")


def test_a_model_that_cannot_be_loaded_frees_the_addresses() -> None:
    kept: list[KVEventPublisher | None] = []

    def fail() -> None:
        with events_of(EngineConfig(kv_events=ANY)) as made:
            kept.append(made)
            raise OSError("no model")

    with pytest.raises(OSError, match="no model"):
        fail()
    assert kept[0] is not None
    KVEventPublisher(kept[0].address, ANY).close()


def test_hashes_have_64_bits() -> None:
    assert block_hash(b"\xff" * 32) == 2**64 - 1
    assert block_hash(bytes(7) + b"\1" + b"\xff" * 24) == 1


@pytest.mark.parametrize(
    ("address", "replay", "expected"),
    [
        ("tcp://127.0.0.1:5557", None, "tcp://127.0.0.1:5558"),
        ("tcp://[::1]:9", None, "tcp://[::1]:10"),
        ("tcp://*:0", None, "tcp://*:0"),
        ("tcp://h:65535", "tcp://*:7", "tcp://*:7"),
    ],
)
def test_replays_are_on_the_next_port_unless_an_address_is_given(
    address: str, replay: str | None, expected: str
) -> None:
    config = EngineConfig(kv_events=address, kv_events_replay=replay)
    assert config.events_addresses == (address, expected)
    assert EngineConfig().events_addresses is None


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "foretoken.core.tiers.events")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(InvalidRequest, match=r"^kv_events .*pip install 'foretoken\[events\]'"):
        open_events(kv_events=ANY)

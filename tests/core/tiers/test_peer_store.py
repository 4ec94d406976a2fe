"""The pools of peers as a store: what is read, when it counts, and peers that are gone."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

import pytest
import torch

from foretoken.core.interface.extras.transfers import PageOffer
from foretoken.core.tiers.keys import chain_keys, root_key
from foretoken.core.tiers.stores.peer_store import SHUNNED_SECONDS, PeerStore
from foretoken.radix_cache import HeldPages, PrefixCache
from support.loopback import LoopbackReader, LoopbackServer, take_notes

PAGE_SIZE, ROW_BYTES, NUM_PAGES = 4, (24, 8), 32
BYTES = sum(ROW_BYTES)
WHOLE = 12  # pages of a prompt


def tokens_of(seed: int) -> array[int]:
    return array("q", range(1000 * seed, 1000 * seed + WHOLE * PAGE_SIZE))


def keys_of(seed: int) -> list[bytes]:
    return list(chain_keys(root_key(b"fp", None), tokens_of(seed), PAGE_SIZE))


class Peer:
    """An engine that has computed prompts, and holds their pages. Its pages are random bytes."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(3)
        self.parts = [
            torch.randint(256, (NUM_PAGES, num_bytes), generator=made, dtype=torch.uint8)
            for num_bytes in ROW_BYTES
        ]
        self.cache = PrefixCache(NUM_PAGES, PAGE_SIZE)
        self.server = LoopbackServer(self.parts, self.cache.transfers.words)

    def offer(self, seed: int = 0) -> PageOffer:
        tokens = tokens_of(seed)
        lease = self.cache.acquire(tokens)
        assert self.cache.extend(lease, len(tokens))
        self.cache.release(lease, tokens, len(tokens))
        held = self.cache.transfers.hold(tokens, len(tokens))
        assert held is not None
        return self.offer_of(held, seed)

    def offer_of(self, held: HeldPages, seed: int) -> PageOffer:
        ids, memory = held.page_ids.tolist(), self.server.memory
        return PageOffer(held.name, memory, keys_of(seed)[-1], ids, held.slot, held.nonce)

    def record(self, page_id: int) -> bytes:
        return b"".join(part[page_id].numpy().tobytes() for part in self.parts)

    def take_notes(self) -> None:
        take_notes(self.server, self.cache.transfers)
        self.cache.check(())


@dataclass
class Here:
    """The store of an engine that reads."""

    capacity: int = 5 * BYTES
    now: float = 0.0
    reader: LoopbackReader = field(init=False)
    store: PeerStore = field(init=False)

    def __post_init__(self) -> None:
        self.reader = LoopbackReader(self.capacity)
        self.store = PeerStore(self.reader, BYTES, clock=lambda: self.now)

    def get(self, key: bytes) -> bytes | None:
        into = bytearray(BYTES)
        return bytes(into) if self.store.get(key, memoryview(into)) else None

    def gets(self, seed: int, first: int = 0) -> list[bytes | None]:
        return [self.get(key) for key in keys_of(seed)[first:]]


@pytest.mark.parametrize("first", [0, 1, 7, WHOLE - 1])
def test_pages_are_read_in_a_few_calls_and_are_those_of_their_tokens(first: int) -> None:
    peer, here = Peer(), Here()
    peer.offer(1)
    offer = peer.offer()
    here.store.meet(offer)
    assert offer.is_met
    assert here.store.find([*keys_of(0)[first:], b"a further page"]) == WHOLE - first
    assert len(here.store) == WHOLE
    assert here.gets(0, first) == [peer.record(each) for each in offer.page_ids[first:]]
    assert here.reader.calls.count("read") == -(-(WHOLE - first) // 5)
    here.store.end(offer)
    peer.take_notes()
    assert peer.cache.transfers.ended["done"] == 1
    assert (len(here.store), here.store.find(keys_of(0)), here.get(keys_of(0)[0])) == (0, 0, None)


def test_a_part_that_is_let_go_takes_no_page_of_the_whole_along() -> None:
    """A prompt's later transfer has the pages of its earlier one, which ends while it is read."""
    peer, here = Peer(), Here()
    offer, num_pages = peer.offer(), 7
    held = peer.cache.transfers.hold(tokens_of(0), num_pages * PAGE_SIZE)
    assert held is not None
    part = replace(peer.offer_of(held, 0), key=keys_of(0)[num_pages - 1])
    here.store.meet(part)
    assert here.store.find(keys_of(0)) == num_pages
    here.store.meet(offer)
    assert here.store.find(keys_of(0)) == WHOLE
    here.store.end(part)
    assert here.gets(0) == [peer.record(each) for each in offer.page_ids]
    here.store.end(offer)
    peer.take_notes()
    assert peer.cache.transfers.ended["done"] == 2


def test_pages_of_other_tokens_are_not_found() -> None:
    peer, here = Peer(), Here()
    here.store.meet(peer.offer())
    assert here.store.find(keys_of(1)) == 0
    assert here.store.find([b"one too many", *keys_of(0)]) == 0
    assert here.store.find(keys_of(0)[:-1]) == 0, "the last key is that of the whole offer"
    assert here.store.refused == {}


def test_what_is_read_when_it_is_held_no_longer_does_not_count() -> None:
    peer, here = Peer(), Here()
    offer = peer.offer()
    here.store.meet(offer)
    assert here.store.find(keys_of(0)) == WHOLE
    assert here.get(keys_of(0)[0]) is not None

    def end_and_overwrite(name: str) -> None:
        if name == "read":
            peer.cache.transfers.end(offer.name)
            peer.parts[0].fill_(0)

    here.reader.before = end_and_overwrite
    assert here.gets(0)[4:] == [None] * (WHOLE - 4)
    assert here.store.refused == {"expired": 1}
    assert here.store.stats() == {"void": 5}


def test_an_offer_that_ended_before_it_came_is_refused_as_is_one_that_is_used_again() -> None:
    peer, here = Peer(), Here()
    offer = peer.offer()
    peer.cache.transfers.end(offer.name)
    other = peer.offer(1)  # takes the slot
    assert other.slot == offer.slot
    here.store.meet(offer)
    assert not offer.is_met
    assert here.store.find(keys_of(0)) == 0
    assert here.store.refused == {"expired": 1}


def test_a_peer_that_is_gone_is_left_alone_for_a_while_and_others_are_not() -> None:
    dead, alive, here = Peer(), Peer(), Here()
    lost, again, kept = dead.offer(), dead.offer(1), alive.offer(2)
    here.store.meet(lost)
    assert here.store.find(keys_of(0)) == WHOLE
    dead.server.is_dead = True
    assert here.get(keys_of(0)[0]) is None
    assert here.store.refused == {"unreachable": 1}
    num_calls = len(here.reader.calls)
    here.store.meet(again)
    here.store.end(lost)
    assert len(here.reader.calls) == num_calls, "it is not asked again"
    here.store.meet(kept)
    assert here.store.find(keys_of(2)) == WHOLE
    assert None not in here.gets(2)
    dead.server.is_dead, here.now = False, SHUNNED_SECONDS
    here.store.meet(again)
    assert here.store.find(keys_of(1)) == WHOLE
    assert None not in here.gets(1)


@pytest.mark.parametrize("ends_first", [0, 1])
def test_of_two_offers_of_one_prompt_either_may_end_first(ends_first: int) -> None:
    peers, here = (Peer(), Peer()), Here()
    offers = [peer.offer() for peer in peers]
    assert offers[0].key == offers[1].key
    for offer in offers:
        here.store.meet(offer)
        assert here.store.find(keys_of(0)) == WHOLE
    assert len(here.store) == 2 * WHOLE
    first, second = offers[ends_first], offers[1 - ends_first]
    here.store.end(first)
    assert None not in here.gets(0)
    assert here.store.find(keys_of(0)) == WHOLE
    here.store.renew()
    here.store.end(second)
    for peer in peers:
        peer.take_notes()
        assert len(peer.cache.transfers) == 0
    assert (len(here.store), here.store._pages, here.store._keys) == (0, {}, {})


def test_offers_are_renewed_and_a_closing_engine_ends_them() -> None:
    peer, here = Peer(), Here()
    here.store.meet(peer.offer())
    peer.cache.tick(20.0)
    here.store.renew()
    peer.take_notes()
    peer.cache.tick(40.0)
    assert len(peer.cache.transfers) == 1
    here.store.close()
    peer.take_notes()
    assert len(peer.cache.transfers) == 0
    assert here.reader.is_closed


def test_an_offer_with_another_word_is_not_believed() -> None:
    peer, here = Peer(), Here()
    here.store.meet(replace(peer.offer(), nonce=5))
    assert here.store.find(keys_of(0)) == 0
    assert here.store.refused == {"expired": 1}

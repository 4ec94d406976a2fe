"""Prefill and decode apart say what one engine says: real models, whatever befalls transfers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.execution.proposer import Proposer
from foretoken.core.interface.extras.request_extras import Transfer
from foretoken.core.interface.request import Request
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native import native_library
from foretoken.core.scheduling.leases import hold_prompt
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.core.tiers.keys import PageKeys
from foretoken.core.tiers.page_records import PageRecords
from foretoken.core.tiers.stores.peer_store import PeerStore
from foretoken.core.tiers.tiers import Tiers
from foretoken.core.tiers.transfer_params import TransferParams
from foretoken.radix_cache import PrefixCache
from foretoken.radix_cache.transfers import SECONDS
from support.checkpoints import make_checkpoint
from support.equality_harness import House, shuffled, tiny_house
from support.fake_model import Driver
from support.fake_tiers import CallingDriver, LateDriver
from support.loopback import LoopbackReader, LoopbackServer, take_notes

pytestmark = pytest.mark.slow

FINGERPRINT = b"house"
Befall = Callable[["Decode", str], None]


class Prefill:
    """P: computes every prompt of a run and holds its pages."""

    def open(self, cache: PrefixCache, pool: KVPool, proposer: Proposer | None) -> Tiers:
        keys = PageKeys(FINGERPRINT, cache.num_total_pages, cache.page_size)
        cache.tree.add_observer(keys)
        rows = () if proposer is None else proposer.stored
        self.parts = [pool.data, *(each.source for each in rows)]
        self.cache, self.locks = cache, cache.transfers
        self.locks.max_pages = 10**6
        self.server = LoopbackServer(self.parts, self.locks.words)
        self.params = make_params(cache, keys, self.parts, server=self.server)
        self.requests: dict[str, Request] = {}
        return Tiers(cache.tree, keys, PageRecords(self.parts), [])

    def drive(self, scheduler: Scheduler, runner: Any) -> Driver:
        prefill = self

        class Handing(CallingDriver):
            def add(self, *requests: Request) -> None:
                for request in requests:
                    request.transfer = Transfer(hands_over=True)
                    params = replace(request.sampling.params, max_tokens=1, min_tokens=0)
                    request.sampling = replace(request.sampling, params=params)
                    prefill.requests[request.request_id] = request
                super().add(*requests)

        return Handing(scheduler, runner)

    def written(self, request_id: str) -> Any:
        """The parameters of an answer, as they come over the wire; held anew if that is over."""
        request = self.requests[request_id]
        handed = request.transfer.handed
        if handed is None or handed.name not in self.locks._held:
            hold_prompt(self.cache, request)
        return json.loads(json.dumps(self.params.write(request)))


_prefills: dict[tuple[House, str | None], Prefill] = {}


def prefill_of(house: House, drafter: str | None = None) -> Prefill:
    """One that has computed all requests of a house, made once."""
    if (house, drafter) not in _prefills:
        made = _prefills[house, drafter] = Prefill()
        house.run(shuffled(1), drafter, num_pages=3000, tiers=made)
    return _prefills[house, drafter]


def make_params(
    cache: PrefixCache,
    keys: PageKeys,
    parts: list[torch.Tensor],
    *,
    server: LoopbackServer | None = None,
    end_offer: Any = None,
) -> TransferParams:
    return TransferParams(
        "secret",
        FINGERPRINT,
        cache,
        keys,
        memory=None if server is None else server.memory,
        end_offer=end_offer,
        row_bytes=tuple(part[0].nbytes for part in parts),
        clock=lambda: 0.0,
    )


class Decode:
    """D: goes on with what P has computed. ``befall`` is called before each call to a peer."""

    def __init__(
        self, prefill: Prefill, befall: Befall = lambda _, __: None, *, seed: int = 0
    ) -> None:
        self.prefill, self.rng = prefill, random.Random(seed)
        self._befall = befall
        self.is_late = False
        self.change: Callable[[str, Any], Any] = lambda _, params: params
        self._driver: Driver | None = None

    def open(self, cache: PrefixCache, pool: KVPool, proposer: Proposer | None) -> Tiers:
        keys = PageKeys(FINGERPRINT, cache.num_total_pages, cache.page_size)
        cache.tree.add_observer(keys)
        rows = () if proposer is None else proposer.stored
        self.parts = [pool.data, *(each.source for each in rows)]
        records = PageRecords(self.parts, [pool.data, *(each.target for each in rows)])
        reader = LoopbackReader(3 * records.num_bytes)
        reader.before = lambda name: self._befall(self, name)
        self.peers = PeerStore(reader, records.num_bytes, clock=self._now)
        self.cache, self._keys = cache, keys
        return Tiers(cache.tree, keys, records, [], self.peers, clock=self._now, least_tokens=4)

    def _now(self) -> float:
        return 0.0 if self._driver is None else self._driver.now

    def drive(self, scheduler: Scheduler, runner: Any) -> Driver:
        loads, decode = scheduler.page_loads, self
        assert loads is not None
        params = make_params(self.cache, self._keys, self.parts, end_offer=loads.end_offer)

        def add(driver: Driver, requests: tuple[Request, ...]) -> None:
            for request in requests:
                carried = decode.change(
                    request.request_id, decode.prefill.written(request.request_id)
                )
                offer = params.read(carried).offer
                if offer is not None and params.check(offer, len(request.tokens)):
                    request.transfer = Transfer(offer=offer)

        if self.is_late:

            class Late(LateDriver):
                def add(self, *requests: Request) -> None:
                    add(self, requests)
                    super().add(*requests)

            self._driver = Late(scheduler, runner, self.rng)
        else:

            class Calling(CallingDriver):
                def add(self, *requests: Request) -> None:
                    add(self, requests)
                    super().add(*requests)

            self._driver = Calling(scheduler, runner)
        return self._driver

    def check(self, *, all_end: bool = True) -> None:
        """No page is locked afterwards, and both sides' audits are sound."""
        prefill = self.prefill
        if prefill.server.is_dead:
            prefill.locks.close()
        take_notes(prefill.server, prefill.locks)
        if all_end:
            assert len(prefill.locks) == 0
        prefill.cache.tick(prefill.locks.now + SECONDS)
        prefill.cache.check(())
        self.cache.check(())
        assert prefill.cache.num_evictable_pages == prefill.cache.tree.num_pages
        assert self.cache.num_evictable_pages == self.cache.tree.num_pages
        assert len(self.peers) == 0


def num_loaded(house: House) -> int:
    return sum(request.usage.loaded_tokens for request in house.requests)


@pytest.fixture(scope="module", params=["auto", "int8"])
def house(request: pytest.FixtureRequest) -> House:
    return tiny_house("bfloat16", "native", request.param)


@pytest.mark.parametrize("drafter", [None, "auto+lm", "block", "auto+eagle"])
def test_apart_equals_together(house: House, drafter: str | None) -> None:
    """Every sampling parameter; pages with a head's KV; prompts that share a beginning."""
    decode = Decode(prefill_of(house, drafter))
    house.check(house.run(shuffled(3), drafter, tiers=decode))
    assert num_loaded(house) > 500
    decode.check()


@pytest.mark.parametrize("kind", ["gemma4_shared", "deepseek_v3"])
def test_pages_with_blocks_of_several_shapes_are_handed_over(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    sizes = {"vocab_size_per_layer_input": 256} if kind.startswith("gemma4") else {}
    folder = make_checkpoint(tmp_path, kind, vocab_size=256, **sizes)
    house = House.load((folder, folder), "float32", "native")
    decode = Decode(prefill_of(house))
    house.check(house.run(shuffled(3)[:20], None, tiers=decode))
    assert num_loaded(house) > 300


def test_a_small_pool_and_requests_that_are_preempted_change_no_token(house: House) -> None:
    decode = Decode(prefill_of(house))
    house.check(house.run(shuffled(4), "auto+lm", num_pages=59, tiers=decode))
    assert house.scheduler.num_preemptions > 0
    assert num_loaded(house) > 300
    decode.check()


def test_a_head_drafts_behind_a_transfer_as_behind_a_hit() -> None:
    house, order = tiny_house("bfloat16", "native"), shuffled(7)[:8]

    def accepted(**options: Any) -> list[tuple[int, int]]:
        house.check(house.run(order, "block", max_running=1, page_size=16, **options))
        return [(each.usage.proposed_tokens, each.usage.accepted_tokens) for each in house.requests]

    after_a_hit, prefill = accepted(repeats=2), Prefill()
    house.run(order, "block", max_running=1, page_size=16, tiers=prefill)
    decode = Decode(prefill)
    assert accepted(tiers=decode) == after_a_hit
    assert num_loaded(house) > 150
    decode.check()


# -- what befalls transfers -----------------------------------------------------------------------


def dies(decode: Decode, name: str) -> None:
    if decode.rng.random() < 0.05:
        decode.prefill.server.is_dead = True


def fails(decode: Decode, name: str) -> None:
    if decode.rng.random() < 0.1:
        decode.peers._shunned.clear()
        raise OSError("injected")


def expires(decode: Decode, name: str) -> None:
    """P lets all pages go while they are read, and writes others there."""
    if name == "read" and decode.rng.random() < 0.1:
        locks = decode.prefill.locks
        for held in list(locks._held):
            locks.end(held)
        for part in decode.prefill.parts:
            part.view(torch.uint8).fill_(255)


FAULTS: dict[str, Befall] = {
    "dies": dies,
    "fails": fails,
    "expires": expires,
    "is late": lambda _, __: None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_that_befalls_a_peer_changes_a_token(fault: str) -> None:
    house, prefill = tiny_house("bfloat16", "native"), Prefill()
    house.run(shuffled(2), None, num_pages=3000, tiers=prefill)
    decode = Decode(prefill, FAULTS[fault])
    decode.is_late = fault == "is late"
    house.check(house.run(shuffled(21), "auto+lm", num_pages=120, tiers=decode))
    decode.check(all_end=fault != "fails")


def test_200_requests_with_any_parameters_are_served_as_by_one_engine() -> None:
    """Forged, foreign, replayed and cut parameters, and a peer that fails, all mixed."""
    house, rng = tiny_house("bfloat16", "native"), random.Random(11)
    prefill = prefill_of(house)
    used: dict[str, Any] = {}
    num_asked, causes = 0, set[str]()

    def change(request_id: str, params: Any) -> Any:
        others = [each for each in prefill.requests if each != request_id]
        match rng.randrange(8):
            case 0:  # of another prompt
                return prefill.written(rng.choice(others))
            case 1:
                params["remote_block_ids"] = [0] * len(params["remote_block_ids"])
            case 2:
                return {"do_remote_prefill": True, "remote_block_ids": list(range(9))}
            case 3 if "foretoken" in params:
                params["foretoken"]["until"] += 1
            case 4 if request_id in used:
                return used[request_id]
            case _:
                used[request_id] = params
        return params

    while num_asked < 200:
        decode = Decode(prefill, fails if num_asked % 4 else lambda _, __: None, seed=num_asked)
        decode.change = change
        order = shuffled(40 + num_asked)
        house.check(house.run(order, "auto+lm", num_pages=200, tiers=decode))
        num_asked += len(order)
        causes |= {*decode.cache.transfers.refused, *decode.peers.refused}
        decode.check(all_end=False)
    assert causes >= {"unsigned", "foreign", "unreachable", "expired"}


def test_a_word_that_is_not_looked_at_would_give_wrong_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above tells: without the word, pages that were let go reach answers."""
    house, prefill = tiny_house("bfloat16", "native"), Prefill()
    monkeypatch.setattr(PeerStore, "_is_held", lambda *_: True)
    house.run(shuffled(2)[:20], None, num_pages=3000, tiers=prefill)
    served = house.run(shuffled(2)[:20], None, num_pages=120, tiers=Decode(prefill, expires))
    assert any(served[name] != house.solo[name] for name in served)

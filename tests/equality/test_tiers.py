"""No tier changes a token: same seed, same tokens, whatever is stored, lost, late or damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.execution.proposer import Proposer
from foretoken.core.interface.extras.tiers import IsValid
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native import native_library
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.core.tiers.keys import PageKeys
from foretoken.core.tiers.page_records import PageRecords, StateRecords
from foretoken.core.tiers.stores.slab_files import BLOCK
from foretoken.core.tiers.stores.slab_store import SlabStore
from foretoken.core.tiers.tiers import StateTiers, Tiers
from foretoken.radix_cache import PrefixCache
from foretoken.radix_cache.audit import run as run_checks
from support.checkpoints import make_checkpoint
from support.equality_harness import House, shuffled, tiny_house
from support.fake_model import Driver
from support.fake_tiers import CallingDriver, LateDriver
from support.tiny_models import save_tiny

FEW_PAGES = 59  # a tenth of what the requests fill
FAULTS = ["raises", "lies", "damages", "is late", "is full", "is flushed"]


class FaultyStore(SlabStore):
    """A store on a real disk; ``fault`` names what befalls it now and then."""

    def __init__(
        self, folder: Path, page_bytes: int, fault: str | None, rng: random.Random
    ) -> None:
        self._fault, self._rng = fault, rng
        self._folder = folder
        self.num_faults = 0
        num_bytes = BLOCK + 64 * (2 * BLOCK) if fault == "is full" else 64 << 20
        super().__init__(folder, b"house", page_bytes, num_bytes, slab_bytes=1 << 20)

    def _happens(self, fault: str, share: float) -> bool:
        happens = fault == self._fault and self._rng.random() < share
        self.num_faults += happens
        return happens

    def _may_raise(self) -> None:
        if self._happens("raises", 0.02):
            raise OSError("injected")

    def find(self, keys: Sequence[bytes]) -> int:
        if self._happens("lies", 0.7):
            return self._rng.randrange(len(keys) + 5)
        return super().find(keys)

    def get(self, key: bytes, into: memoryview) -> bool:
        self._may_raise()
        if self._happens("damages", 0.1):
            self._damage()
        return super().get(key, into)

    def put(self, key: bytes, tag: bytes, page: memoryview, is_valid: IsValid) -> bool:
        self._may_raise()
        if self._happens("is flushed", 0.01):
            self.flush()
        return super().put(key, tag, page, is_valid)

    def _damage(self) -> None:
        """Overwrite a tenth of what is stored."""
        for path in self._folder.glob("*/slab-*"):
            with path.open("r+b") as slab:
                for start in range(0, os.path.getsize(path), BLOCK):
                    if self._rng.random() < 0.1:
                        slab.seek(start)
                        slab.write(self._rng.randbytes(200))


class OnDisk:
    """Tiers of a house's runs, over one folder: each run is a new process that finds the old ones'
    pages.
    """

    def __init__(self, folder: Path, fault: str | None = None) -> None:
        self._folder, self._fault = folder, fault
        self._rng = random.Random(fault)
        self._driver: Driver | None = None
        self.stores: list[FaultyStore] = []

    def open(self, cache: PrefixCache, pool: KVPool, proposer: Proposer | None) -> Tiers:
        keys = PageKeys(b"house", cache.num_total_pages, cache.page_size)
        cache.tree.add_observer(keys)
        rows = () if proposer is None else proposer.stored
        records = PageRecords(
            [pool.data, *(each.source for each in rows)],
            [pool.data, *(each.target for each in rows)],
        )
        self._driver = None
        self.close()
        states = None
        if pool.states is not None and cache.states is not None:
            slots = StateRecords(pool.states)
            states = StateTiers(cache.states, slots, [self._store("states", slots)])
        self.tiers = Tiers(
            cache.tree,
            keys,
            records,
            [self._store("pages", records)],
            clock=self._now,
            least_tokens=4,
            states=states,
        )
        return self.tiers

    def _store(self, name: str, records: PageRecords) -> FaultyStore:
        store = FaultyStore(self._folder / name, records.num_bytes, self._fault, self._rng)
        self.stores.append(store)
        return store

    def _now(self) -> float:
        return 0.0 if self._driver is None else self._driver.now

    def drive(self, scheduler: Scheduler, runner: Any) -> Driver:
        if self._fault == "is late":
            self._driver = LateDriver(scheduler, runner, self._rng)
        else:
            self._driver = CallingDriver(scheduler, runner)
        if self._fault == "raises":  # it is left alone for ten seconds
            self._driver.step_seconds = 0.5
        return self._driver

    def close(self) -> None:
        for store in self.stores:
            store.check()
            store.close()


@pytest.fixture(scope="module", params=["auto", "int8"])
def house(request: pytest.FixtureRequest) -> House:
    return tiny_house("bfloat16", "native", request.param)


def num_loaded(house: House) -> int:
    return sum(request.usage.loaded_tokens for request in house.requests)


@pytest.mark.parametrize("drafter", [None, "auto+lm", "block", "auto+eagle"])
def test_a_small_pool_and_a_disk_change_no_token_nor_does_a_restart(
    house: House, drafter: str | None, tmp_path: Path
) -> None:
    """Every sampling parameter."""
    disk = OnDisk(tmp_path)
    for seed in (4, 5):
        house.check(house.run(shuffled(seed), drafter, num_pages=FEW_PAGES, tiers=disk))
        assert house.scheduler.num_preemptions > 0
    assert num_loaded(house) > 500
    for request in house.requests:
        if request.prompt_len > 40:
            assert request.usage.cached_tokens > 0.8 * request.prompt_len
    disk.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_of_a_store_changes_a_token(fault: str, tmp_path: Path) -> None:
    house, disk = tiny_house("bfloat16", "native"), OnDisk(tmp_path, fault)
    drafters: list[str | None] = [None, "auto+lm", "block"]
    for round in range(2):
        drafter = drafters[(FAULTS.index(fault) + 1) % 3]
        order = shuffled(round)[::2]
        house.check(house.run(order, drafter, num_pages=FEW_PAGES, tiers=disk))
    assert num_loaded(house) > 0
    disk.close()
    if fault == "is late":
        assert house.scheduler.page_loads is not None
        assert house.scheduler.page_loads.num_late > 0
    elif fault == "is full":
        assert disk.stores[-1].stats()["evicted"] > 0
    else:
        assert sum(store.num_faults for store in disk.stores) > 2
    if fault == "damages":
        assert sum(store.stats()["unsound"] for store in disk.stores) > 2


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> House:
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    torch.set_num_threads(1)
    where = tmp_path_factory.mktemp("hybrid")
    folder = make_checkpoint(where / "target", "qwen3_5", vocab_size=256)
    draft = make_checkpoint(where / "draft", "qwen3", vocab_size=256)
    options = {"dtype": "float32", "exact": "batch", "backend": "native"}
    return House(
        load_decoder(folder, **options),  # type: ignore[arg-type]
        load_decoder(draft, **options),  # type: ignore[arg-type]
        indices=range(12),
    )


@pytest.mark.parametrize("fault", [None, "raises", "lies", "damages", "is late", "is flushed"])
def test_states_that_come_back_or_are_lost_change_no_token(
    hybrid: House, fault: str | None, tmp_path: Path
) -> None:
    """Few slots and pages; the second run is a new process over the folder of the first."""
    loads_states(hybrid, OnDisk(tmp_path, fault))


def loads_states(house: House, disk: OnDisk) -> None:
    """Run twice over a folder: tokens are those of each request alone, and something is loaded."""
    loaded, order = 0, [index for index in shuffled(8) if str(index) in house.solo]
    for drafter in (None, "wrong"):
        options = {"num_slots": 4, "state_interval": 16, "repeats": 2}
        house.check(house.run(order, drafter, num_pages=24, tiers=disk, **options))
        run_checks(house.scheduler.checks())
        assert house.scheduler.cache.states is not None
        assert not house.scheduler.cache.states.loading
        loaded += num_loaded(house)
    assert loaded > 0
    disk.close()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["jamba", "kimi_linear", "mamba2"])
def test_states_of_modules_that_come_back_change_no_token(model_type: str, tmp_path: Path) -> None:
    """Models that run through transformers' modules; one has no keys and values at all."""
    torch.set_num_threads(1)
    target = load_decoder(save_tiny(tmp_path / "target", model_type, vocab_size=256))
    assert target.path == "transformers"
    draft = load_decoder(make_checkpoint(tmp_path / "draft", "qwen3", vocab_size=256))
    loads_states(House(target, draft, indices=range(4)), OnDisk(tmp_path / "disk"))


@pytest.mark.parametrize("drafter", ["block", "eagle3"])
def test_a_head_drafts_after_a_load_as_after_a_hit(drafter: str, tmp_path: Path) -> None:
    house, order = tiny_house("bfloat16", "native"), shuffled(7)[:8]

    def accepted(**options: Any) -> list[tuple[int, int]]:
        house.check(house.run(order, drafter, max_running=1, page_size=16, **options))
        usages = [request.usage for request in house.requests]
        assert sum(usage.cached_tokens for usage in usages) > 300
        return [(usage.proposed_tokens, usage.accepted_tokens) for usage in usages]

    after_a_hit, disk = accepted(repeats=2), OnDisk(tmp_path)
    house.run(order, drafter, max_running=1, page_size=16, tiers=disk)
    assert accepted(tiers=disk) == after_a_hit
    assert num_loaded(house) > 150
    disk.close()

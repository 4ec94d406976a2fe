"""Sizes of KV pools that do not fit into memory are refused when an engine is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretoken.api.build import memory
from foretoken.api.build.engine_builder import build
from foretoken.api.build.kv import pools as kv_pools
from foretoken.api.build.kv.pools import (
    LEAST_TOKENS,
    StateCounts,
    count_pages,
    count_states,
    make_pools,
)
from foretoken.api.build.model_files import BUILTIN
from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.state_pool import bytes_per_log, bytes_per_slot
from support.checkpoints import make_checkpoint

MIB = 2**20


@pytest.fixture(scope="module")
def target() -> Decoder:
    return load_decoder(BUILTIN / "target", dtype="float32")


def pages(target: Decoder, **options: Any) -> int:
    config = EngineConfig(device="cpu", **options)
    return count_pages(target, [], config, config.sizes("cpu"))


def bytes_of(target: Decoder, num_pages: int) -> int:
    page_size = EngineConfig().sizes("cpu").page_size
    return num_pages * target.bytes_per_page(page_size=page_size, kv_dtype="auto")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_free(num_bytes: int) -> None:
        for module in (kv_pools, memory):
            monkeypatch.setattr(module, "free_memory", lambda device: num_bytes)

    return set_free


def test_a_pool_larger_than_free_memory_is_refused_with_both_numbers(target, free) -> None:
    """Memory is granted on first touch: the process would be killed once the pool fills."""
    free(600 * MIB)
    with pytest.raises(ModelLoadError, match=r"2 GiB .* 600 MiB: lower --kv-memory") as refused:
        pages(target, kv_memory="2GiB")
    assert "--kv-tokens" in str(refused.value)
    with pytest.raises(ModelLoadError, match="600 MiB: lower --kv-memory or --kv-tokens"):
        pages(target, kv_tokens=10**9)


def test_a_pool_that_just_fits_is_granted(target, free) -> None:
    free(bytes_of(target, 50))
    assert pages(target, kv_memory=bytes_of(target, 50)) == 50
    assert pages(target, kv_tokens=50 * 16) == 50
    with pytest.raises(ModelLoadError):
        pages(target, kv_tokens=50 * 16 + 1)


def test_the_default_is_a_quarter_of_what_is_free_or_refused_if_that_serves_nothing(
    target, free
) -> None:
    least = LEAST_TOKENS // 16
    free(4 * bytes_of(target, least))
    assert pages(target) == least
    free(4 * bytes_of(target, least) - 1)
    with pytest.raises(ModelLoadError, match=r"256 tokens need .* or set --kv-memory"):
        pages(target)


def test_the_default_may_be_small_where_more_could_never_be_in_use(target, free) -> None:
    free(4 * bytes_of(target, 4))
    assert pages(target, max_model_len=32, max_running=2) == 4
    free(0)
    with pytest.raises(ModelLoadError, match="64 tokens need"):
        pages(target, max_model_len=32, max_running=2)


def test_an_engine_in_a_small_container_is_refused_instead_of_killed(free) -> None:
    free(100 * MIB)
    told = "the KV pool 4 GiB, but only 100 MiB of memory are free; use --kv-m"
    with pytest.raises(ModelLoadError, match=told):
        build("builtin", EngineConfig(device="cpu", kv_memory="4GiB"))


# -- recurrent states


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(make_checkpoint(tmp_path_factory.mktemp("hybrid"), "qwen3_5"))


def states(hybrid: Decoder, **options: Any) -> StateCounts:
    config = EngineConfig(device="cpu", **options)
    return count_states(hybrid, config, config.sizes("cpu"))


def test_states_take_half_of_the_memory_for_kv_by_default(hybrid, free) -> None:
    free(100 * MIB)  # of which a quarter is for KV
    found = states(hybrid, max_running=16)
    slot = bytes_per_slot(hybrid.states, hybrid.dtype)
    assert 12.5 * MIB - slot < found.num_bytes <= 12.5 * MIB
    assert found == states(hybrid, state_memory="12.5MiB", max_running=16)
    config = EngineConfig(device="cpu", max_running=400)
    num_pages = count_pages(hybrid, [], config, config.sizes("cpu"), found.num_bytes)
    assert num_pages == (25 * MIB - found.num_bytes) // bytes_of(hybrid, 1)
    assert pages(hybrid, kv_memory="24MiB") == 24 * MIB // bytes_of(hybrid, 1)


def test_a_log_is_had_for_each_request_and_two_slots_more(hybrid, free) -> None:
    free(4 * 2**30)
    slot = bytes_per_slot(hybrid.states, hybrid.dtype)
    log = bytes_per_log(hybrid.states, hybrid.dtype, page_size=16)
    assert states(hybrid, state_memory=7 * slot + 5 * log) == (7, 5, 7 * slot + 5 * log)
    assert states(hybrid, state_memory=2 * slot + log) == (2, 1, 2 * slot + log)
    assert states(hybrid, state_memory="1GiB", max_running=3)[:2] == (3 + 3 * 64, 3)


@pytest.fixture(scope="module")
def convolving(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(make_checkpoint(tmp_path_factory.mktemp("conv"), "lfm2"))


def test_small_states_are_no_more_than_pages_and_kept_at_the_end_of_each(convolving, free) -> None:
    """Three layers of two inputs of 64 channels; keys and values of one layer."""
    free(4 * MIB)
    slot, page = bytes_per_slot(convolving.states, convolving.dtype), bytes_of(convolving, 1)
    assert (slot, page) == (3 * 2 * 64 * 4, 2 * 2 * 16 * 16 * 4)
    config = EngineConfig(device="cpu", max_running=4)
    found = count_states(convolving, config, config.sizes("cpu"))
    num_pages = count_pages(convolving, [], config, config.sizes("cpu"), found.num_bytes)
    assert abs(found.num_slots - found.num_logs - num_pages) <= 2
    assert found.num_bytes < MIB // 2 - 50 * slot  # less than half of the memory
    assert states(convolving, max_running=2, state_memory="1MiB").num_slots == 2 + 2 * 64


@pytest.mark.parametrize(
    ("kind", "given", "interval"),
    [("qwen3_5", None, 4096), ("lfm2", None, 16), ("lfm2", 64, 64), ("lfm2", 0, 0)],
)
def test_states_are_kept_as_far_apart_as_their_size_asks(
    kind: str, given: int | None, interval: int, tmp_path: Path
) -> None:
    config = EngineConfig(device="cpu", kv_tokens=256, state_interval=given)
    engine = build(make_checkpoint(tmp_path, kind), config).engine
    assert engine.scheduler.cache.states is not None
    assert engine.scheduler.cache.states.interval == interval


def test_too_little_memory_for_two_states_is_refused_with_what_is_needed(hybrid, free) -> None:
    free(4 * 2**30)
    slot = bytes_per_slot(hybrid.states, hybrid.dtype)
    log = bytes_per_log(hybrid.states, hybrid.dtype, page_size=16)
    with pytest.raises(InvalidRequest, match=f"at least {2 * slot + log} bytes .2 x") as refused:
        states(hybrid, state_memory=2 * slot + log - 1)
    assert refused.value.param == "state_memory"
    with pytest.raises(InvalidRequest, match=r"16, 32 or 64 .*, not 8") as refused:
        states(hybrid, page_size=8)
    assert refused.value.param == "page_size"


def test_a_pool_of_states_is_the_targets_alone(hybrid, target, free) -> None:
    free(4 * 2**30)
    config = EngineConfig(device="cpu", kv_tokens=64, state_memory="1MiB", max_running=2)
    pool, other = make_pools(hybrid, [target], config, config.sizes("cpu"))
    assert pool.states is not None
    assert (pool.states.num_logs, other.states) == (2, None)
    free(MIB // 2)
    with pytest.raises(ModelLoadError, match="larger than the free memory"):
        make_pools(hybrid, [], config, config.sizes("cpu"))

"""Sizes of KV pools that do not fit into memory are refused when an engine is built."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from foretoken.api.build import engine_builder, kv_pools
from foretoken.api.build.engine_builder import build
from foretoken.api.build.kv_pools import LEAST_TOKENS, count_pages
from foretoken.api.build.model_files import BUILTIN
from foretoken.core.config import EngineConfig
from foretoken.core.errors import ModelLoadError
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder

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
        for module in (kv_pools, engine_builder):
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
    with pytest.raises(ModelLoadError, match=r"256 tokens need .*, or set --kv-memory"):
        pages(target)


def test_the_default_may_be_small_where_more_could_never_be_in_use(target, free) -> None:
    free(4 * bytes_of(target, 4))
    assert pages(target, max_model_len=32, max_running=2) == 4
    free(0)
    with pytest.raises(ModelLoadError, match="64 tokens need"):
        pages(target, max_model_len=32, max_running=2)


def test_an_engine_in_a_small_container_is_refused_instead_of_killed(free, caplog) -> None:
    free(100 * MIB)
    with pytest.raises(ModelLoadError, match=r"4 GiB .* 100 MiB: lower --kv-memory"):
        build("builtin", EngineConfig(device="cpu", kv_memory="4GiB"))
    assert not [r for r in caplog.records if "weights" in r.message]


def test_weights_larger_than_free_memory_are_warned_of_before_they_are_read(free, caplog) -> None:
    free(1000)
    with caplog.at_level(logging.WARNING), pytest.raises(ModelLoadError, match="set --kv-memory"):
        build("builtin", EngineConfig(device="cpu"))
    (warning, _) = [r.message for r in caplog.records if "weights" in r.message]
    assert warning.startswith("target: the weights have ")
    assert warning.endswith(" and 1000 bytes of memory are free")

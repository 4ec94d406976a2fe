"""Every scaled KV dtype of the table: what a model makes of it, and where it can be had."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from foretoken.api.build.engine_builder import build
from foretoken.api.build.kv.pools import count_pages
from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.interface.kv_codec import NATIVE, SCALED, KvDtype
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.native import native_library
from foretoken.core.ops.torch.torch_ops import TorchOps
from support.checkpoints import VOCAB_SIZE, ModelDriver, make_checkpoint
from support.equality_harness import NUM_TOKENS, REQUESTS, House, shuffled, tiny_house
from support.native_variants import slow

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = tuple(codec.name for codec in SCALED)
BACKENDS = [
    f"{dtype}-{backend}-{kind}"
    for kind in KINDS
    for backend in ("torch", *(("native",) if kind in NATIVE else ()))
    for dtype in ("float32", "bfloat16")
]
# Relative errors of logits, and how many of a hundred top tokens are other ones, at most.
LIMITS: Mapping[KvDtype, tuple[float, int]] = {"int8": (0.05, 10), "fp8": (0.05, 10)}


# -- a model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder_of(tmp_path_factory: pytest.TempPathFactory):
    """A decoder by its dtype and backend."""
    folder = make_checkpoint(tmp_path_factory.mktemp("scaled"), "qwen3_layer_types")
    made: dict[str, Decoder] = {}

    def find(kind: str) -> Decoder:
        dtype, backend = kind.split("-")
        if backend == "native" and native_library() is None:
            pytest.skip("no native kernels on this machine")
        if kind not in made:
            made[kind] = load_decoder(folder, dtype=dtype, backend=backend)
        return made[kind]

    return find


@pytest.mark.parametrize("small", KINDS)
@pytest.mark.parametrize("memory", ["3MiB", None])
def test_the_same_memory_holds_nearly_twice_the_tokens(
    memory: str | None, small: KvDtype, decoder_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.api.build.kv.pools.default_budget", lambda device: 3 * 2**20)
    decoder = decoder_of("bfloat16-torch")
    configs = [EngineConfig(kv_memory=memory, kv_cache_dtype=kind) for kind in ("auto", small)]
    pages = [count_pages(decoder, [decoder], config, config.sizes("cpu")) for config in configs]
    head_dim = decoder.config.head_dim
    assert pages[1] / pages[0] == pytest.approx(2 * head_dim / (head_dim + 4), rel=0.01)


@pytest.fixture(params=BACKENDS)
def setting(request: pytest.FixtureRequest, decoder_of) -> tuple[Decoder, KvDtype]:
    kind, _, kv_dtype = request.param.rpartition("-")
    return decoder_of(kind), kv_dtype


def tokens(length: int, seed: int = 5) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def test_logits_stay_near_those_of_full_keys_and_values(setting) -> None:
    """And are not the same."""
    decoder, kv_dtype = setting
    plain, small = ModelDriver(decoder), ModelDriver(decoder, kv_dtype=kv_dtype)
    expected, found = (d.prefill(d.add(tokens(300)), 300) for d in (plain, small))
    error = (found - expected).norm() / expected.norm()
    most, others = LIMITS[kv_dtype]
    assert 1e-3 < error < most
    assert (found.argmax(1) != expected.argmax(1)).float().mean() < others / 100


@pytest.mark.parametrize("page_size", [1, 16])
def test_cold_cached_decoded_and_verified_rows_are_the_same_bits(
    page_size: int, setting: tuple[Decoder, KvDtype]
) -> None:
    """Beside strangers, and with NaN in every slot that nobody has written."""
    ids = tokens(330)
    decoder, kv_dtype = setting
    num_pages = 2400 // page_size
    driver = ModelDriver(decoder, page_size=page_size, num_pages=num_pages, kv_dtype=kv_dtype)
    cold = driver.add(ids)
    expected = driver.prefill(cold, 330)
    cached = driver.add(ids, prefix=cold)
    stepwise = driver.add(ids)
    driver.prefill(stepwise, 130)
    if cached.num_computed < 320:
        driver.prefill(cached, 320)
    at = [cached.num_computed, 130]
    for sizes in ((1, 1), (5, 1), (1, 5), (1, 70), (2, 1), (1, 122)):
        sizes = tuple(min(n, 330 - start) for n, start in zip(sizes, at, strict=True))
        rows = [
            (s, ids[start : start + n], n)
            for s, start, n in zip((cached, stepwise), at, sizes, strict=True)
            if n
        ]
        stranger = driver.add(tokens(40, seed=sizes[1]))
        outs = driver.step([*rows, (stranger, list(stranger.tokens), 1)])
        for (stream, _, n), logits in zip(rows, outs, strict=False):
            start = stream.num_computed
            assert torch.equal(logits, expected[start : start + n]), (start, n)
            stream.num_computed += n
        driver.drop(stranger)
        at = [cached.num_computed, stepwise.num_computed]
    assert at[1] == 330


def test_one_sequence_whose_kv_is_nan_is_seen_and_harms_nobody_else(setting) -> None:
    ids = tokens(120)
    driver = ModelDriver(setting[0], kv_dtype=setting[1])
    expected = driver.prefill(driver.add(ids), 120)
    healthy, sick = driver.add(ids), driver.add(ids)
    for stream in (healthy, sick):
        driver.prefill(stream, 100)
    _, scales = driver.pool.split(driver.pool.data[sick.pages[6]].flatten(0, 2))
    scales[:, 3] = torch.nan
    sick_logits, logits = driver.step([(sick, ids[100:101], 1), (healthy, ids[100:103], 3)])
    assert torch.isnan(sick_logits).all()
    assert torch.equal(logits, expected[100:103])


def test_a_token_whose_hidden_state_is_nan_is_written_as_nan(setting) -> None:
    """Quantising must not make numbers of it: the next token's row has to be NaN, too."""
    decoder, kv_dtype = setting
    driver = ModelDriver(decoder, kv_dtype=kv_dtype)
    stream, row = driver.add(tokens(20)), decoder.weights.embedding[7]
    stream.tokens[10], kept = 7, row.clone()
    driver.prefill(stream, 10)
    row.fill_(torch.nan)
    driver.prefill(stream, 11)
    row.copy_(kept)
    assert torch.isnan(driver.prefill(stream, 12)).all()


# -- fp8 where there is no GPU ------------------------------------------------------------------


def test_fp8_is_refused_where_the_native_kernels_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="the native backend supports int8") as caught:
        EngineConfig(kv_cache_dtype="fp8", backend="native")
    assert caught.value.param == "kv_cache_dtype"
    folder = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ModelLoadError, match=r"native is not available: .* fp8$"):
        load_decoder(folder, backend="native", kv_dtype="fp8")


def test_fp8_needs_a_gpu_unless_torch_is_named(tmp_path: Path) -> None:
    """To fall back to torch would answer later than without it, and nobody asked for that."""
    config = EngineConfig(kv_cache_dtype="fp8", device="cpu", kv_tokens=64, draft="none")
    with pytest.raises(ModelLoadError, match="kv_cache_dtype fp8 needs a GPU"):
        build(make_checkpoint(tmp_path, "qwen3"), config)
    ops = load_decoder(tmp_path, backend="torch", kv_dtype="fp8").ops
    assert isinstance(ops, TorchOps)


def test_the_native_kernels_read_no_pool_of_fp8(decoder_of) -> None:
    """Kernels would take its bytes for int8."""
    driver = ModelDriver(decoder_of("float32-native"), kv_dtype="fp8")
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        driver.prefill(driver.add(tokens(3)), 3)


# -- an engine's step ---------------------------------------------------------------------------


SERVED = [kind for kind in BACKENDS if "native" in kind]
SERVED_IN_TORCH = slow(*(kind for kind in BACKENDS if "torch" in kind))


@pytest.fixture(scope="module", params=[*SERVED, *SERVED_IN_TORCH])
def house(request: pytest.FixtureRequest) -> House:
    return tiny_house(*request.param.split("-"))


@pytest.mark.parametrize("drafter", [None, "lm", "all", "auto+lm"])
def test_no_drafter_no_batch_and_no_cache_changes_a_token(house: House, drafter: str) -> None:
    order = shuffled(4)[::2]
    served = house.run(order, drafter, repeats=2, poison=True, num_pages=150)
    assert house.scheduler.cache.num_hits > 0
    for index in order:
        assert served[str(index)] == house.solo[str(index)], REQUESTS[index][1].params
    usages = [request.usage for request in house.requests]
    assert drafter is None or sum(usage.accepted_tokens for usage in usages) > NUM_TOKENS

"""``kv_cache_dtype="int8"``: what is kept of a vector, and what a model makes of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from house import NUM_TOKENS, REQUESTS, House, shuffled

from checkpoints import VOCAB_SIZE, ModelDriver, make_checkpoint
from foretoken.api.build import _num_pages
from foretoken.core.config import EngineConfig
from foretoken.core.kv_pool import KvDtype, KVPool, bytes_per_page, from_int8, to_int8
from foretoken.core.model import Decoder, load_decoder
from foretoken.core.native import native_library
from tiny_pair import write_pair

pytestmark = pytest.mark.usefixtures("one_thread")
BACKENDS = ("float32-torch", "bfloat16-torch", "float32-native", "bfloat16-native")


def make_pool(kv_dtype: KvDtype, *, page_size: int = 16, head_dim: int = 64) -> KVPool:
    return KVPool(
        5,
        num_layers=3,
        num_kv_heads=2,
        head_dim=head_dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        device="cpu",
        kv_dtype=kv_dtype,
    )


# -- a vector -----------------------------------------------------------------------------------


def test_a_vector_comes_back_to_half_a_step_of_its_largest_item() -> None:
    rows = torch.randn(50, 64) * torch.logspace(-20, 20, 50).unsqueeze(1)
    back = from_int8(*to_int8(rows), torch.float32)
    steps = rows.abs().amax(dim=1, keepdim=True) / 127
    assert ((back - rows).abs() <= 0.5001 * steps).all()
    at = rows.abs().argmax(dim=1, keepdim=True)
    torch.testing.assert_close(back.gather(1, at), rows.gather(1, at), rtol=1e-6, atol=0)


def test_zeros_come_back_as_zeros_and_the_smallest_numbers_without_harm() -> None:
    rows = torch.tensor([[0.0, -0.0], [1e-45, -1e-45], [1e-42, 3e-43], [1e-39, -2e-39]])
    back = from_int8(*to_int8(rows), torch.float32)
    assert (back[0] == 0).all()
    assert ((back - rows).abs() < 1e-41).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_that_is_not_finite_stays_so_and_harms_no_other(bad: float) -> None:
    rows = torch.ones(3, 8)
    rows[1, 5] = bad
    back = from_int8(*to_int8(rows), torch.bfloat16)
    assert not back[1].isfinite().any()
    assert torch.equal(back[[0, 2]], torch.ones(2, 8).bfloat16())


# -- a pool -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 6), (3, 6), (16, 64), (4, 24)])
def test_a_page_is_one_blob_of_the_size_that_the_helper_says(page_size: int, head_dim: int) -> None:
    """Also where the vectors' bytes end between two places for a scale."""
    pool = make_pool("int8", page_size=page_size, head_dim=head_dim)
    per_page = bytes_per_page(
        num_layers=3,
        num_kv_heads=2,
        head_dim=head_dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        kv_dtype="int8",
    )
    assert pool.num_bytes == 5 * per_page
    assert pool.data[0].is_contiguous()
    vectors, scales = pool.split(pool.blocks)
    assert scales is not None
    assert vectors.shape == (60, page_size, head_dim)
    assert scales.shape == (60, page_size)
    vectors.fill_(7)
    scales.fill_(2.0)
    pool.data[3] = 0
    pool.copy_page(2, 3)
    assert (vectors == 7).all()
    assert (scales == 2).all()


@pytest.mark.parametrize("memory", ["3MiB", None])
def test_the_same_memory_holds_nearly_twice_the_tokens(
    memory: str | None, decoder_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.api.build._default_budget", lambda: 3 * 2**20)
    decoder = decoder_of("bfloat16-torch")
    pages = [
        _num_pages(EngineConfig(kv_memory=memory, kv_cache_dtype=kind), [decoder, decoder])
        for kind in ("auto", "int8")
    ]
    head_dim = decoder.config.head_dim
    assert pages[1] / pages[0] == pytest.approx(2 * head_dim / (head_dim + 4), rel=0.01)


# -- a model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder_of(tmp_path_factory: pytest.TempPathFactory):
    """A decoder by its dtype and backend."""
    folder = make_checkpoint(tmp_path_factory.mktemp("int8"), "qwen3_layer_types")
    made: dict[str, Decoder] = {}

    def find(kind: str) -> Decoder:
        dtype, backend = kind.split("-")
        if backend == "native" and native_library() is None:
            pytest.skip("no native kernels on this machine")
        if kind not in made:
            made[kind] = load_decoder(folder, dtype=dtype, backend=backend)
        return made[kind]

    return find


@pytest.fixture(params=BACKENDS)
def decoder(request: pytest.FixtureRequest, decoder_of) -> Decoder:
    return decoder_of(request.param)


def tokens(length: int, seed: int = 5) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def test_logits_stay_near_those_of_full_keys_and_values(decoder: Decoder) -> None:
    """Nearer than those of a pool whose vectors are a tenth off, and not the same."""
    plain, small = ModelDriver(decoder), ModelDriver(decoder, kv_dtype="int8")
    expected, found = (d.prefill(d.add(tokens(300)), 300) for d in (plain, small))
    error = (found - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.05
    agreed = (found.argmax(1) == expected.argmax(1)).float().mean()
    assert agreed > 0.9


@pytest.mark.parametrize("page_size", [1, 16])
def test_cold_cached_decoded_and_verified_rows_are_the_same_bits(
    page_size: int, decoder: Decoder
) -> None:
    """Beside strangers, and with NaN in every slot that nobody has written."""
    ids = tokens(330)
    options = {"page_size": page_size, "num_pages": 2400 // page_size, "kv_dtype": "int8"}
    driver = ModelDriver(decoder, **options)
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


def test_one_sequence_whose_kv_is_nan_is_seen_and_harms_nobody_else(decoder: Decoder) -> None:
    ids = tokens(120)
    driver = ModelDriver(decoder, kv_dtype="int8")
    expected = driver.prefill(driver.add(ids), 120)
    healthy, sick = driver.add(ids), driver.add(ids)
    for stream in (healthy, sick):
        driver.prefill(stream, 100)
    _, scales = driver.pool.split(driver.pool.data[sick.pages[6]].flatten(0, 2))
    scales[:, 3] = torch.nan
    sick_logits, logits = driver.step([(sick, ids[100:101], 1), (healthy, ids[100:103], 3)])
    assert torch.isnan(sick_logits).all()
    assert torch.equal(logits, expected[100:103])


def test_a_token_whose_hidden_state_is_nan_is_written_as_nan(decoder: Decoder) -> None:
    """Quantising must not make numbers of it: the next token's row has to be NaN, too."""
    driver = ModelDriver(decoder, kv_dtype="int8")
    stream, row = driver.add(tokens(20)), decoder.weights.embedding[7]
    stream.tokens[10], kept = 7, row.clone()
    driver.prefill(stream, 10)
    row.fill_(torch.nan)
    driver.prefill(stream, 11)
    row.copy_(kept)
    assert torch.isnan(driver.prefill(stream, 12)).all()


# -- an engine's step ---------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bfloat16-torch", "float32-native", "bfloat16-native"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    torch.set_num_threads(1)
    dtype, backend = request.param.split("-")
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    pair: tuple[Path, Path] = write_pair(tmp_path_factory.mktemp("pair"), vocab_size=256)
    return House.load(pair, dtype, backend, "int8")


@pytest.mark.parametrize("drafter", [None, "lm", "all", "auto+lm"])
def test_no_drafter_no_batch_and_no_cache_changes_a_token(house: House, drafter: str) -> None:
    order = shuffled(4)[::2]
    served = house.run(order, drafter, repeats=2, poison=True, num_pages=150)
    assert house.scheduler.cache.num_hits > 0
    for index in order:
        assert served[str(index)] == house.solo[str(index)], REQUESTS[index][1].params
    usages = [request.usage for request in house.requests]
    assert drafter is None or sum(usage.accepted_tokens for usage in usages) > NUM_TOKENS

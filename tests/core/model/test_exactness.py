"""A row's logits are the same bits whatever rides beside it (SPECULATION.md, section 5)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.build import SETTING as VARIANT
from support.checkpoints import VOCAB_SIZE, ModelDriver, Stream, make_checkpoint
from support.native_variants import BACKENDS, every_variant

LENGTH = 600  # three blocks of keys
pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = ("float32", "bfloat16")
# Wide enough that a single row takes another path in oneDNN, odd enough that tails are not even.
WIDE = {"intermediate_size": 2049}


@pytest.fixture(scope="module", params=["qwen3", "mistral_window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("exact"), request.param, **WIDE)


EMULATED = [each for each in every_variant() if each.values == ("amx-emulated",)]


@pytest.fixture(scope="module", params=[*BACKENDS, *EMULATED])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The last is the native kernels' whole path on an emulated matrix unit."""
    if request.param == "torch":
        yield "torch"
        return
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "amx-emulated":
            patch.setenv(VARIANT, request.param)
        if native_library() is None:
            pytest.skip("no native kernels on this machine")
        yield "native"


@pytest.fixture(scope="module", params=DTYPES)
def decoder(request: pytest.FixtureRequest, folder: Path, backend: str) -> Decoder:
    return load_decoder(folder, dtype=request.param, backend=backend)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    rng = random.Random(5)
    return [rng.randrange(VOCAB_SIZE) for _ in range(LENGTH)]


@pytest.fixture(scope="module")
def expected(decoder: Decoder, ids: list[int]) -> Tensor:
    """Logits of every position, from chunks that nothing rides beside."""
    driver = ModelDriver(decoder)
    return driver.prefill(driver.add(ids), 512, 600)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_decode_rows_equal_prefill_rows(
    page_size: int, decoder: Decoder, ids: list[int], expected: Tensor
) -> None:
    """Lone rows around every edge: pages, widths and blocks."""
    driver = ModelDriver(decoder, page_size=page_size, num_pages=1400 // page_size, seed=1)
    stream = driver.add(ids)
    for position in (0, 1, 2, 15, 16, 17, 63, 64, 127, 128, 200, 255, 256, 257, 511, 512, 599):
        driver.prefill(stream, position) if position > stream.num_computed else None
        (logits,) = driver.step([(stream, ids[position : position + 1], 1)])
        stream.num_computed = position + 1
        assert torch.equal(logits[0], expected[position]), position


@pytest.mark.parametrize(("page_size", "num_threads"), [(1, 1), (16, 2)])
def test_rows_of_random_ragged_batches_equal_prefill_rows(
    page_size: int, num_threads: int, decoder: Decoder, ids: list[int], expected: Tensor
) -> None:
    """Copies of one sequence advance by random chunks beside each other and strangers.

    With two threads as well, for splitting rows among them is where bits go astray.
    """
    decoder.ops.set_threads(num_threads)
    rng = random.Random(page_size)
    driver = ModelDriver(decoder, page_size=page_size, num_pages=8000 // page_size)
    copies = [driver.add(ids) for _ in range(3 if num_threads == 1 else 1)]
    while any(c.num_computed < LENGTH for c in copies):
        rows = [row for c in copies if (row := random_row(c, rng)) is not None]
        rows += [stranger(driver, rng) for _ in range(rng.randrange(3))]
        rng.shuffle(rows)
        for (stream, chunk, _), logits in zip(rows, driver.step(rows), strict=True):
            if stream not in copies:
                driver.drop(stream)
                continue
            start, stop = stream.num_computed, stream.num_computed + len(chunk)
            assert torch.equal(logits, expected[start:stop]), (start, stop)
            stream.num_computed = stop
    decoder.ops.set_threads(1)


def random_row(stream: Stream, rng: random.Random) -> tuple[Stream, list[int], int] | None:
    size = rng.choice((1, 1, 2, 3, 5, 8, 17, 60, 130, 300))
    chunk = list(stream.tokens[stream.num_computed :][:size])
    return (stream, chunk, len(chunk)) if chunk else None


def stranger(driver: ModelDriver, rng: random.Random) -> tuple[Stream, list[int], int]:
    stream = driver.add([rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 90))])
    return stream, list(stream.tokens), rng.randrange(len(stream.tokens) + 1)


def test_a_batch_of_many_decode_rows_equals_lone_rows(
    decoder: Decoder, ids: list[int], expected: Tensor
) -> None:
    """33 contexts of all lengths over cached pages, a verify window among them."""
    driver = ModelDriver(decoder, num_pages=1000)
    lengths = [1, *range(7, 600, 19), 599]
    cached = driver.add(ids)
    driver.prefill(cached, 600)
    streams = [driver.add(ids[:n], capacity=n + 8, prefix=cached) for n in lengths]
    for stream, length in zip(streams, lengths, strict=True):
        driver.prefill(stream, length)
    sizes = [6 if n == 349 else 1 for n in lengths]
    rows = [
        (s, ids[n : n + size], size) for s, n, size in zip(streams, lengths, sizes, strict=True)
    ]
    for n, size, logits in zip(lengths, sizes, driver.step(rows), strict=True):
        assert torch.equal(logits, expected[n : n + size]), n


def test_exact_off_still_computes_the_same_to_rounding(
    folder: Path, decoder: Decoder, backend: str, ids: list[int], expected: Tensor
) -> None:
    if decoder.dtype != torch.float32:
        pytest.skip("rounding of bfloat16 says little")
    if backend == "native":
        pytest.skip("the native kernels are exact at no cost and know no other way")
    driver = ModelDriver(load_decoder(folder, exact="off"))
    logits = driver.prefill(driver.add(ids), 300, 301, 304, 600)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_stale_nan_of_another_owner_never_reaches_a_row(decoder: Decoder, ids: list[int]) -> None:
    """The driver poisons every void slot; a plain pool must give the same."""
    poisoned, plain = ModelDriver(decoder), ModelDriver(decoder)
    plain._poison = lambda stream: None  # type: ignore[method-assign]
    plain.pool.data.zero_()
    for driver in (poisoned, plain):
        driver.prefill(driver.add(ids[:5]), 5)
    outs = [d.prefill(d.add(ids), 3, 11, 300) for d in (poisoned, plain)]
    assert torch.equal(*outs)
    assert torch.isfinite(outs[0]).all()


def test_a_sequence_whose_own_kv_is_nan_harms_nobody_else(
    decoder: Decoder, ids: list[int], expected: Tensor
) -> None:
    driver = ModelDriver(decoder)
    healthy, sick = driver.add(ids), driver.add(ids)
    for stream in (healthy, sick):
        driver.prefill(stream, 300)
    driver.pool.data[sick.pages[18]] = torch.nan
    rows = [(s, ids[300 : 300 + n], n) for s, n in ((sick, 1), (healthy, 3))]
    sick_logits, logits = driver.step(rows)
    assert torch.isnan(sick_logits).all()
    assert torch.equal(logits, expected[300:303])

"""Rows become numbers by Triton's arithmetic as by the oracle's, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.core.interface.kv_codec import SCALED, KvDtype
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.kv_pool import KVPool
from support.checkpoints import ModelDriver, make_checkpoint

pytest.importorskip("triton")

import triton
import triton.language as tl

from foretoken.core.ops.triton.attention.launch import memory_of
from foretoken.core.ops.triton.availability import unsuited
from foretoken.core.ops.triton.kv_codec import load_tile, store_vector

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide):RuntimeWarning"),
    pytest.mark.slow,
]
KINDS = [codec.name for codec in SCALED]
WIDTH = 16
WHOLE = (slice(None), slice(None))


@triton.jit
def store_kernel(
    rows_ptr, kv_ptr, scales_ptr,
    WIDTH: tl.constexpr, NUM_ITEMS: tl.constexpr, SCALES_AT: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place * WIDTH + tl.arange(0, WIDTH))
    store_vector(row, kv_ptr, scales_ptr, 0, place, WIDTH, NUM_ITEMS, SCALES_AT, CODEC)


@triton.jit
def load_kernel(
    rows_ptr, kv_ptr, scales_ptr,
    WIDTH: tl.constexpr, NUM_ITEMS: tl.constexpr, SCALES_AT: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0) * 16 + tl.arange(0, 16)
    tile = load_tile(
        kv_ptr, scales_ptr, places * 0, places, places >= 0,
        NUM_ITEMS, SCALES_AT, CODEC, WIDTH, tl.float32,
    )  # fmt: skip
    tl.store(rows_ptr + places[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], tile)


def pool_of(rows: Tensor, kind: KvDtype) -> KVPool:
    """Return a pool of one block with room for rows, and for whole tiles of them."""
    return KVPool(
        1, num_layers=1, num_kv_heads=1, head_dim=WIDTH, page_size=-(-len(rows) // 16) * 16,
        dtype=torch.float32, device=torch.get_default_device(), kv_dtype=kind, num_blocks=1,
    )  # fmt: skip


def constants(pool: KVPool) -> dict[str, int | str]:
    block = pool.block
    return {
        "WIDTH": WIDTH, "NUM_ITEMS": block.num_items, "SCALES_AT": block.scales_at,
        "CODEC": block.codec.name,
    }  # fmt: skip


def scaled(rows: Tensor, kind: KvDtype) -> KVPool:
    pool = pool_of(rows, kind)
    store_kernel[(len(rows),)](rows, *memory_of(pool), **constants(pool))
    return pool


def assert_as_the_oracle_does(rows: Tensor, kind: KvDtype) -> None:
    """Bit for bit, but for the sign of a zero, and the kernels load what the oracle does."""
    pool, expected = scaled(rows, kind), pool_of(rows, kind)
    at = (slice(None), slice(len(rows)))
    expected.store(expected.blocks, at, rows)
    kept = pool.load_blocks(pool.blocks)
    assert torch.equal(kept, expected.load_blocks(expected.blocks))
    scales, wanted = (each.split(each.blocks)[1] for each in (pool, expected))
    assert scales is not None
    assert wanted is not None
    assert torch.equal(scales, wanted)
    back = torch.empty(pool.page_size, WIDTH)
    load_kernel[(pool.page_size // 16,)](back, *memory_of(pool), **constants(pool))
    assert torch.equal(back[None], kept)


def behind(top: float, numbers: Tensor) -> Tensor:
    """Rows that begin with their largest number, ``top``."""
    missing = -len(numbers) % (WIDTH - 1)
    body = torch.cat((numbers, torch.zeros(missing))).view(-1, WIDTH - 1)
    return torch.cat((torch.full((len(body), 1), top), body), dim=1)


@pytest.mark.parametrize("top", [127.0, 254.0, -63.5])
def test_every_half_step_of_int8_goes_to_the_even_one(top: float) -> None:
    halves = (torch.arange(-127, 127) + 0.5) * abs(top) / 127
    rows = behind(top, halves)
    assert_as_the_oracle_does(rows, "int8")
    pool = scaled(rows, "int8")
    assert (pool.split(pool.blocks)[0][0, : len(rows), 1:] % 2 == 0).all()


@pytest.mark.parametrize("top", [448.0, -1.75, 448.0 * 2**20])
def test_every_number_half_way_between_two_of_e4m3_and_beside_goes_to_the_nearest(
    top: float,
) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].unique()
    halves = (numbers[1:] + numbers[:-1]) / 2
    up, down = (torch.nextafter(halves, torch.tensor(far)) for far in (1e9, -1e9))
    near = torch.cat((numbers, halves, up, down)).clamp(-448, 448)
    assert_as_the_oracle_does(behind(top, near * (abs(top) / 448)), "fp8")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_size_are_scaled_alike(kind: KvDtype) -> None:
    torch.manual_seed(0)
    sizes = torch.logspace(-44, 37, 100).unsqueeze(1)
    assert_as_the_oracle_does(torch.randn(100, WIDTH) * sizes, kind)
    assert_as_the_oracle_does(torch.zeros(1, WIDTH), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_reads_as_nan(bad: float, kind: KvDtype) -> None:
    """The row's scale is infinite without a maximum over NaN: a GPU's maximum passes over NaN."""
    rows = torch.ones(2, WIDTH)
    rows[0, 5] = bad
    pool = scaled(rows, kind)
    _, scales = pool.split(pool.blocks)
    assert scales is not None
    assert scales[0, 0] == torch.inf
    back = pool.load_blocks(pool.blocks)[0]
    assert back[0].isnan().all()
    torch.testing.assert_close(back[1], rows[1])


def test_a_codec_needs_a_gpu_that_converts_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    device = torch.device("cuda")
    assert unsuited(device, torch.bfloat16, (), "int8") == ""
    problem = unsuited(device, torch.bfloat16, (), "fp8")
    assert problem == "compute capability 8.6 is below 8.9"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_says_what_it_says_over_the_oracle(kind: KvDtype, tmp_path: Path) -> None:
    """The last token reads what was kept of those before it."""
    device = torch.get_default_device()
    with torch.device("cpu"):
        make_checkpoint(tmp_path, "qwen3")
    logits = []
    for backend in ("torch", "triton"):
        decoder = load_decoder(tmp_path, device=device, backend=backend, kv_dtype=kind)
        driver = ModelDriver(decoder, num_pages=1, kv_dtype=kind)
        with torch.inference_mode():
            logits.append(driver.prefill(driver.add([7, 9, 11, 200, 3]), 4, 5))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)

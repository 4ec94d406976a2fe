"""Rows become int8 and e4m3 by Triton's arithmetic as by the oracle's, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.kv_pool import SCALED_DTYPES as DTYPES
from foretoken.core.ops.kv_pool import KvDtype, from_scaled
from foretoken.core.ops.kv_pool import to_scaled as oracle
from support.checkpoints import ModelDriver, make_checkpoint

pytest.importorskip("triton")

import triton
import triton.language as tl

from foretoken.core.ops.triton.availability import unsuited
from foretoken.core.ops.triton.elementwise import to_scaled

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide):RuntimeWarning"),
    pytest.mark.slow,
]
WIDTH = 16


@triton.jit
def scale_kernel(rows_ptr, items_ptr, scales_ptr, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    items, scale = to_scaled(tl.load(rows_ptr + at), items_ptr.dtype.element_ty)
    tl.store(items_ptr + at, items)
    tl.store(scales_ptr + tl.program_id(0), scale)


def scaled(rows: Tensor, kind: KvDtype) -> tuple[Tensor, Tensor]:
    items, scales = torch.empty(rows.shape, dtype=DTYPES[kind]), torch.empty(len(rows))
    scale_kernel[(len(rows),)](rows, items, scales, WIDTH=WIDTH)
    return items, scales


def assert_as_the_oracle_does(rows: Tensor, kind: KvDtype) -> None:
    (items, scales), (expected, wanted) = scaled(rows, kind), oracle(rows, DTYPES[kind])
    assert torch.equal(scales, wanted)
    assert torch.equal(items.float(), expected.float())


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
    assert (scaled(rows, "int8")[0][:, 1:] % 2 == 0).all()


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


@pytest.mark.parametrize("kind", DTYPES)
def test_rows_of_any_size_are_scaled_alike(kind: KvDtype) -> None:
    torch.manual_seed(0)
    sizes = torch.logspace(-44, 37, 100).unsqueeze(1)
    assert_as_the_oracle_does(torch.randn(100, WIDTH) * sizes, kind)
    assert_as_the_oracle_does(torch.zeros(1, WIDTH), kind)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_reads_as_nan(bad: float, kind: KvDtype) -> None:
    """The row's scale is infinite without a maximum over NaN: a GPU's maximum passes over NaN."""
    rows = torch.ones(2, WIDTH)
    rows[0, 5] = bad
    items, scales = scaled(rows, kind)
    assert scales[0] == torch.inf
    back = from_scaled(items, scales, torch.float32)
    assert back[0].isnan().all()
    torch.testing.assert_close(back[1], rows[1])


def test_fp8_needs_a_gpu_that_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    device = torch.device("cuda")
    assert unsuited(device, torch.bfloat16, (), "int8") == ""
    problem = unsuited(device, torch.bfloat16, (), "fp8")
    assert problem == "compute capability 8.6 is below 8.9"


@pytest.mark.parametrize("kind", DTYPES)
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

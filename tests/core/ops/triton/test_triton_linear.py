"""The tiled linear under the interpreter: right, and no row knows of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.quantize import quantize_weight
from support.checkpoints import ModelDriver, make_reference, save

pytest.importorskip("triton")

from foretoken.core.ops.triton.linear.tiled_linear import TiledLinear, pack_tiled, tiled_linear
from foretoken.core.ops.triton.linear.tiles import (
    _MIN_STEPS,
    BUSY,
    FEW_COLUMNS,
    FEW_ROWS,
    linear_launch,
    linear_tiles,
)
from foretoken.core.ops.triton.triton_ops import TritonOps

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
COUNTS = [1, 5, 17, 64, 65, 130]
IN_PIECES = {"float32": 400, "float16": 800, "int8": 1600}  # inputs: enough for more than one
KINDS = ["float32", "float16", "int8"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def packed(kind: str, out_features: int, in_features: int, *, biased: bool = True) -> TiledLinear:
    dtype = torch.float32 if kind == "float32" else torch.float16
    weight = torch.randn(out_features, in_features, dtype=dtype) / in_features**0.5
    bias = torch.randn(out_features, dtype=dtype) if biased else None
    return pack_tiled(weight, bias, is_int8=kind == "int8")


def written_out(weight: TiledLinear, in_features: int) -> Tensor:
    """The weight in float64: int8 out of its pairs, the lower ones first, and scaled."""
    if weight.scale is None:
        return weight.weight.double()
    pairs = weight.weight.view(torch.int8).view(len(weight.weight), -1, weight.tiles.inner // 2, 2)
    values = pairs.transpose(2, 3).reshape(len(pairs), -1)
    assert not values[:, in_features:].any()
    return values[:, :in_features].double() * weight.scale.double()[:, None]


def rows(kind: str, num_rows: int, in_features: int) -> Tensor:
    dtype = torch.float32 if kind == "float32" else torch.float16
    return torch.randn(num_rows, in_features, dtype=dtype)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(70, 200), (64, 512), (3, 33)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_multiplies_by_the_weight_and_adds_the_bias(kind, shape, biased) -> None:
    weight = packed(kind, *shape, biased=biased)
    x = rows(kind, 7, shape[1])
    expected = x.double() @ written_out(weight, shape[1]).T
    if weight.bias is not None:
        expected += weight.bias.double()
    wide = tiled_linear(x, weight, torch.float32)
    # A tensor core cuts off what it adds up where the interpreter rounds it.
    tolerance = 5e-6 if x.device.type == "cpu" else 5e-5
    torch.testing.assert_close(wide.double(), expected, atol=tolerance, rtol=0)
    assert torch.equal(tiled_linear(x, weight), wide.to(x.dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_beside_any_number_of_others(kind) -> None:
    weight = packed(kind, 70, IN_PIECES[kind])
    assert weight.tiles.pieces > 1
    x = rows(kind, COUNTS[-1], IN_PIECES[kind])
    whole = tiled_linear(x, weight, torch.float32)
    for count in COUNTS:
        assert torch.equal(tiled_linear(x[:count].clone(), weight, torch.float32), whole[:count])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_place(kind) -> None:
    weight = packed(kind, 70, 200)
    x = rows(kind, 70, 200)
    order = torch.randperm(70)
    assert torch.equal(tiled_linear(x[order], weight), tiled_linear(x, weight)[order])


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_with_all_pieces_adds_them_as_programs_with_one_each_do(kind: str) -> None:
    weight = packed(kind, 70, IN_PIECES[kind])
    x = rows(kind, 33, IN_PIECES[kind])
    assert weight.tiles.pieces > 1
    launch = linear_launch(weight.tiles, 70, len(x))
    assert launch.is_apart
    apart = tiled_linear(x, weight, torch.float32)
    grid = (launch.grid[0], launch.grid[1] // weight.tiles.pieces, launch.grid[2])
    together = replace(launch, is_apart=False, grid=grid)
    assert torch.equal(tiled_linear(x, weight, torch.float32, together), apart)


def test_the_count_of_pieces_is_left_as_it_was_found() -> None:
    weight = packed("float16", 70, IN_PIECES["float16"])
    tiled_linear(rows("float16", 130, IN_PIECES["float16"]), weight)
    assert not weight.arrived.any()


def test_a_weight_of_few_outputs_still_makes_programs_for_the_whole_device() -> None:
    shapes = [(4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288), (151936, 4096)]
    small = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)]
    for shape in shapes + small:
        cut = linear_tiles(*shape, torch.bfloat16)
        grid = linear_launch(cut, shape[0], 1).grid
        is_short = shape[1] < 2 * cut.pieces * _MIN_STEPS * cut.inner
        assert grid[0] * grid[1] * grid[2] >= BUSY or is_short


def test_every_row_has_a_tile_and_every_tile_of_apart_pieces_a_counter() -> None:
    for shape in [(70, 2100), (4096, 4096), (151936, 1024)]:
        for num_rows in (*COUNTS, 1024, 1025, 5000):
            cut = linear_tiles(*shape, torch.bfloat16)
            launch = linear_launch(cut, shape[0], num_rows)
            row_tiles = launch.grid[0] * launch.grid[2]
            assert row_tiles * launch.rows >= num_rows
            assert launch.rows == FEW_ROWS or num_rows > FEW_ROWS
            columns = -(-shape[0] // FEW_COLUMNS)
            assert not launch.is_apart or row_tiles * launch.grid[1] // cut.pieces <= columns


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_the_ops_give_logits_in_float32_from_the_sums_themselves(quantize) -> None:
    hidden, weight = torch.randn(3, 96).half(), torch.randn(70, 96).half()
    ops = TritonOps(quantize=quantize)
    packed = ops.pack_linear(weight)
    assert isinstance(packed, TiledLinear)
    logits = ops.logits(hidden, packed)
    expected = hidden.double() @ written_out(packed, 96).T
    torch.testing.assert_close(logits.double(), expected, atol=5e-5, rtol=0)
    assert torch.equal(ops.linear(hidden, packed), logits.half())


def test_off_leaves_linears_to_the_library_and_int4_is_refused() -> None:
    ops, x, weight = TritonOps(exact="off"), torch.randn(3, 96), torch.randn(70, 96)
    packed = ops.pack_linear(weight)
    assert not isinstance(packed, TiledLinear)
    assert torch.equal(ops.linear(x, packed), torch.nn.functional.linear(x, weight))
    assert isinstance(TritonOps(exact="off", quantize="int8").pack_linear(weight), TiledLinear)
    with pytest.raises(ModelLoadError, match="int4"):
        TritonOps(quantize="int4")


def test_int8_weights_are_those_of_the_other_backends() -> None:
    weight = torch.randn(70, 200, dtype=torch.float16)
    quantized = quantize_weight(weight, "int8")
    items, scale = quantized.values, quantized.scale
    tiled = pack_tiled(weight, None, is_int8=True)
    assert tiled.weight.numel() == 70 * 128  # pairs: two steps of 128 inputs
    assert torch.equal(written_out(tiled, 200), items.double() * scale.double()[:, None])


def test_every_int8_is_widened_to_bfloat16_without_a_conversion() -> None:
    """The arithmetic of `halves_of`, whose instructions the interpreter does not have."""
    values = torch.arange(-128, 128, dtype=torch.int16)
    bits = ((values & 0x7F) | 0x4300).view(torch.bfloat16)
    less = ((values & 0x80) | 0x4300).view(torch.bfloat16)
    assert torch.equal(bits - less, values.bfloat16())


def test_a_model_with_int8_weights_stays_near_the_plain_one(tmp_path) -> None:
    device = torch.get_default_device()
    with torch.device("cpu"):
        folder = save(make_reference("qwen3"), tmp_path)
    decoders = (
        load_decoder(folder, device=device),
        load_decoder(folder, device=device, backend="triton", quantize="int8"),
    )
    drivers = [ModelDriver(decoder) for decoder in decoders]
    with torch.inference_mode():
        plain, quantised = (driver.prefill(driver.add([7, 9, 200, 3]), 4) for driver in drivers)
    assert 0 < float((plain - quantised).abs().max()) < 0.2 * float(plain.std())

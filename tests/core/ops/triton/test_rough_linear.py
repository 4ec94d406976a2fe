"""A weight in 4 bits for drafts under the interpreter: what it holds, and what it multiplies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foretoken.core.ops.quantize import GROUP, quantize_weight, round_to_levels
from foretoken.core.ops.weights import PackedLinear

pytest.importorskip("triton")

from foretoken.core.ops.triton.linear import tiled_linear as tiled
from foretoken.core.ops.triton.linear.tiled_linear import TiledLinear, pack_tiled, tiled_linear
from foretoken.core.ops.triton.triton_ops import TritonOps

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
DTYPES = [torch.float32, torch.float16]
LONG = 1600  # inputs: enough for a sum of several pieces


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def drawn(out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(out_features, in_features, dtype=dtype) / in_features**0.5


def written_out(rough: TiledLinear, in_features: int) -> Tensor:
    """The weight in float64, out of its words and numbers."""
    assert rough.scale is not None
    shifts = torch.arange(0, 16, 4, device=rough.weight.device)
    words = rough.weight.long().view(len(rough.weight), -1, 1, GROUP)
    levels = (words >> shifts.view(4, 1)) & 15  # [out, steps, 4, GROUP]
    dtype = torch.float32 if rough.scale.dtype == torch.int64 else torch.float16
    pairs = rough.scale.permute(2, 0, 1).contiguous().unsqueeze(3).view(dtype)
    scale, minimum = pairs.double().chunk(2, dim=3)  # [out, steps, 4, 1]
    return (levels.double() * scale + minimum).flatten(1)[:, :in_features]


def int8_values(weight: Tensor) -> Tensor:
    return quantize_weight(weight, "int8").dequantize()


def unchanged(weight: Tensor) -> Tensor:
    return weight.float()


SOURCES: dict[str, tuple[Callable[[Tensor], PackedLinear], Callable[[Tensor], Tensor]]] = {
    "plain": (lambda weight: pack_tiled(weight, None), unchanged),
    "int8": (lambda weight: pack_tiled(weight, None, is_int8=True), int8_values),
    "of the library": (TritonOps(exact="off").pack_linear, unchanged),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", SOURCES)
def test_a_rough_copy_has_the_levels_of_its_groups(
    source: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is made of some rows at a time, and of inputs that fill no step."""
    monkeypatch.setattr(tiled, "ROUNDED_AT_ONCE", 1000)
    pack, values = SOURCES[source]
    weight = drawn(19, 200, dtype)
    rough = TritonOps().rough_copy(pack(weight), dtype)
    padded = torch.nn.functional.pad(values(weight), (0, 56))
    expected = round_to_levels(padded, dtype).dequantize()[:, :200]
    torch.testing.assert_close(written_out(rough, 200).float(), expected, atol=1e-6, rtol=1e-6)
    assert (rough.num_weights, rough.num_bytes) == (19 * 256, 19 * (128 + 16 * dtype.itemsize))
    error = (expected - weight).norm() / weight.float().norm()
    assert 0.03 < float(error) < 0.12


def test_scales_and_minima_are_rounded_before_the_values() -> None:
    """Then no value errs by more than half a step and what the ends of the range lost."""
    wide = torch.randn(8, 64) * 0.02 + 1.0  # bfloat16 has steps of 1 / 128 there
    rounded = round_to_levels(wide, torch.bfloat16)
    assert rounded.minimum is not None
    step = rounded.scale.float().repeat_interleave(GROUP, dim=1)
    inside = (rounded.values > 0) & (rounded.values < 15)
    assert ((rounded.dequantize() - wide).abs() <= 0.501 * step)[inside].all()
    same = round_to_levels(torch.full((1, 32), 0.5), torch.float16)
    assert torch.equal(same.dequantize(), torch.full((1, 32), 0.5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(70, 200), (64, 512), (3, 33), (5, LONG)])
def test_it_multiplies_by_the_weight_and_adds_the_bias(shape, dtype: torch.dtype) -> None:
    bias = torch.randn(shape[0], dtype=dtype)
    ops = TritonOps()
    rough = ops.rough_copy(pack_tiled(drawn(*shape, dtype), bias), dtype)
    assert rough.bias is bias
    assert (shape[1] == LONG) == (rough.tiles.pieces > 1)
    weight = written_out(rough, shape[1])
    for num_rows in (1, 17):  # of a tile of few rows, and of the other
        x = torch.randn(num_rows, shape[1], dtype=dtype)
        expected = x.double() @ weight.T + bias.double()
        # Each weight is rounded to the activations' dtype before it is multiplied.
        tolerance = 5e-5 if dtype == torch.float32 else 5e-3
        found = ops.logits(x, rough)
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)
        assert torch.equal(tiled_linear(x, rough), found.to(dtype))


def test_a_weight_in_4_bits_has_no_copy_of_its_own() -> None:
    ops = TritonOps()
    rough = ops.rough_copy(pack_tiled(drawn(3, 40, torch.float32), None), torch.float32)
    with pytest.raises(ValueError, match="fewer than 8 bits"):
        ops.rough_copy(rough, torch.float32)


def test_every_level_is_widened_to_bfloat16_without_a_conversion() -> None:
    """The arithmetic of `levels_of`, whose instructions the interpreter does not have."""
    levels = torch.arange(16, dtype=torch.int16)
    bits = (levels | 0x4300).view(torch.bfloat16)
    assert torch.equal(bits - 128.0, levels.bfloat16())

"""The packed linears: right against torch, and the same bits whatever the rows beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.core.ops.blocks import BLOCK_TYPES, BlockWeight
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.library import NativeLibrary
from foretoken.core.ops.native.structs.linear import (
    NativeLinear,
    linear,
    pack_linear,
    rough_copy,
    unpack_rows,
)
from foretoken.core.ops.quantize import (
    Quantize,
    UnpackedWeight,
    WeightKind,
    quantize_weight,
    stack,
)
from support.native_variants import every_variant
from support.stored_weights import GROUPED, fitting, stored

KINDS: list[tuple[Quantize, torch.dtype, float]] = [  # and the relative error that is allowed
    ("none", torch.float32, 1e-6),
    ("none", torch.bfloat16, 1e-6),
    ("int8", torch.bfloat16, 0.012),
    ("int8", torch.float32, 0.012),
    ("int4", torch.bfloat16, 0.1),
    ("int4", torch.float32, 0.1),
]
# whole panels; no multiple of anything; a single output; more than one piece of work
SHAPES = [(64, 128), (37, 51), (1, 32), (130, 33), (700, 96)]


@pytest.fixture(scope="module", params=every_variant())
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    found = native_library(request.param)
    if found is None:
        pytest.skip("no C compiler")
    return found


@pytest.fixture
def threads(library: NativeLibrary):
    yield library.set_threads
    library.set_threads(1)


def make(
    library: NativeLibrary, shape: tuple[int, int], kind: tuple[Quantize, torch.dtype, float]
) -> tuple[Tensor, Tensor, NativeLinear]:
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator).to(kind[1])
    bias = torch.randn(shape[0], generator=generator).to(kind[1])
    return weight, bias, pack_linear(library, weight, bias, kind[0])


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_linear_agrees_with_float64(library, shape, kind):
    weight, bias, packed = make(library, shape, kind)
    x = rows(29, shape[1], kind[1])
    expected = x.double() @ weight.double().T + bias.double()
    error = (linear(library, x, packed, torch.float32) - expected).norm() / expected.norm()
    assert error < kind[2]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(library, shape, kind):
    packed = make(library, shape, kind)[2]
    x = rows(67, shape[1], kind[1])
    together = linear(library, x, packed, torch.float32)
    for count in (1, 2, 3, 5, 8, 11, 12, 13, 25, 64):
        part = linear(library, x[-count:], packed, torch.float32)
        assert torch.equal(part, together[-count:]), count


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_number_of_threads_changes_no_bit(library, threads, kind):
    packed = make(library, (700, 96), kind)[2]
    for count in (1, 5, 67):
        x = rows(count, 96, kind[1])
        results = [linear(library, x, packed) for n in (1, 2, 5) if threads(n)]
        assert all(torch.equal(results[0], other) for other in results[1:])


@settings(max_examples=60, deadline=None)
@given(
    out_features=st.integers(1, 140),
    in_features=st.integers(1, 140),
    count=st.integers(1, 40),
    kind=st.sampled_from(KINDS),
)
def test_any_shape_agrees_with_its_rows_one_by_one(library, out_features, in_features, count, kind):
    packed = make(library, (out_features, in_features), kind)[2]
    x = rows(count, in_features, kind[1])
    alone = torch.cat([linear(library, row, packed) for row in x.split(1)])
    assert torch.equal(linear(library, x, packed), alone)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_results_are_rounded_once_to_the_models_dtype(library, kind):
    packed = make(library, (37, 51), kind)[2]
    x = rows(9, 51, kind[1])
    wide = linear(library, x, packed, torch.float32)
    assert torch.equal(linear(library, x, packed), wide.to(kind[1]))


def test_infinities_and_nans_stay_visible_in_their_own_row(library):
    for kind in KINDS:
        packed = make(library, (37, 50), kind)[2]
        x = rows(4, 50, kind[1])
        x[1, 7], x[2, 8] = float("nan"), float("inf")
        out = linear(library, x, packed)
        assert out[1].isnan().all()
        assert not out[2].isfinite().any()
        assert out[[0, 3]].isfinite().all()


def test_a_row_of_zeros_and_a_channel_of_zeros_are_exact_when_quantised(library):
    for kind in KINDS[2:]:
        weight = torch.randn(37, 64, generator=torch.Generator().manual_seed(1)).to(kind[1])
        weight[5] = 0
        packed = pack_linear(library, weight, None, kind[0])
        x = rows(3, 64, kind[1])
        x[1] = 0
        out = linear(library, x, packed)
        assert out[:, 5].eq(0).all()
        assert out[1].eq(0).all()


def test_int8_values_reach_127_and_round_to_the_nearest_step():
    weight = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])
    quantized = quantize_weight(weight, "int8")
    values, scale = quantized.values, quantized.scale
    assert values.tolist() == [[64, -127, 32], [0, 0, 0]]
    assert torch.allclose(values * scale.unsqueeze(1), weight, atol=1 / 127)


def test_int4_values_use_all_sixteen_levels_and_pad_the_last_group():
    weight = torch.cat((torch.linspace(-1, 1, 32), torch.ones(8))).unsqueeze(0)
    quantized = quantize_weight(weight, "int4")
    values, scale = quantized.values, quantized.scale
    assert values.shape == (1, 64)
    assert values.min() == -8
    assert values.max() == 7
    assert values[0, 40:].eq(0).all()
    back = (values.view(1, 2, 32) * scale.float().unsqueeze(2)).view(1, -1)[:, :40]
    assert (back - weight).abs().max() <= scale.abs().max()


def test_the_exact_int4_weight_comes_back_bit_by_bit(library):
    """A weight that int4 holds exactly, times unit vectors, is read back as it was."""
    values = torch.randint(-8, 8, (37, 64), generator=torch.Generator().manual_seed(2)).float()
    values[:, ::32] = -8
    packed = pack_linear(library, values / 16, None, "int4")
    out = linear(library, torch.eye(64) * 127, packed)
    assert torch.equal(out, (values / 16 * 127).T.contiguous())


# -- weights that a file holds quantised


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("shape", [(64, 128), (37, 64), (1, 32), (130, 96)], ids=str)
def test_a_stored_weight_is_computed_with_as_it_is(library, shape, kind):
    """Activations that int8 holds exactly: what is left is the rounding of float32 sums."""
    shape = fitting(kind, shape)
    weight = stored(kind, shape)
    packed = pack_linear(library, weight, None)
    x = torch.randint(-127, 128, (29, shape[1]), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::32] = 32639 / 256 if kind != "int4" else 127
    expected = x.double() @ weight.dequantize().double().T
    found = linear(library, x, packed, torch.float32).double()
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", GROUPED)
def test_rows_of_stored_weights_have_the_same_bits_alone_and_in_any_batch(library, threads, kind):
    shape = fitting(kind, (130, 96))
    packed = pack_linear(library, stored(kind, shape), None)
    for dtype in (torch.float32, torch.bfloat16):
        x = rows(401, shape[1], dtype)  # more than are computed together anywhere
        together = linear(library, x, packed, torch.float32)
        for n, count in enumerate((1, 2, 5, 12, 13, 19, 25, 64, 67)):
            threads(1 + n % 3)
            part = linear(library, x[-count:], packed, torch.float32)
            assert torch.equal(part, together[-count:]), count


MIXED: tuple[tuple[WeightKind, int], ...] = (("int4_k", 40), ("int6_k", 24), ("int4_k", 7))


def test_rows_of_several_kinds_are_stacked_as_they_are(library, threads):
    """Files of medium size keep some matrices of a layer at more bits than others."""
    parts = [stored(kind, (count, 512)) for kind, count in MIXED]
    bias = torch.randn(71, generator=torch.Generator().manual_seed(4))
    joined = stack(parts)
    assert joined.shape == (71, 512)
    assert torch.equal(joined.dequantize(), torch.cat([each.dequantize() for each in parts]))
    packed = pack_linear(library, joined, bias)
    assert packed.out_features == 71
    own = [
        pack_linear(library, part, piece)
        for part, piece in zip(parts, bias.split([40, 24, 7]), strict=True)
    ]
    for count, n in ((1, 1), (2, 3), (13, 2), (67, 2)):
        threads(n)
        x = rows(count, 512, torch.bfloat16)
        expected = torch.cat([linear(library, x, each) for each in own], dim=1)
        assert torch.equal(linear(library, x, packed), expected), count


def test_rows_of_one_kind_are_stacked_to_one_weight():
    parts = [stored("int4_k", (40, 512)), stored("int4_k", (24, 512))]
    assert isinstance(stack(parts), UnpackedWeight)
    assert torch.equal(stack(parts).values, torch.cat([each.values for each in parts]))


def test_rows_of_several_kinds_are_chosen_in_any_order():
    joined = stack([stored(kind, (count, 512)) for kind, count in MIXED])
    order = torch.randperm(71, generator=torch.Generator().manual_seed(5))
    assert torch.equal(joined.rows(order).dequantize(), joined.dequantize()[order])
    swapped = torch.cat((torch.arange(40, 64), torch.arange(40)))
    assert len(joined.rows(swapped).parts) == 2


# -- blocks of files


def blocks(number: int, shape: tuple[int, int] = (70, 512)) -> BlockWeight:
    """Random blocks; scales may be anything, NaN included."""
    found = BLOCK_TYPES[number]
    row_bytes = shape[1] // found.size * found.num_bytes
    draw = np.random.default_rng(number)
    return BlockWeight(found, (draw.integers(0, 256, (shape[0], row_bytes), dtype=np.uint8),))


def equal(found: Tensor, expected: Tensor) -> bool:
    """Equal bits, but for those of NaN."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    return found.shape == expected.shape and bool(same.all())


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_blocks_are_packed_as_their_unpacked_values_are(library, number):
    weight = blocks(number)
    packed = pack_linear(library, weight, None)
    assert torch.equal(packed.weight, pack_linear(library, weight.unpacked(), None).weight)


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_rows_and_columns_of_blocks_are_chosen_without_reading_them(library, number):
    weight, wide = blocks(number), blocks(number).dequantize()
    order = torch.randperm(70, generator=torch.Generator().manual_seed(6))[:50]
    chosen = weight.rows(order).rows(torch.arange(10, 40))
    assert equal(chosen.dequantize(), wide[order[10:40]])
    assert equal(weight.columns(256, 512).dequantize(), wide[:, 256:])
    joined = stack([chosen, weight])
    assert isinstance(joined, BlockWeight)
    assert equal(joined.dequantize(), torch.cat((wide[order[10:40]], wide)))
    expected = pack_linear(library, joined.unpacked(), None)
    assert torch.equal(pack_linear(library, joined, None).weight, expected.weight)


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_columns_within_a_block_are_refused(number):
    with pytest.raises(ValueError, match="must start and end at multiples"):
        blocks(number).columns(16, 512)


@pytest.mark.parametrize("kind", [*GROUPED])
def test_rows_of_a_packed_weight_come_back_as_they_were(library, kind):
    weight = stored(kind, fitting(kind, (130, 96)))
    packed = pack_linear(library, weight, None)
    ids = torch.tensor([[129, 0], [64, 63]])
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty((2, 2, weight.shape[1]), dtype=dtype)
        unpack_rows(library, packed, ids, out, 1.0)
        assert equal(out, weight.dequantize()[ids].to(dtype))
        unpack_rows(library, packed, ids, out, 2.625)
        scaled = weight.dequantize()[ids].to(dtype).float() * 2.625
        assert equal(out, scaled.to(dtype))


# -- rough copies, for drafts


def in_four_bits(weight):
    """16 levels from the least to the greatest of each group."""
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % 32))
    groups = padded.view(len(weight), -1, 32)
    low, high = groups.aminmax(dim=2)
    minimum = low.half()
    scale = ((high - minimum.float()) * torch.tensor(1 / 15)).half()
    for_one = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    values = (groups - minimum.float().unsqueeze(2)) * for_one.unsqueeze(2)
    values = values.round_().clamp_(0, 15).to(torch.int8).view_as(padded)
    return UnpackedWeight("int4_min", values, scale, minimum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-7, 3e-5, 1.0, 3e3])
def test_a_rough_copy_has_the_bytes_of_a_quantised_weight(library, dtype, size):
    """Scales and minima of every kind of float16: none, subnormal and normal."""
    weight = (rows(130, 97, torch.float32) * size).to(dtype)
    weight[3], weight[4, :40] = 0, size
    copy = rough_copy(library, pack_linear(library, weight, None))
    expected = pack_linear(library, in_four_bits(weight), None)
    assert torch.equal(copy.weight.flatten(), expected.weight.flatten())


@pytest.mark.parametrize("kind", ["int8", "int8_group"])
@pytest.mark.parametrize("shape", [(128, 97), (64, 256)], ids=str)  # whole panels
def test_so_has_that_of_a_weight_of_8_bits(library, kind, shape):
    if kind == "int8":
        weight = quantize_weight(rows(*shape, torch.float32), "int8")
    else:
        num_groups = -(-shape[1] // 32)
        generator = torch.Generator().manual_seed(3)
        values = torch.randint(-128, 128, (shape[0], 32 * num_groups), generator=generator)
        scale = torch.rand((shape[0], num_groups), generator=generator)
        weight = UnpackedWeight("int8_group", values.to(torch.int8), scale.half())
    copy = rough_copy(library, pack_linear(library, weight, None))
    expected = pack_linear(library, in_four_bits(weight.dequantize()), None)
    assert torch.equal(copy.weight.flatten(), expected.weight.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rough_copy_is_the_weight_in_four_bits(library, shape, dtype):
    """Activations that int8 holds exactly: what is left is the rounding of float32 sums."""
    weight, bias, packed = make(library, shape, ("none", dtype, 0.0))
    x = torch.randint(-127, 128, (29, shape[1]), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::32] = 127
    rounded = in_four_bits(weight).dequantize()[:, : shape[1]].double()
    expected = x.double() @ rounded.T + bias.double()
    copy = rough_copy(library, packed)
    found = linear(library, x.to(dtype), copy, torch.float32).double()
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    if shape[0] > 1:
        assert copy.num_bytes < packed.num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_rough_copy_have_the_same_bits_alone_and_in_any_batch(library, threads, dtype):
    copy = rough_copy(library, make(library, (130, 96), ("none", dtype, 0.0))[2])
    x = rows(67, 96, dtype)
    together = linear(library, x, copy, torch.float32)
    for count, n in ((1, 1), (2, 3), (5, 2), (12, 1), (13, 2), (64, 1)):
        threads(n)
        assert torch.equal(linear(library, x[-count:], copy, torch.float32), together[-count:])


def test_a_rough_copy_errs_little_and_is_of_8_bits_or_more(library):
    weight, bias, packed = make(library, (700, 96), ("none", torch.bfloat16, 0.0))
    x = rows(9, 96, torch.bfloat16)
    expected = x.double() @ weight.double().T + bias.double()
    found = linear(library, x, rough_copy(library, packed), torch.float32)
    assert 0.02 < (found - expected).norm() / expected.norm() < 0.1
    with pytest.raises(ValueError, match="fewer than 8 bits"):
        rough_copy(library, pack_linear(library, weight, None, "int4"))


@pytest.mark.parametrize("kind", ["iq4_nl", "iq4_xs", "mxfp4"])
def test_each_number_of_a_table_is_the_value_of_its_own_package(library, kind):
    """All 16 numbers by the kernel, bit by bit, at scales from the least to the largest."""
    import gguf

    size, num_bytes = gguf.GGML_QUANT_SIZES[kind_of := gguf.GGMLQuantizationType[kind.upper()]]
    raw = np.random.default_rng(1).integers(0, 256, (40, 512 // size * num_bytes), dtype=np.uint8)
    blocks = raw.reshape(40, -1, num_bytes)
    if kind == "mxfp4":
        blocks[..., 0] = np.arange(raw.size // num_bytes).reshape(40, -1) % 230
    else:
        blocks[..., 1] &= 0b10111011  # of float16: finite
    weight = BlockWeight(BLOCK_TYPES[kind_of], (raw,))
    expected = torch.from_numpy(gguf.dequantize(raw, kind_of))
    assert torch.equal(weight.dequantize(), expected)
    packed = pack_linear(library, weight, None)
    found = linear(library, torch.eye(512) * 32639, packed)
    # What one number adds to a sum of zeros is rounded once with the activation's scale, 1.
    assert torch.equal(found.T, expected * 32639)


@pytest.mark.parametrize("kind", GROUPED)
def test_stored_weights_let_infinities_and_nans_through(library, kind):
    shape = fitting(kind, (37, 64))
    packed = pack_linear(library, stored(kind, shape), None)
    x = rows(4, shape[1], torch.float32)
    x[1, 7], x[2, 8] = float("nan"), float("inf")
    out = linear(library, x, packed)
    assert out[1].isnan().all()
    assert not out[2].isfinite().any()
    assert out[[0, 3]].isfinite().all()

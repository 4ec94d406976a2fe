"""Attention and activations of a tower by the kernels: torch's numbers, and what is left to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import GELUTanh
from transformers.modeling_layers import GradientCheckpointingLayer

from foretoken.core.model.images.tower_kernels import LEAST_ROWS, TowerAttention, use_kernels
from foretoken.core.ops.base import Ops
from foretoken.core.ops.native.library import native_library
from foretoken.core.ops.native.native_ops import NativeOps

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def qkv(
    sequences: int, heads: int, kv_heads: int, rows: int, dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Make queries, keys and values like those of towers: heads are cut from rows."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(sequences, rows, each, dim, generator=generator).to(dtype).transpose(1, 2)
        for each in (heads, kv_heads, kv_heads)
    ]


@pytest.fixture(scope="module")
def ops() -> Ops:
    library = native_library()
    if library is None:
        pytest.skip("no native kernels")
    return NativeOps(library)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 4, 4, 128, 16), {}),
        ((3, 2, 2, 141, 72), {"scale": 0.05}),
        ((2, 6, 2, 130, 80), {"enable_gqa": True, "is_causal": False, "attn_mask": None}),
    ],
)
def test_the_numbers_are_torch_s(
    ops: Ops, sizes: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    given = qkv(*sizes, dtype)
    expected = F.scaled_dot_product_attention(*[each.float() for each in given], **options)
    attention = TowerAttention(ops)
    with attention:
        first = F.scaled_dot_product_attention(*given, **options)
        second = F.scaled_dot_product_attention(*given, **options)  # over the pages of the first
    with attention:
        third = F.scaled_dot_product_attention(*given, **options)
    assert (first.shape, first.dtype) == (expected.shape, dtype)
    assert torch.allclose(first.float(), expected, atol=TOLERANCES[dtype])
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def test_a_sequence_has_the_bits_that_it_has_alone(ops: Ops) -> None:
    given = qkv(3, 2, 2, 130, 32, torch.bfloat16)
    attention = TowerAttention(ops)
    with attention:
        together = F.scaled_dot_product_attention(*given)
        for index in range(3):
            alone = F.scaled_dot_product_attention(*[each[index : index + 1] for each in given])
            assert torch.equal(together[index : index + 1], alone)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 2, 2, LEAST_ROWS - 1, 16), {}),
        ((1, 2, 2, 130, 16), {"is_causal": True}),
        ((1, 2, 2, 130, 16), {"attn_mask": torch.ones(130, 130, dtype=torch.bool).tril()}),
        ((1, 2, 2, 130, 15), {}),
        ((1, 2, 2, 130, 1024), {}),
    ],
    ids=["few rows", "causal", "a mask", "an odd head", "too large a head"],
)
def test_what_the_kernels_do_not_compute_is_torch_s(
    ops: Ops, sizes: Any, options: dict[str, Any]
) -> None:
    given = qkv(*sizes, torch.float32)
    expected = F.scaled_dot_product_attention(*given, **options)
    with TowerAttention(ops):
        assert torch.equal(F.scaled_dot_product_attention(*given, **options), expected)


def test_keys_of_another_length_are_torch_s(ops: Ops) -> None:
    query, key, value = qkv(1, 2, 2, 130, 16, torch.float32)
    given = (query, key[:, :, :129], value[:, :, :129])
    with TowerAttention(ops):
        found = F.scaled_dot_product_attention(*given)
    assert torch.equal(found, F.scaled_dot_product_attention(*given))


class Layer(GradientCheckpointingLayer):
    """Notes whether its rows lie together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = GELUTanh(), nn.SiLU(), nn.ReLU()
        self.was_contiguous = False

    def forward(self, x: Tensor, scale: float) -> Tensor:
        self.was_contiguous = x.is_contiguous()
        found: Tensor = self.third(self.second(self.first(x))) * scale
        return found


def test_activations_are_the_kernels_and_rows_lie_together(ops: Ops) -> None:
    model = nn.Sequential(Layer())
    x = torch.randn(2, 48, 70, generator=torch.Generator().manual_seed(3)).transpose(1, 2)
    with torch.inference_mode():
        expected = model[0](x, 2.0)
        assert not model[0].was_contiguous
        use_kernels(model, ops)
        found = model[0](x, 2.0)
    assert model[0].was_contiguous
    assert torch.allclose(found, expected, atol=1e-6)
    kinds = [type(each).__name__ for each in (model[0].first, model[0].second, model[0].third)]
    assert kinds == ["_Activated", "_Activated", "ReLU"]

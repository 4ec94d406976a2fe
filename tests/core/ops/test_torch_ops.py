"""The torch ops, one by one, against plain formulas; and the bits of every row on its own."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.core.ops.backends import choose_ops
from foretoken.core.ops.batch import Segment, build_batch
from foretoken.core.ops.kv_pool import KVPool, bytes_per_page
from foretoken.core.ops.torch import torch_ops
from foretoken.core.ops.torch.attention import TorchPlan
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.weights import HeadLayout, Norm
from support.rope_fixture import Turns

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (torch.float32, torch.bfloat16)
HEADS = HeadLayout(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)


@pytest.fixture
def ops() -> TorchOps:
    torch.manual_seed(0)
    return TorchOps()


def lone_rows_equal(operation: object, x: Tensor, least: int) -> bool:
    """Whether windows of every size give the bits of the whole."""
    whole = operation(x)  # type: ignore[operator]
    windows = [(at, n) for n in (least, least + 1, 7, 16, 33) for at in (0, 1, 13)]
    return all(
        torch.equal(operation(x[a : a + n].clone()), whole[a : a + n])  # type: ignore[operator]
        for a, n in windows
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "out"), [(2048, 96), (100, 33), (64, 64)])
def test_linear_rows_do_not_depend_on_their_number(
    width: int, out: int, dtype: torch.dtype, ops: TorchOps
) -> None:
    weight, bias = torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    packed = ops.pack_linear(weight, bias)
    x = torch.randn(64, width).to(dtype)
    assert lone_rows_equal(lambda rows: ops.linear(rows, packed), x, 2)
    expected = F.linear(x.double(), weight.double(), bias.double())
    tolerance = 1e-3 if dtype == torch.float32 else 1.0
    torch.testing.assert_close(ops.linear(x, packed).double(), expected, atol=tolerance, rtol=0.01)


@pytest.fixture
def no_bfloat16_packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make oneDNN refuse bfloat16 weights, as on a CPU with AVX2 and without AVX-512."""
    reorder = torch.ops.mkldnn._reorder_linear_weight

    def refuse(weight: Tensor, rows: int) -> Tensor:
        if weight.dtype == torch.bfloat16:
            raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support")
        packed: Tensor = reorder(weight, rows)
        return packed

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    torch_ops._packs.cache_clear()
    yield
    torch_ops._packs.cache_clear()


@pytest.mark.usefixtures("no_bfloat16_packs")
def test_where_onednn_packs_no_bfloat16_products_are_float32_and_rounded_once(
    ops: TorchOps,
) -> None:
    weight, bias = torch.randn(96, 512).bfloat16(), torch.randn(96).bfloat16()
    packed = ops.pack_linear(weight, bias)
    x = torch.randn(64, 512).bfloat16()
    assert lone_rows_equal(lambda rows: ops.linear(rows, packed), x, 2)
    exact = F.linear(x.double(), weight.double(), bias.double())
    found = ops.linear(x, packed)
    assert found.dtype == torch.bfloat16
    # A sum in float32 is so near the exact one that both round alike but where that lies halfway.
    assert (found == exact.bfloat16()).float().mean() > 0.99
    assert torch.equal(ops.logits(x, packed), found.float())


def test_float16_weights_stay_plain(ops: TorchOps) -> None:
    weight = torch.randn(8, 4).half()
    packed = ops.pack_linear(weight)
    assert not packed.packed
    x = torch.randn(3, 4).half()
    assert torch.equal(ops.linear(x, packed), F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activation_rows_do_not_depend_on_their_number(
    dtype: torch.dtype, ops: TorchOps
) -> None:
    """Odd widths put rows on odd places of a vector, where F.silu rounds otherwise."""
    x, weight = torch.randn(64, 202).to(dtype), torch.rand(202).to(dtype)
    assert lone_rows_equal(lambda rows: ops.norm(rows, Norm(weight, 1e-6)), x, 1)
    assert lone_rows_equal(lambda rows: ops.add_norm(rows, rows, Norm(weight, 1e-6))[0], x, 1)
    assert lone_rows_equal(ops.activate, x, 1)


def test_activation_is_silu_of_the_first_half_times_the_second(ops: TorchOps) -> None:
    x = torch.randn(5, 14) * 30
    x[0, 0] = -1e5  # exp overflows, the product must not
    torch.testing.assert_close(ops.activate(x), F.silu(x[:, :7]) * x[:, 7:])


def make_plan(pool: KVPool, segments: list[Segment], ops: TorchOps) -> TorchPlan:
    batch = build_batch(segments, page_size=pool.page_size, device="cpu", min_rows=ops.min_rows)
    return ops.plan(batch, pool, HEADS, Turns(torch.zeros(pool.head_dim // 2)))


def make_pool(page_size: int, num_layers: int = 2) -> KVPool:
    return KVPool(
        400,
        num_layers=num_layers,
        num_kv_heads=2,
        head_dim=16,
        page_size=page_size,
        dtype=torch.float32,
        device="cpu",
    )


@pytest.mark.parametrize("window", [None, 1, 30, 40, 300])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 512])
def test_attention_equals_the_formula(page_size: int, window: int | None, ops: TorchOps) -> None:
    """Pages that do not divide a block, and pages larger than one, too."""
    length, start = 330, 290
    pool = make_pool(page_size)
    pages = array("q", torch.randperm(400)[: -(-length // page_size)].tolist())
    qkv = torch.randn(length, 10 * 16)
    written = make_plan(pool, [Segment(range(length), 0, pages, 0)], ops)
    q = ops.rope_write(qkv.clone(), 1, written, None)[start:]
    plan = make_plan(pool, [Segment(range(length - start), start, pages, 0)], ops)
    expected = reference_attention(qkv, window)[start:]
    torch.testing.assert_close(ops.attention(q, 1, plan, window), expected, atol=1e-5, rtol=0)


def test_hidden_values_weigh_exactly_nothing(ops: TorchOps) -> None:
    """The weight is 0, not e^-80: a row whose own values are 0 must not feel the next row's."""
    pool = make_pool(4)
    plan = make_plan(pool, [Segment(range(4), 0, array("q", [3]), 0)], ops)
    qkv = torch.randn(4, 10 * 16)
    qkv.view(4, 10, 16)[0, 8:] = 0
    out = ops.attention(ops.rope_write(qkv, 0, plan, None), 0, plan, None)
    assert out[0].count_nonzero() == 0
    assert out[1].count_nonzero() > 0


def reference_attention(qkv: Tensor, window: int | None) -> Tensor:
    q, k, v = qkv.view(len(qkv), 10, 16).split((6, 2, 2), dim=1)
    k, v = k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEADS.scale
    distance = torch.arange(len(qkv))[:, None] - torch.arange(len(qkv))
    hidden = (distance < 0) | (distance >= (window or len(qkv)))
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(len(qkv), -1)


def test_keys_and_values_are_written_to_their_slots_only(ops: TorchOps) -> None:
    pool = make_pool(4)
    segment = Segment([1, 2, 3, 4], 2, array("q", [9, 4]), 0)
    qkv = torch.rand(4, 10 * 16) + 1
    ops.rope_write(qkv.clone(), 1, make_plan(pool, [segment], ops), None)
    kv = qkv.view(4, 10, 16)[:, 6:].view(4, 2, 2, 16)
    assert torch.equal(pool.data[9, 1, :, :, 2], kv[0])
    assert torch.equal(pool.data[9, 1, :, :, 3], kv[1])
    assert torch.equal(pool.data[4, 1, :, :, 0], kv[2])
    assert torch.equal(pool.data[4, 1, :, :, 1], kv[3])
    assert pool.data.count_nonzero() == kv.numel()


def test_a_page_has_the_size_that_the_helper_says() -> None:
    pool = make_pool(16)
    per_page = bytes_per_page(
        num_layers=2, num_kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32
    )
    assert pool.num_bytes == 400 * per_page
    assert pool.data[0].is_contiguous()


def test_ops_are_chosen_by_device() -> None:
    assert isinstance(choose_ops("cpu"), TorchOps)

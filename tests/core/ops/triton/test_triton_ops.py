"""The Triton kernels under the interpreter, one by one, against the torch oracle."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.interface.kv_codec import SCALED, KvDtype
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.kv_pool import KVPool, decode
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.weights import Activation, HeadNorm, Norm, Tables

pytest.importorskip("triton")

from foretoken.core.ops.triton.triton_ops import TritonOps
from support.attention_fixture import (
    HEADS,
    PAGE_SIZE,
    TURNS,
    assert_attention_agrees,
    filled_pool,
    make_batch,
    page_ids,
    random_qkv,
    tolerance,
    twin,
    write,
)

SCALED_NAMES = [codec.name for codec in SCALED]
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Lanes of a tile that hold no row divide nothing by nothing; they are not stored.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]
LONG = 2 * 256 + 3 * PAGE_SIZE  # two splits and a bit


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


SHARED = tuple(range(LONG // PAGE_SIZE))
RAGGED = {
    "decode": [
        Segment([1], 300, page_ids(*range(19)), 1),
        Segment([1], 295, page_ids(*range(30, 49)), 1),  # a window of 40 begins with a split
    ],
    "sharers": [
        Segment([1], LONG, page_ids(*SHARED, 60), 1),
        Segment(range(5), LONG, page_ids(*SHARED, 61), 5),
        Segment([1], 290, page_ids(*SHARED[:18], 62), 1),
    ],
    "chunk": [Segment(range(40), 270, page_ids(*range(20)), 1)],
    "mixed": [
        Segment(range(3), 0, page_ids(70), 3),
        Segment(range(36), 30, page_ids(*range(71, 76)), 1),
        Segment([1], 17, page_ids(76, 77), 1),
    ],
}


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("name", RAGGED)
def test_attention_agrees_with_the_oracle(name: str, window: int | None) -> None:
    assert_attention_agrees(RAGGED[name], filled_pool(), window)


@pytest.mark.parametrize("name", RAGGED)
def test_capped_scores_and_sinks_agree_with_the_oracle(name: str) -> None:
    rule = {"cap": 0.7, "sinks": torch.randn(HEADS.num_heads)}
    assert_attention_agrees(RAGGED[name], filled_pool(), 300, **rule)


@pytest.mark.parametrize("whole", [False, True])
def test_queries_and_keys_are_turned_by_tables_of_their_own(whole: bool) -> None:
    pool = filled_pool()
    other, batch = twin(pool), make_batch(RAGGED["mixed"])
    qkv = random_qkv(batch)
    norm = HeadNorm(torch.rand(8, 16) + 0.5, 1e-6, whole)
    expected, _ = write(TorchOps(), batch, pool, qkv, norm, Tables(1, 0))
    q, _ = write(TritonOps(), batch, other, qkv, norm, Tables(1, 0))
    torch.testing.assert_close(q, expected, atol=tolerance(), rtol=0)
    torch.testing.assert_close(other.data, pool.data, atol=tolerance(), rtol=0)


@pytest.mark.parametrize("kv_dtype", SCALED_NAMES)
@pytest.mark.parametrize("name", ["sharers", "mixed"])
def test_attention_reads_scaled_vectors_as_the_oracle_does(name: str, kv_dtype: KvDtype) -> None:
    assert_attention_agrees(RAGGED[name], filled_pool(kv_dtype), None)


def test_attention_agrees_in_half_precision() -> None:
    assert_attention_agrees(RAGGED["mixed"], filled_pool(dtype=torch.float16), None)


def test_a_verified_row_has_the_bits_of_a_decoded_one_and_sharers_change_none() -> None:
    pool, ops = filled_pool(), TritonOps()
    qkv = torch.randn(5, 160)
    verify = Segment(range(5), LONG, page_ids(*SHARED, 61), 5)
    together = [Segment([1], LONG, page_ids(*SHARED, 60), 1), verify]
    q, plan = write(ops, make_batch(together), pool, torch.cat((torch.randn(1, 160), qkv)))
    beside = ops.attention(q, 1, plan, None)[1:6]  # type: ignore[arg-type]
    for index in range(5):
        alone = make_batch([Segment([1], LONG + index, page_ids(*SHARED, 61), 1)])
        plan = ops.plan(alone, pool, HEADS, TURNS)
        row = ops.attention(q[index + 1 : index + 2].expand(4, -1).contiguous(), 1, plan, None)
        assert torch.equal(row[0], beside[index])


def test_with_exact_batch_a_row_of_a_long_chunk_has_the_bits_of_a_decoded_one() -> None:
    pool, ops, pages = filled_pool(), TritonOps(exact="batch"), page_ids(*range(18))
    q, plan = write(
        ops, make_batch([Segment(range(34), 240, pages, 0)]), pool, torch.randn(34, 160)
    )
    assert plan.geometry.wide_tile == plan.geometry.narrow_tile  # type: ignore[attr-defined]
    chunk = ops.attention(q, 1, plan, None)  # type: ignore[arg-type]
    for index in (0, 16, 33):  # in the first split and in the second
        alone = ops.plan(make_batch([Segment([1], 240 + index, pages, 1)]), pool, HEADS, TURNS)
        row = ops.attention(q[index : index + 1].expand(4, -1).contiguous(), 1, alone, None)
        assert torch.equal(row[0], chunk[index])


@pytest.mark.parametrize("kv_dtype", ["auto", *SCALED_NAMES])
@pytest.mark.parametrize("normed", [False, True])
def test_keys_are_normed_turned_and_stored_as_the_oracle_does(
    kv_dtype: KvDtype, normed: bool
) -> None:
    pool = filled_pool(kv_dtype)
    other, batch = twin(pool), make_batch(RAGGED["mixed"])
    qkv = random_qkv(batch)
    norm = HeadNorm(torch.rand(8, 16) + 0.5, 1e-6) if normed else None
    expected, _ = write(TorchOps(), batch, pool, qkv, norm)
    q, _ = write(TritonOps(), batch, other, qkv, norm)
    torch.testing.assert_close(q, expected, atol=tolerance(), rtol=0)
    if kv_dtype == "auto":
        torch.testing.assert_close(other.data, pool.data, atol=tolerance(), rtol=0)
    else:
        assert_stored_alike(other, pool)


def assert_stored_alike(pool: KVPool, other: KVPool) -> None:
    """A number half way between two steps may go either way, when the scale's last bit differs."""
    (items, scales), (expected, wanted) = pool.split(pool.blocks), other.split(other.blocks)
    assert scales is not None
    assert wanted is not None
    torch.testing.assert_close(scales, wanted, atol=0, rtol=1e-6)
    assert int((items != expected).sum()) <= 2
    codec = pool.block.codec
    step = 1 if codec.number == "int8" else codec.top / 8
    found, known = (
        decode(codec, each, torch.ones(each.shape[:-1]), torch.float32)
        for each in (items, expected)
    )
    torch.testing.assert_close(found, known, atol=step, rtol=0)


@pytest.mark.parametrize("kv_dtype", SCALED_NAMES)
def test_a_row_that_is_not_finite_has_a_scale_that_is_not_and_its_neighbours_have(
    kv_dtype: KvDtype,
) -> None:
    pool = filled_pool(kv_dtype)
    batch = make_batch([Segment([1], 0, page_ids(3), 1)])
    qkv = torch.randn(4, 160)
    qkv[0, 6 * 16] = float("inf")
    write(TritonOps(), batch, pool, qkv)
    _, scales = pool.split(pool.blocks)
    assert scales is not None
    first_key = (3 * 2 + 1) * 4  # page 3, layer 1
    assert not scales[first_key, 0].isfinite()
    assert scales[first_key + 1, 0].isfinite()


def test_norms_and_activation_agree_with_the_oracle() -> None:
    ops, oracle = TritonOps(), TorchOps()
    x, residual, weight = torch.randn(3, 202) * 9, torch.randn(3, 202), torch.rand(202)
    torch.testing.assert_close(ops.norm(x, Norm(weight, 1e-6)), oracle.norm(x, Norm(weight, 1e-6)))
    for out, expected in zip(
        ops.add_norm(x, residual, Norm(weight, 1e-6)),
        oracle.add_norm(x, residual, Norm(weight, 1e-6)),
        strict=True,
    ):
        torch.testing.assert_close(out, expected)
    x[0, 0] = -1e5  # exp overflows, the product must not
    torch.testing.assert_close(ops.activate(x), oracle.activate(x))
    for activation in (
        Activation("gelu_tanh"),
        Activation("silu", gated=False),
        Activation("relu2"),
    ):
        got, expected = (each.activate(x, activation) for each in (ops, oracle))
        torch.testing.assert_close(got, expected)


def test_layer_norms_and_plain_sums_agree_with_the_oracle() -> None:
    ops, oracle = TritonOps(), TorchOps()
    x, residual = torch.randn(3, 202) + 3, torch.randn(3, 202)
    for bias in (None, torch.randn(202)):
        norm = Norm(torch.rand(202), 1e-6, bias, is_layer=True)
        for got, expected in zip(
            ops.add_norm(x, residual, norm), oracle.add_norm(x, residual, norm), strict=True
        ):
            torch.testing.assert_close(got, expected)
    same, total = ops.add_norm(x, residual, None)
    assert torch.equal(total, x + residual)
    assert torch.equal(same, total)

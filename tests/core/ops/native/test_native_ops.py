"""The native kernels against the torch oracle, and the bits of every row on its own."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.backends import choose_ops
from foretoken.core.ops.base import Ops
from foretoken.core.ops.batch import Segment, build_batch
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.native.structs.plan import NativePlan
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.weights import FIRST_TABLE, Activation, HeadLayout, HeadNorm, Norm, Tables
from support.checkpoints import ModelDriver, make_checkpoint
from support.native_variants import every_variant
from support.pairs import in_pairs
from support.rope_fixture import Turns

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (torch.float32, torch.bfloat16)
KINDS = ("silu", "gelu_tanh", "relu2")
CLOSE = {
    torch.float32: {"atol": 2e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}
SHAPES = [  # (query heads, KV heads, head_dim): odd sizes, many heads in a group, real ones
    (6, 2, 24),
    (3, 1, 6),
    (8, 1, 80),
    (4, 2, 128),
    (4, 4, 64),
    (2, 1, 512),  # with a norm of values
]
LATENTS = [  # the first items of a key are its value; more heads than a task takes; real sizes
    (20, 1, 40, 32),
    (128, 1, 14, 8),
    (4, 1, 576, 512),
]


@pytest.fixture(params=every_variant())
def ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    torch.manual_seed(0)
    library = native_library(request.param)
    if library is None:
        pytest.skip("no native kernels on this machine")
    yield NativeOps(library)
    library.set_threads(1)


class Layers:
    """A pool of two layers, and how rows are put into it and read from it."""

    def __init__(self, shape: tuple[int, ...], page_size: int, dtype: torch.dtype) -> None:
        num_heads, num_kv_heads, head_dim, *ranks = shape
        eps = 1e-6 if head_dim == 512 else None
        self.heads = HeadLayout(num_heads, num_kv_heads, head_dim, head_dim**-0.5, eps, *ranks)
        self.width = (num_heads + self.heads.num_blocks * num_kv_heads) * head_dim
        self.page_size = page_size
        self.pool = KVPool(
            500 // page_size + 8,
            num_layers=2,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            device="cpu",
            num_blocks=self.heads.num_blocks,
        )
        self.pool.data.fill_(torch.nan)  # what nobody has written must reach nobody
        norm = torch.rand(num_heads + num_kv_heads, head_dim) + 0.5
        self.norm = None if ranks else HeadNorm(norm, 1e-6)

    @property
    def turns(self) -> Turns:
        return Turns(0.7 ** torch.arange(self.heads.rope_dim // 2))

    def run(
        self,
        ops: Ops,
        segments: list[Segment],
        qkv: Tensor,
        window: int | None,
        tables: Tables = FIRST_TABLE,
        **rule: Any,
    ) -> tuple[Tensor, Tensor]:
        """Queries and attention outputs of a batch, in the second layer."""
        batch = build_batch(segments, page_size=self.page_size, device="cpu", min_rows=1)
        others = (Turns(0.3 ** torch.arange(self.heads.rope_dim // 2)), self.turns)
        plan = ops.plan(batch, self.pool, self.heads, self.turns, *others)
        q = ops.rope_write(qkv.clone(), 1, plan, self.norm, tables)
        return q, ops.attention(q, 1, plan, window, **rule)


def lone_rows_equal(operation: object, x: Tensor) -> bool:
    whole = operation(x)  # type: ignore[operator]
    windows = [(at, n) for n in (1, 2, 7, 33) for at in (0, 1, 13)]
    return all(
        torch.equal(operation(x[a : a + n].clone()), whole[a : a + n])  # type: ignore[operator]
        for a, n in windows
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_alone_are_turned_as_beside_keys_and_nothing_is_written(
    dtype: torch.dtype, ops: NativeOps
) -> None:
    """A layer that reads the keys and values of another has queries alone."""
    layers, qkv = Layers((6, 2, 24), 16, dtype), torch.randn(5, 240).to(dtype)
    segment = Segment(range(5), 3, array("q", [0]), 1)
    batch = build_batch([segment], page_size=16, device="cpu", min_rows=1)
    for each in (ops, TorchOps()):
        plan = each.plan(batch, layers.pool, layers.heads, layers.turns)
        assert layers.norm is not None
        alone = HeadNorm(layers.norm.weight[:6], layers.norm.eps)
        found = each.rope_write(qkv[:, :144].contiguous(), 1, plan, alone)
        assert layers.pool.data.isnan().all()
        whole = Layers((6, 2, 24), 16, dtype)
        plan = each.plan(batch, whole.pool, whole.heads, whole.turns)
        assert torch.equal(found, each.rope_write(qkv.clone(), 1, plan, layers.norm))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_rounded_before_it_is_multiplied(dtype: torch.dtype, ops: NativeOps) -> None:
    x, residual = torch.randn(9, 70).to(dtype), torch.randn(9, 70).to(dtype)
    norm, factor = Norm(torch.rand(70).to(dtype), 1e-6), 0.7109375
    normed, total = ops.add_norm(x, residual, norm, factor)
    assert torch.equal(total, (x + residual) * factor)
    assert torch.equal(normed, ops.norm(total, norm))
    for each in (ops.add_norm, TorchOps().add_norm):
        assert torch.equal(each(x, residual, None, factor)[0], total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 202, 2049])
def test_norms_and_activation_equal_torch_and_rows_stand_alone(
    width: int, dtype: torch.dtype, ops: NativeOps
) -> None:
    oracle, close = TorchOps(), CLOSE[dtype]
    x, residual = torch.randn(64, width).to(dtype), torch.randn(64, width).to(dtype)
    weight, wide = torch.rand(width).to(dtype), torch.randn(64, 2 * width).to(dtype) * 20
    wide[0, 0] = -1e5  # exp overflows, the product must not
    torch.testing.assert_close(
        ops.norm(x, Norm(weight, 1e-6)), oracle.norm(x, Norm(weight, 1e-6)), **close
    )
    normed, total = ops.add_norm(x, residual, Norm(weight, 1e-6))
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.norm(total, Norm(weight, 1e-6)))
    torch.testing.assert_close(ops.activate(wide), oracle.activate(wide), **close)
    assert lone_rows_equal(lambda rows: ops.norm(rows, Norm(weight, 1e-6)), x)
    assert lone_rows_equal(ops.activate, wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 202, 2049])
def test_layer_norms_sums_and_other_activations_equal_torch_and_rows_stand_alone(
    width: int, dtype: torch.dtype, ops: NativeOps
) -> None:
    oracle, close = TorchOps(), CLOSE[dtype]
    x, residual = torch.randn(64, width).to(dtype) + 3, torch.randn(64, width).to(dtype)
    weight, bias = torch.rand(width), torch.randn(width)
    norms = [
        Norm(weight, 1e-6, bias, is_layer=True),
        Norm(weight, 1e-6, is_layer=True),
        Norm(weight, 1e-6),  # in float32 beside bfloat16
    ]
    for norm in norms:
        torch.testing.assert_close(ops.norm(x, norm), oracle.norm(x, norm), **close)
        assert lone_rows_equal(lambda rows, norm=norm: ops.norm(rows, norm), x)
    same, total = ops.add_norm(x, residual, None)
    assert torch.equal(total, x + residual)
    assert torch.equal(same, total)
    for activation in (Activation("gelu_tanh"), *(Activation(k, False) for k in KINDS)):
        wide = torch.randn(64, 2 * width).to(dtype) * 5
        got = ops.activate(wide, activation)
        torch.testing.assert_close(got, oracle.activate(wide, activation), **close)
        assert lone_rows_equal(lambda rows, kind=activation: ops.activate(rows, kind), wide)


def test_gelu_is_that_of_torch(ops: NativeOps) -> None:
    x = torch.linspace(-12, 12, 5_001).view(1, -1)
    for each in (ops, TorchOps()):
        got = each.activate(x, Activation("gelu_tanh", gated=False))
        expected = torch.nn.functional.gelu(x.double(), approximate="tanh").float()
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_the_exponential_is_right_to_a_few_units_in_the_last_place(ops: NativeOps) -> None:
    x = torch.linspace(-60, 60, 20_001).view(1, -1)
    got = ops.activate(torch.cat((x, torch.ones_like(x)), dim=1)).double()
    expected = x.double() / (1 + torch.exp(-x.double()))
    assert ((got - expected).abs() <= 4e-7 * expected.abs()).all()


def test_nan_stays_nan(ops: NativeOps) -> None:
    x = torch.tensor([[torch.nan, 1.0]])
    assert ops.activate(x).isnan().all()
    for dtype in DTYPES:
        assert ops.norm(x.to(dtype), Norm(torch.ones(2, dtype=dtype), 1e-6)).isnan().all()


def test_embedding_rows_are_the_tables(ops: NativeOps) -> None:
    table = torch.randn(7, 5).bfloat16()
    ids = torch.tensor([6, 0, 6])
    assert torch.equal(ops.embedding(ids, table), table[ids])


@pytest.mark.parametrize(
    ("pages", "shape", "dtype"),
    in_pairs([(1, 30), (3, None), (16, 100), (512, 1)], [*SHAPES, *LATENTS], DTYPES),
)
def test_attention_equals_torch_over_ragged_batches(
    pages: tuple[int, int | None], shape: tuple[int, ...], dtype: torch.dtype, ops: NativeOps
) -> None:
    """A long prefill beside short ones, then rows that go on from there."""
    page_size, window = pages
    ours, theirs = Layers(shape, page_size, dtype), Layers(shape, page_size, dtype)
    theirs.norm = ours.norm
    lens, more = (300, 17, 1), (7, 1, 3)
    free = iter(torch.randperm(ours.pool.num_pages).tolist())
    tables = [array("q", [next(free) for _ in range(-(-(n + 8) // page_size))]) for n in lens]
    steps = [
        [Segment(range(n), 0, pages, 0) for n, pages in zip(lens, tables, strict=True)],
        [Segment(range(m), n, p, 0) for n, m, p in zip(lens, more, tables, strict=True)],
    ]
    for segments in steps:
        num_rows = sum(len(segment.token_ids) for segment in segments)
        qkv = torch.randn(num_rows, ours.width).to(dtype)
        got = ours.run(ops, segments, qkv, window)
        expected = theirs.run(TorchOps(), segments, qkv, window)
        torch.testing.assert_close(got, expected, **CLOSE[dtype])
    torch.testing.assert_close(ours.pool.data, theirs.pool.data, equal_nan=True, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *LATENTS])
def test_capped_scores_sinks_and_tables_of_a_layer_equal_torch_and_rows_stand_alone(
    shape: tuple[int, ...], dtype: torch.dtype, ops: NativeOps
) -> None:
    """Each difference by itself, too: it must show."""
    layers = Layers(shape, 16, dtype)
    qkv = torch.randn(130, layers.width).to(dtype)
    if layers.norm is not None:
        layers.norm = HeadNorm(layers.norm.weight, 1e-6, whole=True)
        qkv *= 2
    pages = array("q", range(9))
    sinks = torch.randn(shape[0])
    rules: list[dict[str, Any]] = [
        {"cap": 1.5, "sinks": sinks, "tables": Tables(1, 2)},
        {"sinks": sinks, "tables": Tables(1, 2)},
        {"cap": 1.5, "tables": Tables(1, 2)},
        {"cap": 1.5, "sinks": sinks, "tables": Tables(1, 1)},
    ]
    outs = []
    for rule in rules:
        whole = [Segment(range(130), 0, pages, 0)]
        q, out = layers.run(ops, whole, qkv, 40, **rule)
        expected = layers.run(TorchOps(), whole, qkv, 40, **rule)
        torch.testing.assert_close((q, out), expected, **CLOSE[dtype])
        layers.run(ops, whole, qkv, 40, **rule)
        _, last = layers.run(ops, [Segment(range(3), 127, pages, 0)], qkv[127:], 40, **rule)
        assert torch.equal(last, out[127:])
        outs.append(out.float())
    off = max(CLOSE[dtype]["atol"] * 2, 1e-3)
    assert all(float((other - outs[0]).abs().max()) > off for other in outs[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("shape", [(6, 2, 48), (20, 1, 40, 32), (80, 1, 24, 16)])
def test_attention_rows_are_the_same_bits_in_any_batch_on_any_number_of_threads(
    shape: tuple[int, ...], window: int | None, dtype: torch.dtype, ops: NativeOps
) -> None:
    """One sequence in one chunk, and again in random chunks beside a stranger."""
    rng = random.Random(3)
    layers, length = Layers(shape, 16, dtype), 230
    pages = array("q", range(-(-length // 16)))
    other = array("q", range(len(pages), len(pages) + 4))
    qkv = torch.randn(length, layers.width).to(dtype)
    _, whole = layers.run(ops, [Segment(range(length), 0, pages, 0)], qkv, window)
    ops.set_threads(2)
    layers.pool.data.fill_(torch.nan)
    at = 0
    while at < length:
        size = min(length - at, rng.choice((1, 2, 3, 5, 33, 70)))
        segments = [Segment(range(size), at, pages, 0)]
        beside = torch.randn(rng.randrange(1, 60), layers.width).to(dtype)
        segments.insert(0, Segment(range(len(beside)), 0, other, 0))
        rows = torch.cat((beside, qkv[at : at + size]))
        _, out = layers.run(ops, segments, rows, window)
        assert torch.equal(out[len(beside) :], whole[at : at + size]), (at, size)
        at += size


def test_hidden_values_weigh_exactly_nothing(ops: NativeOps) -> None:
    """The weight is 0, not e^-80: a row whose own values are 0 must not feel the next row's."""
    layers = Layers((4, 2, 16), 4, torch.float32)
    qkv = torch.randn(4, layers.width)
    qkv.view(4, 8, 16)[0, 6:] = 0
    _, out = layers.run(ops, [Segment(range(4), 0, array("q", [3]), 0)], qkv, None)
    assert out[0].count_nonzero() == 0
    assert out[1].count_nonzero() > 0


def test_a_batch_with_copies_of_its_last_row_is_refused() -> None:
    layers = Layers((4, 2, 16), 4, torch.float32)
    segment = Segment([1], 0, array("q", [0]), 0)
    batch = build_batch([segment], page_size=4, device="cpu", min_rows=4)
    with pytest.raises(ValueError, match="copies"):
        NativePlan(batch, layers.pool, layers.heads, [layers.turns.rows(batch.positions, 1)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind",
    ["qwen3", "mistral_window", "qwen2", "gemma4", "deepseek_v2", "deepseek_v3", "minicpm3"],
)
def test_a_step_in_one_call_is_the_same_bits_as_one_operation_after_another(
    kind: str, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    folder = make_checkpoint(tmp_path_factory.mktemp(kind), kind)
    fused, plain = (load_decoder(folder, dtype=dtype, backend="native") for _ in range(2))
    plain._compiled = None
    assert fused._compiled is not None
    ids = [n * 7 % 200 for n in range(150)]
    drivers = [ModelDriver(each) for each in (fused, plain)]
    outs = [d.prefill(d.add(ids), 100, 101, 150) for d in drivers]
    assert torch.equal(*outs)
    for lens in ((3, 0, 1), (0, 0, 0)):  # the logits of some rows, or of none
        some = [
            d.step([(d.add(ids), ids[: 40 - 9 * at], wanted) for at, wanted in enumerate(lens)])
            for d in drivers
        ]
        for ours, theirs, wanted in zip(*some, lens, strict=True):
            assert torch.equal(ours, theirs)
            assert len(ours) == wanted


def test_the_backend_is_chosen_by_what_it_can_compute() -> None:
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    assert isinstance(choose_ops("cpu", backend="auto"), NativeOps)
    assert isinstance(choose_ops("cpu", backend="torch"), TorchOps)
    assert isinstance(choose_ops("cpu", backend="auto", dtype=torch.float64), TorchOps)
    wide = HeadLayout(num_heads=2, num_kv_heads=1, head_dim=1024, scale=1.0)
    assert isinstance(choose_ops("cpu", backend="auto", heads=[wide]), TorchOps)
    with pytest.raises(ModelLoadError, match="native"):
        choose_ops("cpu", backend="native", heads=[wide])

"""The native kernels on keys and values of int8, against torch on the same bytes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.ops.base import Ops
from foretoken.core.ops.batch import Segment, build_batch
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.weights import HeadLayout, HeadNorm
from support.native_variants import every_variant
from support.pairs import in_pairs
from support.rope_fixture import Turns

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (torch.float32, torch.bfloat16)
LIMITS = {torch.float32: 1.4e-4, torch.bfloat16: 4e-3}  # of an item of the output; seen: 0.7 of it
SHAPES = [  # (query heads, KV heads, head_dim): odd sizes, many heads in a group, real ones
    (6, 2, 24),
    (3, 1, 6),
    (8, 1, 80),
    (4, 2, 128),
    (4, 4, 64),
    (2, 1, 512),
]


@pytest.fixture(params=every_variant())
def ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    torch.manual_seed(0)
    library = native_library(request.param)
    if library is None:
        pytest.skip("no native kernels on this machine")
    yield NativeOps(library)
    library.set_threads(1)


class Kept:
    """A pool of two layers full of NaN; rows go to the second and are read from there."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: KvDtype = "int8",
    ) -> None:
        num_heads, num_kv_heads, head_dim = shape
        self.heads = HeadLayout(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
        self.width = (num_heads + 2 * num_kv_heads) * head_dim
        self.page_size = page_size
        self.pool = KVPool(
            1000 // page_size + 8,
            num_layers=2,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            device="cpu",
            kv_dtype=kv_dtype,
        )
        self.pool.data.fill_(-1 if kv_dtype == "int8" else torch.nan)  # -1: a scale of NaN
        self.norm = HeadNorm(
            torch.linspace(0.5, 1.5, head_dim).repeat(num_heads + num_kv_heads, 1), 1e-6
        )

    def rows(self, count: int) -> Tensor:
        return torch.randn(count, self.width).to(self.pool.dtype)

    def plan(self, ops: Ops, segments: list[Segment]) -> object:
        batch = build_batch(segments, page_size=self.page_size, device="cpu", min_rows=1)
        turns = Turns(0.7 ** torch.arange(self.heads.head_dim // 2))
        return ops.plan(batch, self.pool, self.heads, turns)

    def write(self, ops: Ops, segments: list[Segment], qkv: Tensor) -> Tensor:
        """The rows' queries."""
        return ops.rope_write(qkv.clone(), 1, self.plan(ops, segments), self.norm)

    def run(self, ops: Ops, segments: list[Segment], qkv: Tensor, window: int | None) -> Tensor:
        q = self.write(ops, segments, qkv)
        return ops.attention(q, 1, self.plan(ops, segments), window)

    def split(self) -> tuple[Tensor, Tensor]:
        items, scales = self.pool.split(self.pool.blocks)
        assert scales is not None
        return items, scales

    def widened(self) -> Kept:
        """The same content in float32."""
        heads = self.heads
        shape = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
        wide = Kept(shape, self.page_size, torch.float32, "auto")
        at = (slice(None), slice(None))
        vectors, _ = wide.pool.split(wide.pool.blocks)
        vectors.copy_(self.pool.load(self.pool.blocks, at, torch.float32))
        return wide


def prompts(kept: Kept, *lens: int) -> list[Segment]:
    """Whole sequences on pages scattered over the pool."""
    free = iter(torch.randperm(kept.pool.num_pages).tolist())
    size = kept.page_size
    return [
        Segment(range(n), 0, array("q", [next(free) for _ in range(-(-(n + 8) // size))]), 0)
        for n in lens
    ]


@pytest.mark.parametrize(
    ("pages", "shape", "dtype"),
    in_pairs([(1, 30), (3, None), (16, 100), (512, 1)], SHAPES, DTYPES),
)
def test_attention_equals_that_of_torch_on_what_was_kept(
    pages: tuple[int, int | None], shape: tuple[int, int, int], dtype: torch.dtype, ops: NativeOps
) -> None:
    """A long prefill beside short ones, then rows that go on from there."""
    page_size, window = pages
    kept = Kept(shape, page_size, dtype)
    # The longest item of a longer query is longer, and with it the step of its numbers.
    limit = LIMITS[dtype] * (1.5 if kept.heads.head_dim > 256 else 1)
    whole = prompts(kept, 300, 17, 1)
    later = [
        Segment(range(m), len(s.token_ids), s.page_ids, 0)
        for s, m in zip(whole, (7, 1, 3), strict=True)
    ]
    for segments in (whole, later):
        q = kept.write(ops, segments, kept.rows(sum(len(s.token_ids) for s in segments)))
        out = ops.attention(q, 1, kept.plan(ops, segments), window)
        wide, oracle = kept.widened(), TorchOps()
        expected = oracle.attention(q.float(), 1, wide.plan(oracle, segments), window)
        torch.testing.assert_close(out.float(), expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_kept_is_what_torch_keeps(
    shape: tuple[int, int, int], dtype: torch.dtype, ops: NativeOps
) -> None:
    """To one step of a number that lies between two; zeros, and a NaN and its neighbours, too."""
    ours, theirs = Kept(shape, 16, dtype), Kept(shape, 16, dtype)
    (segment,) = prompts(ours, 40)
    qkv = ours.rows(40)
    qkv[3], qkv[4, -1], qkv[5, -1] = 0.0, torch.nan, torch.inf
    ours.write(ops, [segment], qkv)
    theirs.write(TorchOps(), [segment], qkv)
    (items, scales), (expected, expected_scales) = ours.split(), theirs.split()
    assert (items.int() - expected.int()).abs().max() <= 1
    assert (items != expected).float().mean() < 0.001
    finite = expected_scales.isfinite()
    assert torch.equal(scales.isfinite(), finite)
    torch.testing.assert_close(scales[finite], expected_scales[finite], atol=0, rtol=1e-5)
    assert (finite & (scales == 0)).sum() == 2 * shape[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
def test_rows_are_the_same_bits_in_any_batch_on_any_number_of_threads(
    window: int | None, dtype: torch.dtype, ops: NativeOps
) -> None:
    """One sequence in one chunk, and again in random chunks beside those who share its pages."""
    rng = random.Random(3)
    kept, length = Kept((6, 2, 48), 16, dtype), 230
    pages = array("q", range(-(-length // 16)))
    strange = array("q", range(len(pages), len(pages) + 4))
    qkv = kept.rows(length)
    whole = kept.run(ops, [Segment(range(length), 0, pages, 0)], qkv, window)
    ops.set_threads(2)
    kept.pool.data.fill_(-1)
    at = 0
    while at < length:
        size = min(length - at, rng.choice((1, 2, 3, 5, 33, 70)))
        beside = rng.randrange(1, 60)
        segments = [Segment(range(beside), 0, strange, 0), Segment(range(size), at, pages, 0)]
        rows = torch.cat((kept.rows(beside), qkv[at : at + size]))
        if at >= 64:
            shared = pages[:4] + array("q", [60 + n for n in range(12)])
            segments.append(Segment([0], 64, shared, 0))
            rows = torch.cat((rows, kept.rows(1)))
        out = kept.run(ops, segments, rows, window)[beside : beside + size]
        assert torch.equal(out, whole[at : at + size]), (at, size)
        at += size


def test_large_and_small_numbers_lose_nothing_but_their_last_bits(ops: NativeOps) -> None:
    """Values from 1e-6 to 1e6, the small ones first: they must not be cut off as a whole."""
    kept = Kept((4, 2, 64), 16, torch.float32)
    (segment,) = prompts(kept, 200)
    qkv = kept.rows(200) * torch.logspace(-6, 6, 200).unsqueeze(1)  # queries, keys are normed
    q = kept.write(ops, [segment], qkv)
    out = ops.attention(q, 1, kept.plan(ops, [segment]), None)
    wide, oracle = kept.widened(), TorchOps()
    expected = oracle.attention(q, 1, wide.plan(oracle, [segment]), None)
    error = (out - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 3e-4


def test_hidden_values_weigh_exactly_nothing(ops: NativeOps) -> None:
    """The weight is 0, not e^-80: a row whose own values are 0 must not feel the next row's."""
    kept = Kept((4, 2, 16), 4, torch.float32)
    qkv = kept.rows(4)
    qkv.view(4, 8, 16)[0, 6:] = 0
    out = kept.run(ops, [Segment(range(4), 0, array("q", [3]), 0)], qkv, None)
    assert out[0].count_nonzero() == 0
    assert out[1].count_nonzero() > 0


@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen_by_whom_it_concerns(
    part: str, bad: float, ops: NativeOps
) -> None:
    kept = Kept((4, 2, 16), 4, torch.bfloat16)
    sick, healthy = prompts(kept, 20, 20)
    qkv = kept.rows(40)
    expected = kept.run(ops, [sick, healthy], qkv, None)
    qkv.view(40, 8, 16)[19, {"query": 1, "key": 5, "value": 7}[part], 3] = bad
    out = kept.run(ops, [sick, healthy], qkv, None)
    assert torch.equal(out[20:], expected[20:])
    heads = out[19].view(4, 16)
    concerned = [1] if part == "query" else [2, 3]
    assert not heads[concerned].isfinite().any()
    assert heads[0].isfinite().all()

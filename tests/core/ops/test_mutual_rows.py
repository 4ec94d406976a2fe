"""Rows of an image that see each other: torch as the formula, native kernels as torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.ops.base import Ops
from foretoken.core.ops.batch import IntArray, Segment, build_batch
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.row_extras import RowExtras
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.triton.triton_ops import TritonOps
from foretoken.core.ops.weights import HeadLayout
from support.native_variants import every_variant
from support.rope_fixture import Turns

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS = HeadLayout(6, 2, 24, 24**-0.5)
IMAGES = ((20, 150), (171, 3), (180, 64), (290, 5))  # a longer one than a task's rows or a block
LENGTH = 300


def reaches(start: int, stop: int, images: tuple[tuple[int, int], ...] = IMAGES) -> IntArray:
    found = np.arange(start + 1, stop + 1)
    for first, count in images:
        found[max(0, first - start) : max(0, first + count - start)] = first + count
    return found


class Rows:
    """A sequence with images, and another without any beside it."""

    def __init__(self, dtype: torch.dtype, kv_dtype: KvDtype = "auto") -> None:
        self.pool = KVPool(
            80, num_layers=1, num_kv_heads=2, head_dim=24, page_size=8, dtype=dtype,
            device="cpu", kv_dtype=kv_dtype,
        )  # fmt: skip
        self.pages = array("q", torch.randperm(70).tolist())
        self.qkv = torch.randn(LENGTH, 10 * 24).to(dtype)

    def segment(self, start: int, stop: int) -> Segment:
        tokens = range(stop - start)
        return Segment(tokens, start, self.pages, 0, extras=RowExtras(reaches=reaches(start, stop)))

    def other(self) -> Segment:
        return Segment(range(40), 0, array("q", range(70, 75)), 0)

    def run(
        self, ops: Ops, segments: list[Segment], qkv: Tensor, window: int | None, *, mutual: bool
    ) -> Tensor:
        batch = build_batch(segments, page_size=8, device="cpu", min_rows=1)
        plan = ops.plan(batch, self.pool, HEADS, Turns(torch.zeros(12)))
        q = ops.rope_write(qkv.clone(), 0, plan, None)
        return ops.attention(q, 0, plan, window, is_mutual=mutual)


@pytest.fixture(params=every_variant())
def native(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    library = native_library(request.param)
    if library is None:
        pytest.skip("no native kernels on this machine")
    yield NativeOps(library)
    library.set_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("window", [None, 12, 100])
@pytest.mark.parametrize("mutual", [True, False])
def test_rows_see_up_to_their_reach_where_the_layer_is_mutual(
    window: int | None, mutual: bool
) -> None:
    rows = Rows(torch.float32)
    found = rows.run(TorchOps(), [rows.segment(0, LENGTH)], rows.qkv, window, mutual=mutual)
    at, keys = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    seen = keys < (reaches(0, LENGTH)[:, None] if mutual else at + 1)
    if window is not None:
        seen &= keys > at - window
    q, k, v = rows.qkv.view(LENGTH, 10, 24).split((6, 2, 2), dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(3, 1)) * HEADS.scale
    weights = scores.masked_fill(~torch.from_numpy(seen), -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(3, 1))
    torch.testing.assert_close(found, expected.reshape(LENGTH, -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mutual", [True, False])
@pytest.mark.parametrize("window", [None, 12, 100])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.float32, "int8")],
)
def test_native_kernels_see_what_torch_sees(
    dtype: torch.dtype, kv_dtype: KvDtype, window: int | None, mutual: bool, native: NativeOps
) -> None:
    """Beside a segment without images, in one batch and in chunks that begin among rows of one."""
    rows = Rows(dtype, kv_dtype)
    beside = torch.randn(40, 10 * 24).to(dtype)
    qkv = torch.cat((beside, rows.qkv))
    segments = [rows.other(), rows.segment(0, LENGTH)]
    expected = rows.run(TorchOps(), segments, qkv, window, mutual=mutual)
    whole = rows.run(native, segments, qkv, window, mutual=mutual)
    close = 3e-2 if dtype == torch.bfloat16 or kv_dtype == "int8" else 2e-5
    torch.testing.assert_close(whole, expected, atol=close, rtol=close)
    for first in (21, 169, 200, 294):  # what lies before is in the pages
        part = rows.run(
            native, [rows.segment(first, LENGTH)], rows.qkv[first:], window, mutual=mutual
        )
        assert torch.equal(part, whole[40 + first :])


def test_reaches_that_no_kernel_may_read_are_refused() -> None:
    for wrong in ([1, 2], [1, 2, 4], [0, 2, 3], [3, 2, 3]):
        extras = RowExtras(reaches=np.array(wrong))
        segment = Segment(range(3), 0, array("q", [0]), 0, extras=extras)
        with pytest.raises(ValueError, match=r"a row (must|attends)"):
            build_batch([segment], page_size=8, device="cpu", min_rows=1)


def test_triton_refuses_what_it_would_compute_wrongly() -> None:
    rows = Rows(torch.float32)
    with pytest.raises(NotImplementedError, match="only causal attention"):
        rows.run(TritonOps(), [rows.segment(0, 174)], rows.qkv[:174], None, mutual=True)

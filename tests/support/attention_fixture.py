"""Attention over a small pool whose pages all hold something, by the kernels and by the oracle."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.ops.batch import RaggedBatch, Segment, build_batch
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.triton.triton_ops import TritonOps
from foretoken.core.ops.weights import FIRST_TABLE, HeadLayout, HeadNorm, Tables
from support.rope_fixture import Turns

HEADS = HeadLayout(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)
TURNS = Turns(torch.arange(1, 9) / 7.0)
OTHER_TURNS = Turns(torch.arange(1, 9) / 5.0)
NUM_PAGES = 80
PAGE_SIZE = 16
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
ON_GPU = 5  # times as much: exponentials, roots and divisions are a few bits off there


def filled_pool(kv_dtype: KvDtype = "auto", dtype: torch.dtype = torch.float32) -> KVPool:
    """Every page holds something; int8 and fp8 as the oracle stores them."""
    pool = KVPool(
        NUM_PAGES,
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        page_size=PAGE_SIZE,
        dtype=dtype,
        device=torch.get_default_device(),
        kv_dtype=kv_dtype,
    )
    pages = array("q", range(NUM_PAGES))
    length = NUM_PAGES * PAGE_SIZE
    batch = make_batch([Segment(range(length), 0, pages, 0)])
    write(TorchOps(), batch, pool, torch.randn(length, 160).to(dtype))
    return pool


def twin(pool: KVPool) -> KVPool:
    return deepcopy(pool)


def make_batch(segments: Sequence[Segment]) -> RaggedBatch:
    return build_batch(segments, page_size=PAGE_SIZE, device="cpu", min_rows=4)


def placed(batch: RaggedBatch, ops: TorchOps | TritonOps) -> RaggedBatch:
    """The same where these operations want it."""
    device = ops.batch_device or torch.get_default_device()
    rows = ("token_ids", "positions", "slots", "logit_rows")
    return replace(batch, **{name: getattr(batch, name).to(device) for name in rows})


def write(
    ops: TorchOps | TritonOps,
    batch: RaggedBatch,
    pool: KVPool,
    qkv: Tensor,
    norm: HeadNorm | None = None,
    tables: Tables = FIRST_TABLE,
) -> tuple[Tensor, object]:
    plan = ops.plan(placed(batch, ops), pool, HEADS, TURNS, OTHER_TURNS)
    return ops.rope_write(qkv.clone(), 1, plan, norm, tables), plan


def random_qkv(batch: RaggedBatch, dtype: torch.dtype = torch.float32) -> Tensor:
    """The batch's copies of its last row are copies here, too."""
    last = int(batch.lens.sum()) - 1
    return torch.randn(batch.num_rows, 160)[torch.arange(batch.num_rows).clamp(max=last)].to(dtype)


def page_ids(*ids: int) -> array[int]:
    return array("q", ids)


def tolerance(dtype: torch.dtype = torch.float32) -> float:
    return TOLERANCE[dtype] * (1 if torch.get_default_device().type == "cpu" else ON_GPU)


def assert_attention_agrees(
    segments: list[Segment],
    pool: KVPool,
    window: int | None,
    **rule: Any,
) -> None:
    batch = make_batch(segments)
    qkv = random_qkv(batch, pool.dtype)
    other, num_rows = twin(pool), int(batch.lens.sum())
    q, plan = write(oracle := TorchOps(), batch, pool, qkv)
    expected = oracle.attention(q, 1, plan, window, **rule)  # type: ignore[arg-type]
    q, plan = write(ops := TritonOps(), batch, other, qkv)
    out = ops.attention(q, 1, plan, window, **rule)  # type: ignore[arg-type]
    atol = tolerance(pool.dtype)
    torch.testing.assert_close(out[:num_rows], expected[:num_rows], atol=atol, rtol=0)

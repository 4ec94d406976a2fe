"""NativePlan: a batch, the pool and the heads as the structs of decoder.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..base import HeadLayout
from ..batch import RaggedBatch
from ..kv_pool import KvDtype, KVPool
from .library import DTYPES

MAX_HEAD_DIM = 256  # as in attention_block.h
MAX_GROUP = 64  # query heads of a KV head

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class BatchStruct(ctypes.Structure):
    """``ft_batch``; lends the plan's arrays."""

    _fields_ = (
        ("num_rows", _I64),
        ("num_segments", _I64),
        ("max_pages", _I64),
        ("starts", _PTR),
        ("lens", _PTR),
        ("first_rows", _PTR),
        ("page_table", _PTR),
        ("tail_from", _PTR),
        ("first_tails", _PTR),
        ("tails", _PTR),
        ("slots", _PTR),
        ("cos", _PTR),
        ("sin", _PTR),
    )


class KvStruct(ctypes.Structure):
    """``ft_kv``; lends the pool's memory."""

    _fields_ = (
        ("data", _PTR),
        ("num_layers", _I64),
        ("page_size", _I64),
        ("block_bytes", _I64),
        ("scales_at", _I64),
    )


class HeadsStruct(ctypes.Structure):
    """``ft_heads``."""

    _fields_ = (
        ("num_heads", _I64),
        ("num_kv_heads", _I64),
        ("head_dim", _I64),
        ("dtype", _I64),
        ("scale", ctypes.c_float),
    )


def unsuited(dtype: torch.dtype, heads: HeadLayout | None, kv_dtype: KvDtype = "auto") -> str:
    """What of a model the kernels cannot compute, or nothing."""
    if dtype not in DTYPES:
        return f"{dtype}"
    if kv_dtype == "fp8":  # no CPU multiplies it, and int8 takes no more memory
        return "keys and values of fp8"
    if heads is not None and heads.head_dim > MAX_HEAD_DIM:
        return f"heads of {heads.head_dim} dimensions"
    if heads is not None and heads.group_size > MAX_GROUP:
        return f"{heads.group_size} query heads per KV head"
    return ""


class NativePlan:
    """What one forward pass lends to every kernel.

    Raises ValueError for rows of no segment, and for a pool that the kernels cannot read.
    """

    def __init__(
        self,
        batch: RaggedBatch,
        pool: KVPool,
        heads: HeadLayout,
        tables: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """``tables``: cos and sin ``[num_rows, head_dim / 2]`` of each table."""
        if batch.num_rows != int(batch.lens.sum()):
            raise ValueError("the native kernels take batches without copies of their last row")
        if pool.block.dtype not in (pool.dtype, torch.int8):
            raise ValueError(f"the native kernels read no keys and values of {pool.block.dtype}")
        arrays = (
            batch.starts, batch.lens, batch.first_rows, batch.page_table,
            batch.tail_from, batch.first_tails, batch.tails,
        )  # fmt: skip
        host = [np.ascontiguousarray(values, dtype=np.int64) for values in arrays]
        turns = [
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*tables, strict=True)
        ]
        tensors = [each.contiguous() for each in (batch.slots, *turns)]
        self.num_rows = batch.num_rows
        self.heads = heads
        self.dtype = pool.dtype
        self._lent = (host, tensors, pool)  # alive as long as the structs point into them
        pointers = [values.ctypes.data for values in host] + [t.data_ptr() for t in tensors]
        shape = (batch.num_rows, len(batch.lens), batch.page_table.shape[1])
        self.batch = BatchStruct(*shape, *pointers)
        block = (pool.block.num_bytes, pool.block.scales_at)
        self.kv = KvStruct(pool.data.data_ptr(), pool.num_layers, pool.page_size, *block)
        self.head_struct = HeadsStruct(
            heads.num_heads, heads.num_kv_heads, heads.head_dim, DTYPES[pool.dtype], heads.scale
        )

    @property
    def pointers(self) -> tuple[object, object, object]:
        """Batch, pool and heads, as the kernels take them."""
        return tuple(ctypes.byref(s) for s in (self.batch, self.kv, self.head_struct))  # type: ignore[return-value]

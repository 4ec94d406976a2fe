"""NativePlan: a batch, the pool and the heads as the structs of decoder.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...batch import RaggedBatch, pass_states
from ...kv_pool import KvDtype, KVPool
from ...weights import HeadLayout
from ..library import DTYPES
from .state import StatesStructs

MAX_HEAD_DIM = 576  # as in decoder.h, and the number of parts
MAX_PARTS = 4

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
        ("states", _PTR),
        ("reaches", _PTR),
    )


class KvStruct(ctypes.Structure):
    """``ft_kv``; lends the pool's memory."""

    _fields_ = (
        ("data", _PTR),
        ("page_blocks", _I64),
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
        ("value_eps", ctypes.c_float),
        ("rank", _I64),
    )


class PartStruct(ctypes.Structure):
    """``ft_part``; lends the structs of a plan."""

    _fields_ = (("batch", _PTR), ("kv", _PTR), ("heads", _PTR))


def unsuited(dtype: torch.dtype, heads: Sequence[HeadLayout], kv_dtype: KvDtype = "auto") -> str:
    """Name the part of a model that the kernels cannot compute; empty if there is none."""
    if dtype not in DTYPES:
        return f"{dtype}"
    if kv_dtype == "fp8":  # no CPU multiplies it, and int8 takes no more memory
        return "keys and values of fp8"
    if len(heads) > MAX_PARTS:
        return f"layers with heads of {len(heads)} shapes"
    for each in heads:
        if each.head_dim > MAX_HEAD_DIM:
            return f"heads of {each.head_dim} dimensions"
        if each.rank and kv_dtype != "auto":
            return f"latents of {kv_dtype}"
    return ""


def kv_struct(pool: KVPool) -> KvStruct:
    """The pool's memory. Raises ValueError for one that the kernels cannot read."""
    block = pool.block
    if block.dtype not in (pool.dtype, torch.int8):
        raise ValueError(f"the native kernels read no keys and values of {block.dtype}")
    place = (pool.data.data_ptr(), pool.page_blocks, pool.page_size)
    return KvStruct(*place, block.num_bytes, block.scales_at)


def heads_struct(heads: HeadLayout, dtype: torch.dtype) -> HeadsStruct:
    """Heads of activations of ``dtype``."""
    return HeadsStruct(
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        DTYPES[dtype],
        heads.scale,
        -1.0 if heads.value_eps is None else heads.value_eps,
        heads.rank,
    )


class NativePlan:
    """Arrays and structs of one forward pass that every kernel reads.

    Raises ValueError for rows of no segment, and for a pool that the kernels cannot read.
    """

    def __init__(
        self,
        batch: RaggedBatch,
        pool: KVPool,
        heads: HeadLayout,
        tables: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """``tables``: cos and sin ``[num_rows, turned_dim / 2]`` of each table."""
        if batch.num_rows != int(batch.lens.sum()):
            raise ValueError("the native kernels take batches without copies of their last row")
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
        self.num_logits = batch.num_logits
        self.logit_rows = batch.logit_rows if batch.num_logits < batch.num_rows else None
        self.heads = heads
        self.dtype = pool.dtype
        reaches = None if batch.reaches is None else np.ascontiguousarray(batch.reaches, np.int64)
        # Alive as long as the structs point into them.
        self._lent = (host, reaches, tensors, pool)
        pointers = [values.ctypes.data for values in host] + [t.data_ptr() for t in tensors]
        shape = (batch.num_rows, len(batch.lens), batch.page_table.shape[1])
        states = pass_states(batch, pool.states)
        self.states = None if states is None else StatesStructs(batch, states)
        states_at = None if self.states is None else self.states.address
        reaches_at = None if reaches is None else reaches.ctypes.data
        self.batch = BatchStruct(*shape, *pointers, states_at, reaches_at)
        self.kv = kv_struct(pool)
        self.head_struct = heads_struct(heads, pool.dtype)

    @property
    def pointers(self) -> tuple[object, object, object]:
        """Batch, pool and heads, as the kernels take them."""
        return tuple(ctypes.byref(s) for s in (self.batch, self.kv, self.head_struct))  # type: ignore[return-value]

    @property
    def part(self) -> PartStruct:
        """The same as one of several parts; the plan must outlive it."""
        return PartStruct(*map(ctypes.addressof, (self.batch, self.kv, self.head_struct)))

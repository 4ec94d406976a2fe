"""NativePlan: a batch, the pool and the heads as the structs of decoder.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure

import numpy as np
import torch
from torch import Tensor

from ....interface.kv_codec import KV_CODECS, KvDtype
from ...batch import RaggedBatch, pass_states
from ...kv_pool import KVPool
from ...weights import HeadLayout
from ..declarations import STRUCTS, address_of
from ..library import DTYPES
from .state import StatesStructs

# Both must be equal to the constants of decoder.h.
MAX_HEAD_DIM = 576
MAX_PARTS = 4


def unsuited(dtype: torch.dtype, heads: Sequence[HeadLayout], kv_dtype: KvDtype = "auto") -> str:
    """Return a part of a model that the kernels do not support, or "" if they support it all."""
    if dtype not in DTYPES:
        return f"{dtype}"
    if KV_CODECS[kv_dtype].native_code is None:
        return f"keys and values of {kv_dtype}"
    if len(heads) > MAX_PARTS:
        return f"layers with heads of {len(heads)} shapes"
    for each in heads:
        if each.head_dim > MAX_HEAD_DIM:
            return f"heads of {each.head_dim} dimensions"
        if each.rank and kv_dtype != "auto":
            return f"latents of {kv_dtype}"
    return ""


def kv_struct(pool: KVPool) -> Structure:
    """Return the ``ft_kv`` of a pool. Raises ValueError if the kernels lack its codec."""
    block = pool.block
    if block.codec.native_code is None:
        raise ValueError(
            f"the native kernels do not support keys and values of torch.{block.codec.number}"
        )
    return STRUCTS.ft_kv(
        data=pool.data.data_ptr(),
        page_blocks=pool.page_blocks,
        page_size=pool.page_size,
        block_bytes=block.num_bytes,
        scales_at=block.scales_at,
        codec=block.codec.native_code,
    )


def heads_struct(heads: HeadLayout, dtype: torch.dtype) -> Structure:
    """Return the ``ft_heads`` of a head layout; ``dtype`` is the activations'."""
    return STRUCTS.ft_heads(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=DTYPES[dtype],
        scale=heads.scale,
        value_eps=-1.0 if heads.value_eps is None else heads.value_eps,
        rank=heads.rank,
    )


class NativePlan:
    """Arrays and structs of one forward pass that every kernel reads.

    Raises ValueError for a batch with copies of its last row, and for a pool whose codec the
    kernels lack.
    """

    def __init__(
        self,
        batch: RaggedBatch,
        pool: KVPool,
        heads: HeadLayout,
        tables: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """Make the structs; ``tables``: cos and sin per table, ``[num_rows, rope_dim / 2]``."""
        if batch.num_rows != int(batch.lens.sum()):
            raise ValueError(
                "the native kernels do not support batches with copies of their last row"
            )
        rows = {
            "starts": batch.starts,
            "lens": batch.lens,
            "first_rows": batch.first_rows,
            "page_table": batch.page_table,
            "tail_from": batch.tail_from,
            "first_tails": batch.first_tails,
            "tails": batch.tails,
        }
        if batch.reaches is not None:
            rows["reaches"] = batch.reaches
        host = {name: np.ascontiguousarray(each, dtype=np.int64) for name, each in rows.items()}
        cos, sin = (
            (torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous()
            for parts in zip(*tables, strict=True)
        )
        slots = batch.slots.contiguous()
        self.num_rows = batch.num_rows
        self.num_logits = batch.num_logits
        self.logit_rows = batch.logit_rows if batch.num_logits < batch.num_rows else None
        self.heads = heads
        self.dtype = pool.dtype
        # The structs point into them.
        self._kept_alive = (host, cos, sin, slots, pool)
        states = pass_states(batch, pool.states)
        self.states = None if states is None else StatesStructs(batch, states)
        self.batch = STRUCTS.ft_batch(
            num_rows=batch.num_rows,
            num_segments=len(batch.lens),
            max_pages=batch.page_table.shape[1],
            slots=slots.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            states=None if self.states is None else ctypes.pointer(self.states.struct),
            **{name: address_of(each) for name, each in host.items()},
        )
        self.kv = kv_struct(pool)
        self.head_struct = heads_struct(heads, pool.dtype)

    @property
    def pointers(self) -> tuple[object, object, object]:
        """Pointers to batch, pool and heads, for the kernels."""
        return tuple(ctypes.byref(s) for s in (self.batch, self.kv, self.head_struct))  # type: ignore[return-value]

    @property
    def part(self) -> Structure:
        """The ``ft_part`` with the plan's batch, pool and heads; the plan must outlive it."""
        return STRUCTS.ft_part(
            batch=ctypes.pointer(self.batch),
            kv=ctypes.pointer(self.kv),
            heads=ctypes.pointer(self.head_struct),
        )

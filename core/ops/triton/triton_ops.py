"""TritonOps: the operations of a decoder step on an NVIDIA GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...batch import RaggedBatch
from ...kv_pool import KVPool
from ...sampler import TorchSampler
from ..base import Exactness, ForwardPlan, HeadLayout, HeadNorm, PackedLinear
from ..weights import DecoderWeights
from .attention import attend_kernel, merge_kernel
from .elementwise import rms_norm_kernel, rope_write_kernel, silu_mul_kernel
from .linear import linear_kernel
from .plan import DeviceItems, TritonPlan, Work, _power_of_two
from .work_list import SPLIT

FEW_ROWS = 64  # up to which our own linear is used; beyond, the library's is bound by arithmetic
KEYS_TILE = 32  # positions
ACTIVATION_TILE = 1024  # columns


class TritonOps:
    """The operations of `Ops`, each in one kernel.

    ``exact``: "spec" keeps decoded and verified rows alike, "batch" all rows, by tiles of one
    size; "off" leaves linears to the library.
    """

    min_rows = 1

    def __init__(self, *, exact: Exactness = "spec") -> None:
        self.exact: Exactness = exact
        self.sampler = TorchSampler()

    def set_threads(self, count: int) -> None:
        """The host's threads, for what little it computes."""
        torch.set_num_threads(count)

    def fuse(self, weights: DecoderWeights) -> None:
        """One kernel after another."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """As it is."""
        return PackedLinear(weight.contiguous(), bias, packed=False)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """``[T, in_features] -> [T, out_features]``."""
        few = self.exact == "batch" or len(x) <= FEW_ROWS
        if self.exact == "off" or not few:
            return F.linear(x, weight.weight, weight.bias)
        return tiled_linear(x, weight.weight, weight.bias)

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """``[T] -> [T, hidden]`` from a table ``[vocab, hidden]``."""
        return table.index_select(0, token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension (arXiv 1910.07467)."""
        return _norm(x, None, weight, eps)[0]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum."""
        return _norm(x, residual, weight, eps)

    def plan(
        self, batch: RaggedBatch, pool: KVPool, heads: HeadLayout, cos: Tensor, sin: Tensor
    ) -> TritonPlan:
        """Index tensors of the pass."""
        return TritonPlan(batch, pool, heads, cos, sin)

    def rope_write(
        self, qkv: Tensor, layer: int, plan: ForwardPlan, norm: HeadNorm | None
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the pool."""
        assert isinstance(plan, TritonPlan)
        heads, pool = plan.heads, plan.pool
        q = qkv.new_empty((len(qkv), heads.num_heads * heads.head_dim))
        rope_write_kernel[(len(qkv), heads.num_heads + 2 * heads.num_kv_heads)](
            qkv, q, pool.data, _scales(pool), plan.slots, plan.cos, plan.sin,
            qkv if norm is None else norm.weight, 0.0 if norm is None else norm.eps, heads.scale,
            plan.layer_block(layer), plan.page_blocks,
            **_shape(heads, pool), HAS_NORM=norm is not None,
        )  # fmt: skip
        return q

    def attention(self, q: Tensor, layer: int, plan: ForwardPlan, window: int | None) -> Tensor:
        """Causal attention over the pages, ``[T, num_heads * head_dim]`` to the same shape."""
        assert isinstance(plan, TritonPlan)
        out, work, heads = torch.empty_like(q), plan.work(window), plan.heads
        _attend(q, out, layer, plan, work, work.wide, window, is_narrow=False)
        _attend(q, out, layer, plan, work, work.narrow, window, is_narrow=True)
        if len(work.merged_rows):
            merge_kernel[(len(work.merged_rows),)](
                out, work.sums, work.tops, work.totals,
                work.merged_rows, work.bases, work.first_splits, work.last_splits,
                NUM_HEADS=heads.num_heads, HEADS_TILE=_power_of_two(heads.num_heads),
                HEAD_DIM=heads.head_dim,
            )  # fmt: skip
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``[T, 2 * width] -> [T, width]``: silu of the first half times the second."""
        num_rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty((num_rows, width))
        silu_mul_kernel[(num_rows, -(-width // ACTIVATION_TILE))](
            gate_up, out, WIDTH=width, TILE=ACTIVATION_TILE
        )
        return out

    def logits(self, hidden: Tensor, weight: PackedLinear) -> Tensor:
        """``[R, hidden] -> [R, vocab]`` float32."""
        return self.linear(hidden, weight).float()


def tiled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """``[T, in_features]`` times ``weight`` [out_features, in_features] in tiles of 16 rows.

    ``scale`` [out_features] float32 where the weight is int8. A row's bits are its own.
    """
    num_rows, width = x.shape
    out = x.new_empty((num_rows, len(weight)))
    tile_in = min(128, max(16, _power_of_two(width)))
    linear_kernel[(-(-len(weight) // 32), -(-num_rows // 16))](
        x, weight, x if scale is None else scale, x if bias is None else bias, out, num_rows,
        IN=width, OUT=len(weight), TILE_ROWS=16, TILE_OUT=32, TILE_IN=tile_in,
        IS_INT8=scale is not None, HAS_BIAS=bias is not None,
    )  # fmt: skip
    return out


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    rms_norm_kernel[(len(x),)](
        x, x if residual is None else residual, weight, out, total, eps,
        WIDTH=x.shape[1], TILE=_power_of_two(x.shape[1]), HAS_RESIDUAL=residual is not None,
    )  # fmt: skip
    return out, total


def _attend(
    q: Tensor, out: Tensor, layer: int, plan: TritonPlan, work: Work, items: DeviceItems,
    window: int | None, *, is_narrow: bool,
) -> None:  # fmt: skip
    if not len(items):
        return
    heads, pool = plan.heads, plan.pool
    attend_kernel[(len(items), heads.num_kv_heads)](
        q, out, pool.data, _scales(pool), work.sums, work.tops, work.totals,
        plan.positions, work.bases, plan.tables,
        items.rows, items.first_rows, items.num_rows, items.tables,
        items.first_splits, items.last_splits,
        plan.tables.shape[1], plan.layer_block(layer), plan.page_blocks,
        **_shape(heads, pool), SPLIT=SPLIT, TILE=KEYS_TILE,
        TILE_ROWS=plan.narrow_tile if is_narrow else plan.wide_tile,
        WINDOW=window or 0, IS_NARROW=is_narrow,
    )  # fmt: skip


def _shape(heads: HeadLayout, pool: KVPool) -> dict[str, int]:
    return {
        "NUM_HEADS": heads.num_heads,
        "NUM_KV_HEADS": heads.num_kv_heads,
        "HEAD_DIM": heads.head_dim,
        "PAGE_SIZE": pool.page_size,
        "NUM_ITEMS": pool.block.num_items,
        "SCALES_AT": pool.block.scales_at,
    }


def _scales(pool: KVPool) -> Tensor:
    """The pool's memory as float32 where scales lie in it; else anything."""
    return pool.data.view(torch.float32) if pool.block.scales_at else pool.data

"""TorchOps: every operation in plain PyTorch. The oracle, and the CPU's fallback."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...sampling.sampler import TorchSampler
from ..base import DecoderWeights, Exactness, ForwardPlan, HeadLayout, HeadNorm, PackedLinear, Rope
from ..batch import RaggedBatch
from ..kv_pool import KVPool
from ..quantize import QuantizedWeight, WeightKind
from .attention import attend
from .plan import TorchPlan

_PACK_ROWS = 8  # a layout made for 8 rows serves any number of rows equally well (measured)
_PACKED_DTYPES = (torch.float32, torch.bfloat16)


class TorchOps:
    """The operations of `Ops`. Exact on the CPU in float32 and bfloat16, from two rows up."""

    # oneDNN takes another path for a single row; from two rows up a row's bits never change. Four
    # take less time than two: 0.6 times in float32, 0.8 in bfloat16 (measured, prepacked weights).
    min_rows = 4
    batch_device = None
    stored_kinds: frozenset[WeightKind] = frozenset()

    def __init__(self, *, exact: Exactness = "spec") -> None:
        self.exact: Exactness = exact
        self.sampler = TorchSampler()

    def set_threads(self, count: int) -> None:
        """Torch keeps its thread count per thread: the model thread must set its own."""
        torch.set_num_threads(count)

    def compile_forward(self, weights: DecoderWeights) -> None:
        """Torch runs one operation after another."""

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None
    ) -> PackedLinear:
        """Reorder for oneDNN, whose rows are the same bits beside any number of others."""
        assert isinstance(weight, Tensor)
        if weight.device.type != "cpu" or weight.dtype not in _PACKED_DTYPES or not _has_onednn():
            return PackedLinear(weight, bias, packed=False)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        return PackedLinear(packed, bias, packed=True)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """``[T, in_features] -> [T, out_features]``; T is at least 2."""
        if not weight.packed:
            return F.linear(x, weight.weight, weight.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, weight.weight, weight.bias, "none", [], ""
        )
        return out

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """``[T] -> [T, hidden]`` from a table ``[vocab, hidden]``."""
        return table.index_select(0, token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension (arXiv 1910.07467)."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def plan(self, batch: RaggedBatch, pool: KVPool, heads: HeadLayout, rope: Rope) -> TorchPlan:
        """Row indices of every gather and scatter of the pass."""
        cos, sin = rope.rows(batch.positions, int(batch.stops.max()))
        return TorchPlan(batch, pool, heads, cos, sin, pad_rows=self.exact != "off")

    def rope_write(
        self, qkv: Tensor, layer: int, plan: ForwardPlan, norm: HeadNorm | None
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the pool."""
        assert isinstance(plan, TorchPlan)
        heads = plan.heads
        qkv = qkv.view(len(qkv), -1, heads.head_dim)
        turning = qkv[:, : heads.num_heads + heads.num_kv_heads].float()
        if norm is not None:
            turning = F.rms_norm(turning, (heads.head_dim,), None, norm.eps) * norm.weight
        turned = _rotate(turning, plan.cos, plan.sin)
        q, keys = turned[:, : heads.num_heads], turned[:, heads.num_heads :]
        values = qkv[:, -heads.num_kv_heads :].float()
        plan.write(torch.cat((keys, values), dim=1), layer)
        return q.mul(heads.scale).to(qkv.dtype).view(len(qkv), -1)

    def attention(self, q: Tensor, layer: int, plan: ForwardPlan, window: int | None) -> Tensor:
        """Causal attention over the pages, ``[T, num_heads * head_dim]`` to the same shape."""
        assert isinstance(plan, TorchPlan)
        return attend(q, layer, plan, window)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``[T, 2 * width] -> [T, width]``: silu of the first half times the second."""
        gate, up = gate_up.chunk(2, dim=-1)
        # F.silu rounds the tail of a vector otherwise than its body, so that a value depends on
        # where it lies; exp, add and divide do not.
        wide = gate.float()
        activated = wide / torch.exp(-wide).add_(1.0)
        return activated.to(gate_up.dtype) * up

    def logits(self, hidden: Tensor, weight: PackedLinear) -> Tensor:
        """``[R, hidden] -> [R, vocab]`` float32; R is at least 2."""
        return self.linear(hidden, weight).float()


def _has_onednn() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on halves (arXiv 2104.09864): ``x * cos + rotate_half(x) * sin``.

    ``x``: [T, heads, head_dim]; ``cos``: [T, 1, head_dim]; ``sin``: the same, with the sign of
    the first half turned.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).add_(swapped.mul_(sin))

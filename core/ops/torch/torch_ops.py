"""TorchOps: every operation in plain PyTorch, the reference and the CPU's fallback."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import MutableMapping
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from ...sampling.sampler import TorchSampler
from ..base import Exactness, ForwardPlan, Ops, Rope, capped, gated
from ..batch import RaggedBatch
from ..kv_pool import KVPool
from ..lora import LoraUpdate, PackedLora
from ..machine.device import cpu_flags
from ..mixers.conv import ConvWeights
from ..mixers.recurrent import RecurrentWeights
from ..quantize import QuantizedWeight, WeightKind
from ..weights import (
    FIRST_TABLE,
    SILU,
    Activation,
    DecoderWeights,
    ExpertWeights,
    HeadLayout,
    HeadNorm,
    Norm,
    PackedLinear,
    PackedTable,
    Table,
    Tables,
)
from .attention import attend
from .conv import run_short_conv
from .experts import run_experts
from .lora import LinearLora, add_linear_lora, pack_linear_lora
from .plan import TorchPlan
from .state import run_recurrent

logger = logging.getLogger(__name__)
ONEDNN_SETTING = "ONEDNN_MAX_CPU_ISA"
"""oneDNN's variable for the newest allowed instruction set; read once, at its first call."""
WITHOUT_AMX = "AVX512_CORE_BF16"
_PACK_ROWS = 8  # a layout made for 8 rows is as fast for any other number (measured)
_PACKED_DTYPES = (torch.float32, torch.bfloat16)


class TorchOps(Ops):
    """`Ops` in torch.

    On a CPU, in float32 and bfloat16, a row's bits are the same in all batches of two or more rows.
    """

    # oneDNN takes another path for a single row; with two or more rows a row's bits never change.
    # Four rows take 0.6 times as long as two in float32, 0.8 in bfloat16 (measured, prepacked).
    min_rows = 4
    tile_rows = 16
    batch_device = None
    has_own_threads = False
    stored_kinds: frozenset[WeightKind] = frozenset()

    def __init__(self, *, exact: Exactness = "spec") -> None:
        self.exact: Exactness = exact
        self.sampler = TorchSampler()

    def unsuited(self, heads: HeadLayout) -> str:  # noqa: ARG002
        """Return "": heads of any shape can be computed."""
        return ""

    @property
    def identity(self) -> dict[str, str]:
        """An empty mapping: all kernels are torch's."""
        return {}

    def set_threads(self, count: int) -> None:
        """Set the number of torch's threads for the calling thread.

        Torch's setting is per thread, so the model thread must set its own.
        """
        torch.set_num_threads(count)

    def compile_forward(self, weights: DecoderWeights) -> None:
        """Return None: torch runs one operation after another."""

    def pack_linear(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None = None,
        *,
        plain: bool = False,  # noqa: ARG002 - this backend never quantises
    ) -> PackedLinear:
        """Reorder a weight for oneDNN, so that a row's bits do not depend on the number of rows.

        If oneDNN has no bfloat16 products, such weights are packed as float32 and take twice the
        memory; products and sums are then float32, rounded once.
        """
        assert isinstance(weight, Tensor)
        if weight.device.type != "cpu" or weight.dtype not in _PACKED_DTYPES or not _has_onednn():
            return PackedLinear(weight, bias, packed=False)
        if not _packs(weight.dtype):
            weight, bias = weight.float(), None if bias is None else bias.float()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        return PackedLinear(packed, bias, packed=True)

    @override
    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        if not weight.packed:
            return F.linear(x, weight.weight, weight.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(weight.weight.dtype), weight.weight, weight.bias, "none", [], ""
        )
        return out.to(x.dtype)

    def pack_lora(self, update: LoraUpdate, dtype: torch.dtype) -> LinearLora:  # noqa: ARG002
        """Lay out an update in float32 for any dtype of activations."""
        return pack_linear_lora(self, update)

    @override
    def add_lora(self, out: Tensor, x: Tensor, rows: Tensor, lora: PackedLora) -> None:
        add_linear_lora(self, out, x, rows, lora)

    def packed_table(self, weight: PackedLinear, dtype: torch.dtype, factor: float) -> PackedTable:
        """Raise NotImplementedError: `stored_kinds` is empty."""
        raise NotImplementedError

    @override
    def embedding(self, token_ids: Tensor, table: Table) -> Tensor:
        assert isinstance(table, Tensor)
        return table.index_select(0, token_ids)

    @override
    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        weight, eps = norm.weight, norm.eps
        if norm.is_layer:
            return F.layer_norm(x.float(), weight.shape, weight, norm.bias, eps).to(x.dtype)
        if weight.dtype != x.dtype:
            return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    @override
    def add_norm(
        self, x: Tensor, residual: Tensor, norm: Norm | None, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        if factor != 1.0:
            total *= factor
        return total if norm is None else self.norm(total, norm), total

    def plan(self, batch: RaggedBatch, pool: KVPool, heads: HeadLayout, *ropes: Rope) -> TorchPlan:
        """Return the row indices of every gather and scatter of the pass."""
        tables = [rope.rows(batch.positions, batch.rope_stop) for rope in ropes]
        return TorchPlan(batch, pool, heads, tables, pad_rows=self.exact != "off")

    @override
    def rope_write(
        self,
        qkv: Tensor,
        layer: int,
        plan: ForwardPlan,
        norm: HeadNorm | None,
        tables: Tables = FIRST_TABLE,
    ) -> Tensor:
        assert isinstance(plan, TorchPlan)
        heads = plan.heads
        qkv = qkv.view(len(qkv), -1, heads.head_dim)
        if heads.rank:
            return _write_latents(qkv, layer, plan, tables)
        turning = qkv[:, : heads.num_heads + heads.num_kv_heads].float()
        if norm is not None and not norm.is_after_rope:
            turning = _normed_heads(turning, norm, heads.num_heads)
        if tables.queries == tables.keys:
            turned = _rotate(turning, *plan.tables[tables.keys])
        else:
            parts = turning.tensor_split([heads.num_heads], dim=1)
            pairs = zip(parts, tables, strict=True)
            turned = torch.cat([_rotate(part, *plan.tables[table]) for part, table in pairs], dim=1)
        if norm is not None and norm.is_after_rope:
            turned = _normed_heads(turned, norm, heads.num_heads)
        q, keys = turned[:, : heads.num_heads], turned[:, heads.num_heads :]
        if keys.shape[1]:
            values = qkv[:, -heads.num_kv_heads :].float()
            if heads.value_eps is not None:
                values = F.rms_norm(values, values.shape[2:], None, heads.value_eps)
            plan.write(torch.cat((keys, values), dim=1), layer)
        return q.mul(heads.scale).to(qkv.dtype).view(len(qkv), -1)

    @override
    def attention(
        self,
        q: Tensor,
        layer: int,
        plan: ForwardPlan,
        window: int | None,
        *,
        cap: float | None = None,
        sinks: Tensor | None = None,
        is_mutual: bool = False,
    ) -> Tensor:
        assert isinstance(plan, TorchPlan)
        return attend(q, layer, plan, window, cap=cap, sinks=sinks, is_mutual=is_mutual)

    @override
    def activate(self, x: Tensor, activation: Activation = SILU) -> Tensor:
        gate, factor = x.chunk(2, dim=-1) if activation.gated else (x, None)
        wide = gate.float()
        # F.silu and F.gelu round the tail of a vector unlike its body, so that a value depends on
        # its index; exp, add and divide do not.
        if activation.kind == "clamped_swiglu":
            assert factor is not None
            wide = wide.clamp(max=activation.limit)
            factor = factor.float().clamp(-activation.limit, activation.limit) + 1.0
            activated = wide / torch.exp(wide * -1.702).add_(1.0)
            return (activated.to(x.dtype) * factor).to(x.dtype)
        if activation.kind == "silu":
            activated = wide / torch.exp(-wide).add_(1.0)
        elif activation.kind == "relu2":  # arXiv 2109.08668
            activated = wide.relu().square_()
        else:
            activated = _gelu_tanh(wide)
        return activated.to(x.dtype) if factor is None else activated.to(x.dtype) * factor

    @override
    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated(x, gate)

    @override
    def recur(
        self, mixed: Tensor, gates: Tensor, weights: RecurrentWeights, plan: ForwardPlan
    ) -> Tensor:
        assert isinstance(plan, TorchPlan)
        assert plan.states is not None
        return run_recurrent(mixed, gates, weights, plan.batch, plan.states)

    @override
    def short_conv(self, mixed: Tensor, weights: ConvWeights, plan: ForwardPlan) -> Tensor:
        assert isinstance(plan, TorchPlan)
        assert plan.states is not None
        return run_short_conv(mixed, weights, plan.batch, plan.states)

    @override
    def experts(
        self,
        x: Tensor,
        weights: ExpertWeights,
        plan: ForwardPlan | None = None,
        routed_by: Tensor | None = None,
    ) -> Tensor:
        return run_experts(self, x, weights, routed_by)

    @override
    def logits(self, hidden: Tensor, weight: PackedLinear, cap: float | None = None) -> Tensor:
        return capped(self.linear(hidden, weight).float(), cap)


def _has_onednn() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of ``dtype`` on this CPU, found by packing a small weight.

    The CPU's flags are no answer: ``ONEDNN_MAX_CPU_ISA`` may forbid instructions that it has.
    """
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), _PACK_ROWS)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        logger.info("PyTorch multiplies %s weights as float32 on this CPU: %s", dtype, reason)
        return False
    return True


def _write_latents(rows: Tensor, layer: int, plan: TorchPlan, tables: Tables) -> Tensor:
    """Apply RoPE to the last items of queries and key, and write the key.

    ``rows``: [T, num_heads + 1, head_dim]. Returns scaled queries ``[T, num_heads * head_dim]``.
    """
    heads = plan.heads
    still, turning = torch.split(rows.float(), [heads.rank, heads.rope_dim], dim=2)
    queries = _rotate(turning[:, : heads.num_heads], *plan.tables[tables.queries])
    key = _rotate(turning[:, heads.num_heads :], *plan.tables[tables.keys])
    turned = torch.cat((still, torch.cat((queries, key), dim=1)), dim=2)
    plan.write(turned[:, heads.num_heads :], layer)
    return turned[:, : heads.num_heads].mul(heads.scale).to(rows.dtype).flatten(1)


def _normed_heads(x: Tensor, norm: HeadNorm, num_heads: int) -> Tensor:
    """Return normed queries and keys [T, heads, head_dim] in float32.

    The mean is per head or, with ``norm.whole``, over all query heads and over all key heads.
    """
    if not norm.whole:
        return F.rms_norm(x, x.shape[2:], None, norm.eps) * norm.weight
    parts = torch.split(x, [num_heads, x.shape[1] - num_heads], dim=1)
    normed = [F.rms_norm(part.flatten(1), (part[0].numel(),), None, norm.eps) for part in parts]
    return torch.cat(normed, dim=1).view(x.shape) * norm.weight


def _gelu_tanh(x: Tensor) -> Tensor:
    """Return ``x / (1 + exp(-2 u))``, equal to ``x * 0.5 * (1 + tanh(u))``.

    Source: arXiv 1606.08415, section 2.
    """
    inner = (x * x * x).mul_(0.044715).add_(x).mul_(-2 * math.sqrt(2 / math.pi))
    return x / inner.exp_().add_(1.0)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x * cos + rotate_half(x) * sin``: RoPE on halves (arXiv 2104.09864).

    ``x``: [T, heads, head_dim]; ``cos`` and ``sin``: [T, 1, head_dim], the first half of ``sin``
    negated.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).add_(swapped.mul_(sin))


def keep_rows_exact(
    exact: Exactness,
    flags: frozenset[str] | None = None,
    environ: MutableMapping[str, str] | None = None,
) -> bool:
    """Forbid oneDNN the AMX instructions if exact rows are requested; return whether it did.

    With AMX a row's bits change with the number of rows in a batch (measured in bfloat16).
    ``flags``: the CPU's features; None: this CPU's. A value already set in ``environ`` stays. The
    limit takes effect only before oneDNN's first call in this process.
    """
    flags = cpu_flags() if flags is None else flags
    environ = os.environ if environ is None else environ
    if exact == "off" or "amx_bf16" not in flags or ONEDNN_SETTING in environ:
        return False
    environ[ONEDNN_SETTING] = WITHOUT_AMX
    logger.info(
        "limiting oneDNN to AVX-512 (%s=%s), so that a row has the same bits in every batch; "
        "--exact off removes the limit",
        ONEDNN_SETTING,
        WITHOUT_AMX,
    )
    return True

"""Attention over keys and values in the pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import override

from ..kv_pool import KvLayer
from ..weights import FIRST_TABLE, HeadNorm, PackedLinear, Tables
from .mixer import MixerWeights, linear_of_ranks

if TYPE_CHECKING:
    from ..base import ForwardPlan, Ops
    from ..parallel import Comm


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights(MixerWeights):
    """Attention over the pages, with Q, K and V packed into one matrix.

    A layer without its own keys (``has_keys`` is False) reads the keys and values of an earlier
    layer: its ``qkv`` has only queries, and its ``kv`` is the earlier layer's. With a ``gate``
    rows of ``qkv`` are queries, keys, values and the gate, whose sigmoid multiplies the attention's
    output before ``o`` (Qwen3-Next). ``comm``: present if the heads are divided among ranks; the
    ranks' outputs of ``o`` are then summed.
    """

    qkv: PackedLinear
    head_norm: HeadNorm | None
    o: PackedLinear
    window: int | None  # positions that a row sees, itself included; None: all before it
    kv: KvLayer  # location of the layer's keys and values in the pool
    tables: Tables = FIRST_TABLE
    cap: float | None = None  # limit of the scores, by tanh; None: unlimited
    sinks: Tensor | None = None  # [num_heads] float32: scores of a key without a value
    gate: int = 0  # width of the gate, equal to the queries'; 0: no gate
    has_keys: bool = True
    comm: Comm | None = None
    is_mutual: bool = False  # whether the rows of an image see each other

    @property
    @override
    def linears(self) -> tuple[PackedLinear, ...]:
        return (self.qkv, self.o)

    @property
    @override
    def kv_layer(self) -> KvLayer:
        return self.kv

    @property
    @override
    def kv_window(self) -> int | None:
        return self.window

    @property
    @override
    def is_divided(self) -> bool:
        return self.comm is not None

    @override
    def compute(self, ops: Ops, x: Tensor, plan: ForwardPlan) -> Tensor:
        index = self.kv.layer
        qkv, gate = ops.linear(x, self.qkv), None
        if self.gate:
            qkv, gate = (part.contiguous() for part in qkv.tensor_split([-self.gate], dim=1))
        q = ops.rope_write(qkv, index, plan, self.head_norm, self.tables)
        attended = ops.attention(
            q, index, plan, self.window, cap=self.cap, sinks=self.sinks, is_mutual=self.is_mutual
        )
        if gate is not None:
            attended = ops.gate(attended, gate)
        return linear_of_ranks(ops, attended, self.o, self.comm)

    @override
    def write_kv(self, ops: Ops, x: Tensor, plan: ForwardPlan) -> None:
        qkv = ops.linear(x, self.qkv)
        if self.gate:
            qkv = qkv[:, : -self.gate].contiguous()
        ops.rope_write(qkv, self.kv.layer, plan, self.head_norm, self.tables)

"""TritonOps: the operations of a decoder step on an NVIDIA GPU."""

from __future__ import annotations

import logging
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from ...errors import ModelLoadError
from ..base import Exactness, ForwardPlan, Ops, Rope, RoughOps, capped, gated
from ..batch import RaggedBatch
from ..kv_pool import KVPool
from ..lora import LoraUpdate, PackedLora
from ..mixers.conv import ConvWeights
from ..mixers.recurrent import RecurrentWeights
from ..quantize import Quantize, QuantizedWeight, WeightKind
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
from .attention.launch import Rule, attend, memory_of, merge, shape
from .availability import unsuited_heads
from .chain import chained
from .elementwise import activate_kernel, norm_kernel, rope_write_kernel
from .graph.graphs import MakeGraph, cuda_graphs
from .graph.plan import DevicePlan, Geometry, TritonPlan, power_of_two
from .graph.step import TritonStep
from .linear.experts import ExpertTables, run_experts
from .linear.lora import TritonLora, add_triton_lora, pack_triton_lora
from .linear.tiled_linear import TiledLinear, pack_tiled, rough_copy, tiled_linear
from .recurrent.pass_states import record_positions
from .recurrent.recur import gated_norm, recur
from .recurrent.short_conv import short_conv
from .sampling.sampler import TritonSampler

logger = logging.getLogger(__name__)
ACTIVATION_TILE = 1024  # columns


class TritonOps(Ops, RoughOps):
    """`Ops` on a GPU.

    ``exact``: with "spec" and "batch" a row's bits do not depend on other rows, except in attention
    of long chunks with "spec", whose tiles are wider than those for decoding rows. "off" leaves
    linears to the library unless ``quantize`` is int8. ``quantize`` may not be int4. ``graphs``:
    makes the graphs of a decoder's layers. "auto": CUDA graphs on a GPU; "off", or "auto" on a CPU:
    kernels are launched one by one, with the same bits.
    """

    min_rows = 1
    tile_rows = 16
    batch_device = "cpu"  # a plan copies a whole batch to the device at once
    has_own_threads = False
    stored_kinds: frozenset[WeightKind] = frozenset()

    def __init__(
        self,
        *,
        exact: Exactness = "spec",
        quantize: Quantize = "none",
        graphs: MakeGraph | Literal["auto", "off"] = "auto",
    ) -> None:
        if quantize == "int4":
            raise ModelLoadError("quantize int4 is not supported by the triton backend; use int8")
        self.exact: Exactness = exact
        self.quantize: Quantize = quantize
        self.sampler = TritonSampler()
        self._graphs = graphs
        self._experts: WeakKeyDictionary[ExpertWeights, ExpertTables] = WeakKeyDictionary()

    @override
    def unsuited(self, heads: HeadLayout) -> str:
        return unsuited_heads(heads)

    @property
    def identity(self) -> dict[str, str]:
        """Version of Triton, which compiles the kernels."""
        return {"triton": triton.__version__}

    def set_threads(self, count: int) -> None:
        """Set the number of torch's threads for the host's small computations."""
        torch.set_num_threads(count)

    def compile_forward(self, weights: DecoderWeights) -> TritonStep:
        """Return a step with one graph per number of rows; with few rows it also chooses tokens."""
        make_graph = self._make_graph(weights.embedding.device)
        one_tile = self.exact == "batch"
        for layer in weights.layers:
            if isinstance(layer.mlp, ExpertWeights):
                self._tables(layer.mlp)  # copies to the device, which is not possible in a capture
        return TritonStep(self, weights, self.sampler, one_tile=one_tile, make_graph=make_graph)

    def _make_graph(self, device: torch.device) -> MakeGraph | None:
        if self._graphs == "off" or (self._graphs == "auto" and device.type != "cuda"):
            return None
        return cuda_graphs() if self._graphs == "auto" else self._graphs

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, *, plain: bool = False
    ) -> PackedLinear:
        """Lay out a weight for the tiled kernels, as int8 if the backend quantises.

        ``plain``: leave it unquantised.
        """
        assert isinstance(weight, Tensor)
        if self.exact == "off" and (plain or self.quantize == "none"):
            return PackedLinear(weight.contiguous(), bias, packed=False)
        return pack_tiled(weight, bias, is_int8=not plain and self.quantize == "int8")

    @override
    def rough_copy(self, weight: PackedLinear, dtype: torch.dtype) -> TiledLinear:
        return rough_copy(weight, dtype)

    @override
    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        if isinstance(weight, TiledLinear):
            return tiled_linear(x, weight)
        return F.linear(x, weight.weight, weight.bias)

    def pack_lora(self, update: LoraUpdate, dtype: torch.dtype) -> TritonLora:  # noqa: ARG002
        """Lay out an update in float32 for any dtype of activations."""
        return pack_triton_lora(update)

    @override
    def add_lora(self, out: Tensor, x: Tensor, rows: Tensor, lora: PackedLora) -> None:
        add_triton_lora(out, x, rows, lora)

    def packed_table(self, weight: PackedLinear, dtype: torch.dtype, factor: float) -> PackedTable:
        """Raise NotImplementedError: `stored_kinds` is empty."""
        raise NotImplementedError

    @override
    def embedding(self, token_ids: Tensor, table: Table) -> Tensor:
        assert isinstance(table, Tensor)
        return table.index_select(0, token_ids)

    @override
    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return _norm(x, None, norm)[0]

    @override
    def add_norm(
        self, x: Tensor, residual: Tensor, norm: Norm | None, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        if factor != 1.0:
            total = (x + residual).mul_(factor)
            return (total if norm is None else self.norm(total, norm)), total
        return _norm(x, residual, norm)

    def plan(self, batch: RaggedBatch, pool: KVPool, heads: HeadLayout, *ropes: Rope) -> TritonPlan:
        """Return a plan of a batch whose tensors are on the host.

        Raises NotImplementedError for rows that see later rows.
        """
        if batch.reaches is not None:
            raise NotImplementedError("the Triton kernels support only causal attention")
        return TritonPlan(batch, Geometry(pool, heads, ropes, self.exact == "batch"))

    @override
    def rope_write(
        self,
        qkv: Tensor,
        layer: int,
        plan: ForwardPlan,
        norm: HeadNorm | None,
        tables: Tables = FIRST_TABLE,
    ) -> Tensor:
        device = _on_device(plan)
        heads, pool = device.geometry.heads, device.geometry.pool
        q = qkv.new_empty((len(qkv), heads.num_heads * heads.head_dim))
        rope_write_kernel[(len(qkv), heads.num_heads + 2 * heads.num_kv_heads)](
            qkv, q, *memory_of(pool), device.slots, device.positions,
            *device.cos_sin[tables.queries], *device.cos_sin[tables.keys],
            qkv if norm is None else norm.weight, 0.0 if norm is None else norm.eps, heads.scale,
            device.geometry.layer_block(layer), device.geometry.page_blocks,
            **shape(heads, pool), HAS_NORM=norm is not None,
            IS_WHOLE=norm is not None and norm.whole,
            IS_AFTER_ROPE=norm is not None and norm.is_after_rope,
            **chained(len(qkv), qkv.device),
        )  # fmt: skip
        return q

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
        device = _on_device(plan, window)
        out = torch.empty_like(q)
        rule = Rule(window, cap, sinks)
        for work in device.works[window]:
            if work.kinds.wide:
                attend(q, out, layer, device, work, rule, is_narrow=False)
            if work.kinds.narrow:
                attend(q, out, layer, device, work, rule, is_narrow=True)
            if work.kinds.partial_sums:
                merge(out, device, work, rule)
        return out

    @override
    def activate(self, x: Tensor, activation: Activation = SILU) -> Tensor:
        num_rows, width = len(x), x.shape[1] // 2 if activation.gated else x.shape[1]
        out = x.new_empty((num_rows, width))
        activate_kernel[(num_rows, -(-width // ACTIVATION_TILE))](
            x, out, WIDTH=width, TILE=ACTIVATION_TILE,
            IS_GATED=activation.gated, KIND=activation.kind, LIMIT=activation.limit,
            **chained(num_rows, x.device),
        )  # fmt: skip
        return out

    @override
    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated(x, gate)

    @override
    def recur(
        self, mixed: Tensor, gates: Tensor, weights: RecurrentWeights, plan: ForwardPlan
    ) -> Tensor:
        device = _on_device(plan)
        states, pool = device.needed_states()
        read = recur(mixed, gates, weights, states, pool)
        if device.batch is not None:
            record_positions(device.batch, pool, weights.layer)
        return gated_norm(read, mixed, weights, states)

    @override
    def short_conv(self, mixed: Tensor, weights: ConvWeights, plan: ForwardPlan) -> Tensor:
        device = _on_device(plan)
        states, pool = device.needed_states()
        out = short_conv(mixed, weights, states, pool)
        if device.batch is not None:
            record_positions(device.batch, pool, weights.layer)
        return out

    @override
    def experts(
        self,
        x: Tensor,
        weights: ExpertWeights,
        plan: ForwardPlan | None = None,
        routed_by: Tensor | None = None,
    ) -> Tensor:
        if routed_by is not None or weights.factors is not None:
            raise NotImplementedError("the Triton kernels do not support experts next to an MLP")
        slots = None if plan is None else _on_device(plan).slots
        return run_experts(self, x, weights, self._tables(weights), slots)

    def _tables(self, weights: ExpertWeights) -> ExpertTables:
        tables = self._experts.get(weights)
        if tables is None:
            tables = self._experts[weights] = ExpertTables.of(weights)
        return tables

    @override
    def logits(self, hidden: Tensor, weight: PackedLinear, cap: float | None = None) -> Tensor:
        if isinstance(weight, TiledLinear):
            return capped(tiled_linear(hidden, weight, torch.float32), cap)
        return capped(self.linear(hidden, weight).float(), cap)


def _norm(x: Tensor, residual: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
    total = x if residual is None else torch.empty_like(x)
    out = total if norm is None else torch.empty_like(x)
    bias = None if norm is None else norm.bias
    norm_kernel[(len(x),)](
        x, x if residual is None else residual, x if norm is None else norm.weight,
        x if bias is None else bias, out, total, 0.0 if norm is None else norm.eps,
        WIDTH=x.shape[1], TILE=power_of_two(x.shape[1]), HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None, IS_LAYER=norm is not None and norm.is_layer,
        HAS_BIAS=bias is not None, **chained(len(x), x.device),
    )  # fmt: skip
    return out, total


def _on_device(plan: ForwardPlan, *windows: int | None) -> DevicePlan:
    if isinstance(plan, TritonPlan):
        return plan.on_device(windows)
    assert isinstance(plan, DevicePlan)
    return plan

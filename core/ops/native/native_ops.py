"""NativeOps: the operations of a decoder step by the C kernels of core/ops/native, on the CPU."""

from __future__ import annotations

import ctypes
from typing import get_args

import torch
from torch import Tensor
from typing_extensions import override

from ..base import ForwardPlan, Ops, Rope, RoughOps, capped
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
from .library import DTYPES, NativeLibrary
from .sampler import NativeSampler
from .step import NativeStep
from .structs.declared import activation_struct, norm_struct, rope_struct, rule_struct
from .structs.experts import experts_struct
from .structs.linear import (
    NativeLinear,
    Products,
    linear,
    pack_linear,
    rough_copy,
    unpack_rows,
)
from .structs.lora import NativeLora, add_lora
from .structs.mixers import is_compiled
from .structs.plan import NativePlan, unsuited
from .structs.state import ConvStructs, RecurrentStructs


class NativeOps(Ops, RoughOps):
    """`Ops` in float32 and bfloat16. A row's bits do not depend on the number of rows."""

    min_rows = 1
    batch_device = None
    has_own_threads = True
    stored_kinds: frozenset[WeightKind] = frozenset(
        kind
        for kind in get_args(WeightKind)
        if kind != "int4"  # the kernel of int4 rounds activations to int8
    )

    def __init__(
        self,
        library: NativeLibrary,
        quantize: Quantize = "none",
        *,
        products: Products = "bfloat16",
    ) -> None:
        self.library = library
        self.tile_rows = library.tile_rows
        self.quantize: Quantize = quantize
        self.products: Products = products
        self.sampler = NativeSampler(library)

    @override
    def unsuited(self, heads: HeadLayout) -> str:
        return unsuited(torch.float32, [heads])

    @property
    def identity(self) -> dict[str, str]:
        """The library's file name, which identifies its build, and its kind of bfloat16 product."""
        return {"library": self.library.file_name, "bfloat16 products": self.products}

    def set_threads(self, count: int) -> None:
        """Set the threads of the kernels, for the process, and of torch, for this thread."""
        torch.set_num_threads(count)
        self.library.set_threads(count)

    def compile_forward(self, weights: DecoderWeights) -> NativeStep | None:
        """Return a `NativeStep`, or None if step.c lacks a mixer or the weights have ``joined``."""
        mixers = (mixer for layer in weights.layers for mixer in layer.mixers)
        if weights.joined is not None or not all(map(is_compiled, mixers)):
            return None
        return NativeStep(self.library, weights)

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, *, plain: bool = False
    ) -> PackedLinear:
        """Lay out a weight in panels, quantised to ``self.quantize`` unless ``plain``."""
        quantize: Quantize = "none" if plain else self.quantize
        return pack_linear(self.library, weight, bias, quantize, products=self.products)

    @override
    def rough_copy(
        self,
        weight: PackedLinear,
        dtype: torch.dtype,
    ) -> PackedLinear:
        assert isinstance(weight, NativeLinear)
        return rough_copy(self.library, weight)

    @override
    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        assert isinstance(weight, NativeLinear)
        return linear(self.library, x, weight)

    @override
    def pack_lora(self, update: LoraUpdate, dtype: torch.dtype) -> NativeLora:
        return NativeLora(update, dtype)

    @override
    def add_lora(self, out: Tensor, x: Tensor, rows: Tensor, lora: PackedLora) -> None:
        add_lora(self.library, out, x, rows, lora)

    def packed_table(self, weight: PackedLinear, dtype: torch.dtype, factor: float) -> PackedTable:
        """Return an embedding over a packed weight, whose rows are all of one kind with groups."""
        assert isinstance(weight, NativeLinear)
        assert weight.others is None

        def rows(token_ids: Tensor) -> Tensor:
            out = torch.empty((*token_ids.shape, weight.in_features), dtype=dtype)
            unpack_rows(self.library, weight, token_ids.contiguous(), out, factor)
            return out

        shape = (weight.out_features, weight.in_features)
        return PackedTable(weight, shape, dtype, factor, rows)

    @override
    def embedding(self, token_ids: Tensor, table: Table) -> Tensor:
        if isinstance(table, PackedTable):
            return table.rows(token_ids)
        out = table.new_empty((len(token_ids), table.shape[1]))
        row_bytes = table.shape[1] * table.itemsize
        self.library.c.ft_embedding(
            token_ids.data_ptr(), table.data_ptr(), out.data_ptr(), len(out), row_bytes
        )
        return out

    @override
    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        self._add_norm(x, None, norm, out)
        return out

    @override
    def add_norm(
        self, x: Tensor, residual: Tensor, norm: Norm | None, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        x, total = x.contiguous(), residual.clone(memory_format=torch.contiguous_format)
        out = total if norm is None else torch.empty_like(x)
        self._add_norm(x, total, norm, out, factor)
        return out, total

    def _add_norm(
        self,
        x: Tensor,
        total: Tensor | None,
        norm: Norm | None,
        out: Tensor,
        factor: float = 1.0,
    ) -> None:
        struct = None if norm is None else ctypes.byref(norm_struct(norm))
        residual = None if total is None else total.data_ptr()
        self.library.c.ft_add_norm(
            x.data_ptr(), residual, factor, struct, out.data_ptr(), *x.shape, DTYPES[x.dtype]
        )

    def plan(self, batch: RaggedBatch, pool: KVPool, heads: HeadLayout, *ropes: Rope) -> NativePlan:
        """Return the structs that the kernels read."""
        tables = [rope.rows(batch.positions, batch.rope_stop) for rope in ropes]
        return NativePlan(batch, pool, heads, tables)

    @override
    def rope_write(
        self,
        qkv: Tensor,
        layer: int,
        plan: ForwardPlan,
        norm: HeadNorm | None,
        tables: Tables = FIRST_TABLE,
    ) -> Tensor:
        assert isinstance(plan, NativePlan)
        qkv = qkv.contiguous()
        q = qkv.new_empty((len(qkv), plan.heads.num_heads * plan.heads.head_dim))
        rope = rope_struct(norm, tables, writes=qkv.shape[1] > q.shape[1])
        self.library.c.ft_rope_write(
            qkv.data_ptr(), q.data_ptr(), *plan.pointers, layer, ctypes.byref(rope)
        )
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
        assert isinstance(plan, NativePlan)
        q, heads = q.contiguous(), plan.heads
        out = q.new_empty((len(q), heads.num_heads * heads.value_dim))
        rule = rule_struct(window, cap, sinks, is_mutual=is_mutual)
        failed = self.library.c.ft_attention(
            q.data_ptr(), out.data_ptr(), *plan.pointers, layer, ctypes.byref(rule)
        )
        if failed:
            raise MemoryError("no memory for attention's working space")
        return out

    @override
    def activate(self, x: Tensor, activation: Activation = SILU) -> Tensor:
        x = x.contiguous()
        width = x.shape[1] // 2 if activation.gated else x.shape[1]
        out = x.new_empty((len(x), width))
        struct = activation_struct(activation)
        self.library.c.ft_activate(
            x.data_ptr(), out.data_ptr(), len(out), width, ctypes.byref(struct), DTYPES[out.dtype]
        )
        return out

    @override
    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        out, gate = x.clone(memory_format=torch.contiguous_format), gate.contiguous()
        self.library.c.ft_gate(out.data_ptr(), gate.data_ptr(), *out.shape, DTYPES[out.dtype])
        return out

    @override
    def recur(
        self, mixed: Tensor, gates: Tensor, weights: RecurrentWeights, plan: ForwardPlan
    ) -> Tensor:
        assert isinstance(plan, NativePlan)
        assert plan.states is not None
        mixed, gates, structs = mixed.contiguous(), gates.contiguous(), RecurrentStructs(weights)
        out = mixed.new_empty((len(mixed), weights.shape.value_width))
        batch, _, _ = plan.pointers
        failed = self.library.c.ft_recur(
            mixed.data_ptr(), gates.data_ptr(), out.data_ptr(), batch, ctypes.byref(structs.struct),
            DTYPES[mixed.dtype],
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the rows of a recurrent layer")
        return out

    @override
    def short_conv(self, mixed: Tensor, weights: ConvWeights, plan: ForwardPlan) -> Tensor:
        assert isinstance(plan, NativePlan)
        assert plan.states is not None
        # The kernel overwrites its input.
        mixed = mixed.clone(memory_format=torch.contiguous_format)
        structs, out = ConvStructs(weights), mixed.new_empty((len(mixed), weights.shape.channels))
        batch, _, _ = plan.pointers
        self.library.c.ft_short_conv(
            mixed.data_ptr(), out.data_ptr(), batch, ctypes.byref(structs.struct),
            DTYPES[mixed.dtype],
        )  # fmt: skip
        return out

    @override
    def experts(
        self,
        x: Tensor,
        weights: ExpertWeights,
        plan: ForwardPlan | None = None,
        routed_by: Tensor | None = None,
    ) -> Tensor:
        x, struct = x.contiguous(), experts_struct(weights)
        routed_by = x if routed_by is None else routed_by.contiguous()
        out = torch.empty_like(x)
        failed = self.library.c.ft_mixture(
            ctypes.byref(struct),
            routed_by.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            len(x),
            DTYPES[x.dtype],
        )
        if failed:
            raise MemoryError("no memory for the activations of experts")
        return out

    @override
    def logits(self, hidden: Tensor, weight: PackedLinear, cap: float | None = None) -> Tensor:
        assert isinstance(weight, NativeLinear)
        return capped(linear(self.library, hidden, weight, torch.float32), cap)

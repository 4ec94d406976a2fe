"""NativeOps: the operations of a decoder step by the C kernels of core/ops/native, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import DecoderWeights, ForwardPlan, HeadLayout, HeadNorm, PackedLinear, Rope
from ..batch import RaggedBatch
from ..kv_pool import KVPool
from ..quantize import Quantize, QuantizedWeight, WeightKind
from .library import DTYPES, NativeLibrary
from .linear import NativeLinear, Products, linear, pack_linear
from .plan import NativePlan
from .sampler import NativeSampler
from .step import NativeStep


class NativeOps:
    """The operations of `Ops` in float32 and bfloat16. Exact for any number of rows."""

    min_rows = 1
    batch_device = None
    stored_kinds: frozenset[WeightKind] = frozenset(("int4_min", "int8_group"))

    def __init__(
        self,
        library: NativeLibrary,
        quantize: Quantize = "none",
        *,
        products: Products = "bfloat16",
    ) -> None:
        self.library = library
        self.quantize: Quantize = quantize
        self.products: Products = products
        self.sampler = NativeSampler(library)

    def set_threads(self, count: int) -> None:
        """Resize the kernels' pool, which is the process's, and torch's for what is left to it."""
        torch.set_num_threads(count)
        self.library.set_threads(count)

    def compile_forward(self, weights: DecoderWeights) -> NativeStep:
        """All layers in one call."""
        return NativeStep(self.library, weights)

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None
    ) -> PackedLinear:
        """Lay out a weight in panels, quantised if these ops were made so."""
        return pack_linear(self.library, weight, bias, self.quantize, products=self.products)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """``[T, in_features] -> [T, out_features]``."""
        assert isinstance(weight, NativeLinear)
        return linear(self.library, x, weight)

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """``[T] -> [T, hidden]`` from a table ``[vocab, hidden]``."""
        out = table.new_empty((len(token_ids), table.shape[1]))
        row_bytes = table.shape[1] * table.itemsize
        self.library.c.ft_embedding(
            token_ids.data_ptr(), table.data_ptr(), out.data_ptr(), len(out), row_bytes
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension (arXiv 1910.07467)."""
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
        self.library.c.ft_rms_norm(*pointers, *x.shape, eps, DTYPES[x.dtype])
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum."""
        x, total = x.contiguous(), residual.clone(memory_format=torch.contiguous_format)
        out = torch.empty_like(x)
        pointers = (t.data_ptr() for t in (x, total, weight, out))
        self.library.c.ft_add_rms_norm(*pointers, *x.shape, eps, DTYPES[x.dtype])
        return out, total

    def plan(self, batch: RaggedBatch, pool: KVPool, heads: HeadLayout, rope: Rope) -> NativePlan:
        """The structs that the kernels read."""
        cos, sin = rope.rows(batch.positions, int(batch.stops.max()))
        return NativePlan(batch, pool, heads, cos, sin)

    def rope_write(
        self, qkv: Tensor, layer: int, plan: ForwardPlan, norm: HeadNorm | None
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the pool."""
        assert isinstance(plan, NativePlan)
        qkv = qkv.contiguous()
        q = qkv.new_empty((len(qkv), plan.heads.num_heads * plan.heads.head_dim))
        norm_args = (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        self.library.c.ft_rope_write(
            qkv.data_ptr(), q.data_ptr(), *plan.pointers, layer, *norm_args
        )
        return q

    def attention(self, q: Tensor, layer: int, plan: ForwardPlan, window: int | None) -> Tensor:
        """Causal attention over the pages, ``[T, num_heads * head_dim]`` to the same shape."""
        assert isinstance(plan, NativePlan)
        q = q.contiguous()
        out = torch.empty_like(q)
        failed = self.library.c.ft_attention(
            q.data_ptr(), out.data_ptr(), *plan.pointers, layer, window or 0
        )
        if failed:
            raise MemoryError("no memory for attention's working space")
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``[T, 2 * width] -> [T, width]``: silu of the first half times the second."""
        gate_up = gate_up.contiguous()
        width = gate_up.shape[1] // 2
        out = gate_up.new_empty((len(gate_up), width))
        self.library.c.ft_silu_mul(
            gate_up.data_ptr(), out.data_ptr(), len(out), width, DTYPES[out.dtype]
        )
        return out

    def logits(self, hidden: Tensor, weight: PackedLinear) -> Tensor:
        """``[R, hidden] -> [R, vocab]`` float32."""
        assert isinstance(weight, NativeLinear)
        return linear(self.library, hidden, weight, torch.float32)

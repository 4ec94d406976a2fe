"""Attention with keys and values for each KV head: its tensors and their packing."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from ...ops.mixers.attention import AttentionWeights
from ...ops.weights import HeadNorm
from ..description.config import DecoderConfig, HeadSpec
from ..description.fold import head_order
from ..description.rope import RopeSpec, rotary_dim
from ..description.tensors import (
    COLUMNS,
    ROWS,
    Cut,
    LinearSpec,
    MatrixSpec,
    TensorSpec,
    layer_prefix,
    linear_of,
)
from .packer import Mixer, Packer, optional


class Attention(Mixer):
    """Declared tensors of a layer's attention, and their packing."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        at, fold, spec = f"{layer_prefix(index)}self_attn.", config.fold, config.layers[index]
        heads, hidden = config.heads_of(index), config.hidden_size
        if spec.kv_of is not None:
            heads = heads._replace(num_kv_heads=0)
        self._config, self._index, self._heads = config, index, heads
        self._head_order = _head_order(heads.head_dim, config.rope, interleaved=fold.interleaved)
        self._width = heads.num_heads * heads.head_dim
        # These are numbers of heads of q, k and v. If q has gates, each counts as one more head.
        counts = (heads.num_heads * (1 + config.has_gate), heads.num_kv_heads, heads.num_kv_heads)
        names = "q" if spec.kv_of is not None else "qkk" if spec.keys_as_values else "qkv"
        matrices = [
            MatrixSpec(f"{at}{name}_proj", count * heads.head_dim)
            for name, count in zip(names, counts, strict=False)
        ]
        if fold.fused_qkv:
            matrices = [MatrixSpec(f"{at}qkv_proj", sum(matrix.rows for matrix in matrices))]
        self.qkv = LinearSpec(
            tuple(matrices),
            hidden,
            bias=config.qkv_bias,
            order=_qkv_order(heads, self._head_order, has_gate=config.has_gate),
            share=Cut(0, counts) if fold.fused_qkv else ROWS,
            adapts=True,
        )
        factor = fold.residual_scale * fold.attention_out_scale
        self.o = linear_of(
            f"{at}o_proj",
            hidden,
            self._width,
            factor,
            bias=config.o_bias,
            share=COLUMNS,
            adapts=True,
        )
        is_whole = config.head_norm == "whole"
        self.head_norms = [
            TensorSpec(f"{at}{name}.weight", ((count if is_whole else 1) * heads.head_dim,))
            for name, count in zip(config.head_norm_names, heads[:2], strict=True)
            if count and config.head_norm != "none"
        ]
        sinks = TensorSpec(f"{at}sinks", (heads.num_heads,), ROWS)
        self.sinks = sinks if config.has_sinks else None

    @override
    def pack(self, packer: Packer) -> AttentionWeights:
        config, spec = self._config, self._config.layers[self._index]
        place = packer.layout.places[self._index]
        assert place is not None, "a layer with attention must have a place in the KV pages"
        return AttentionWeights(
            qkv=packer.linear(self.qkv),
            head_norm=self._head_norm(packer) if self.head_norms else None,
            o=packer.linear(self.o),
            window=spec.window,
            is_mutual=spec.is_mutual,
            tables=packer.layout.tables[self._index],
            cap=config.attention_cap,
            sinks=optional(packer.float32, self.sinks),
            kv=place,
            gate=self._width * config.has_gate,
            has_keys=spec.kv_of is None,
            comm=packer.comm,
        )

    def _head_norm(self, packer: Packer) -> HeadNorm:
        config = self._config
        rows = [
            packer.vector(norm)
            # A weight as long as one head is shared by all heads; a longer one covers all heads.
            .view(-1, self._heads.head_dim)
            .expand(count, -1)
            for norm, count in zip(self.head_norms, self._heads[:2], strict=False)
        ]
        weight = torch.cat(rows).float() + config.fold.norm_offset
        if self._head_order is not None:
            weight = weight[:, self._head_order]
        return HeadNorm(
            weight.contiguous(),
            config.norm_eps,
            config.head_norm == "whole",
            config.norms_behind_rope,
        )


def _head_order(head_dim: int, rope: RopeSpec, *, interleaved: bool) -> Tensor | None:
    """Return the index of each item of a head in the kernels' order, [head_dim].

    Returns None if the model's order is the same.
    """
    turning = rotary_dim(rope, head_dim)
    if turning == head_dim and not interleaved:
        return None
    return head_order(head_dim, turning, interleaved=interleaved)


def _qkv_order(heads: HeadSpec, head: Tensor | None, *, has_gate: bool) -> Tensor | None:
    """Return the indices of the stacked QKV rows in the kernels' order: Q, K, V, then gates.

    ``head``: order of a head's items, from `_head_order`. In the files, the rows of each head's
    gate follow the rows of its query. Returns None if the order is the same.
    """
    if head is None and not has_gate:
        return None
    num_queries, num_kv = heads.num_heads * (1 + has_gate), heads.num_kv_heads
    rows = torch.arange((num_queries + 2 * num_kv) * heads.head_dim).view(-1, heads.head_dim)
    queries, keys, values = torch.split(rows, [num_queries, num_kv, num_kv])
    queries, gates = (queries[0::2], queries[1::2]) if has_gate else (queries, queries[:0])
    turned = torch.cat((queries, keys))
    turned = turned if head is None else turned[:, head]
    return torch.cat((turned, values, gates)).flatten()

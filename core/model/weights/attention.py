"""Weights of attention: over keys and values, or over latents."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops.parallel import Comm
from ...ops.quantize import QuantizedWeight
from ...ops.weights import (
    AttentionWeights,
    HeadNorm,
    LatentShape,
    LatentWeights,
    Norm,
    PackedLinear,
)
from ..description.config import HeadSpec
from ..description.fold import head_order
from ..description.page_layout import PageLayout
from ..description.rope import RopeSpec, rotary_dim
from ..description.shapes import layer_prefix
from .packer import Packer

LATENT_EPS = 1e-6  # of the norms within latent attention, whatever the config says of the others


class AttentionPacker:
    """Packs the attention of a layer. ``layout``: of the pages. ``comm``: of a rank's part."""

    def __init__(self, packer: Packer, layout: PageLayout, comm: Comm | None) -> None:
        self._packer, self._layout, self._comm = packer, layout, comm
        self._config = packer.config

    def weights(self, index: int) -> AttentionWeights | LatentWeights:
        """Read and pack the attention of a layer."""
        latent = self._config.latent
        return self._attention(index) if latent is None else self._latent(index, latent)

    def _attention(self, index: int) -> AttentionWeights:
        config, prefix, fold = self._config, layer_prefix(index), self._config.fold
        spec, heads = config.layers[index], config.heads_of(index)
        qkv = ["qkv"] if fold.fused_qkv else ["q", "k", "k" if spec.keys_as_values else "v"]
        if spec.kv_of is not None:
            qkv, heads = ["q"], heads._replace(num_kv_heads=0)
        order = _head_order(heads.head_dim, config.rope, interleaved=fold.interleaved)
        place = self._layout.places[index]
        assert place is not None  # of a layer with attention
        return AttentionWeights(
            qkv=self._packer.linear(
                [f"{prefix}self_attn.{n}_proj" for n in qkv],
                bias=config.qkv_bias,
                order=_qkv_order(heads, order, has_gate=config.has_gate),
            ),
            head_norm=None if config.head_norm == "none" else self._head_norm(prefix, heads, order),
            o=self._packer.linear(
                [f"{prefix}self_attn.o_proj"],
                bias=config.o_bias,
                factors=[fold.residual_scale * fold.attention_out_scale],
            ),
            window=spec.window,
            is_mutual=spec.is_mutual,
            tables=self._layout.tables[index],
            cap=config.attention_cap,
            sinks=self._packer.float32(f"{prefix}self_attn.sinks") if config.has_sinks else None,
            place=place,
            gate=heads.num_heads * heads.head_dim * config.has_gate,
            comm=self._comm,
        )

    def _head_norm(self, prefix: str, heads: HeadSpec, order: Tensor | None) -> HeadNorm:
        config = self._config
        counts = zip(config.head_norm_names, (heads.num_heads, heads.num_kv_heads), strict=True)
        rows = [
            self._packer.vector(f"{prefix}self_attn.{name}.weight")
            .view(-1, heads.head_dim)  # one for all heads, or of the whole row
            .expand(count, -1)
            for name, count in counts
            if count
        ]
        weight = torch.cat(rows).float() + config.fold.norm_offset
        if order is not None:
            weight = weight[:, order]
        return HeadNorm(
            weight.contiguous(),
            config.norm_eps,
            config.head_norm == "whole",
            config.norms_behind_rope,
        )

    def _latent(self, index: int, shape: LatentShape) -> LatentWeights:
        config, at = self._config, f"{layer_prefix(index)}self_attn."
        turned = head_order(shape.rope_dim, shape.rope_dim, interleaved=config.fold.interleaved)
        of_head = torch.cat((torch.arange(shape.nope_dim), shape.nope_dim + turned))
        heads = shape.query_dim * torch.arange(config.num_heads)
        of_queries = (heads.unsqueeze(1) + of_head).flatten()
        first = torch.arange(shape.q_rank) if shape.q_rank else of_queries
        latent = torch.arange(len(first), len(first) + shape.rank)
        keys, values = self._up_of_latents(at, shape)
        place = self._layout.places[index]
        assert place is not None  # of a layer with attention
        return LatentWeights(
            down=self._packer.linear(
                [f"{at}{'q_a' if shape.q_rank else 'q'}_proj", f"{at}kv_a_proj_with_mqa"],
                bias=config.qkv_bias,
                order=torch.cat((first, latent, len(first) + shape.rank + turned)),
            ),
            q_norm=self._latent_norm(f"{at}q_a_layernorm") if shape.q_rank else None,
            q_up=self._packer.linear([f"{at}q_b_proj"], bias=False, order=of_queries)
            if shape.q_rank
            else None,
            kv_norm=self._latent_norm(f"{at}kv_a_layernorm"),
            keys=keys,
            values=values,
            o=self._packer.linear(
                [f"{at}o_proj"], bias=config.o_bias, factors=[config.fold.residual_scale]
            ),
            place=place,
            shape=shape,
            tables=self._layout.tables[index],
        )

    def _up_of_latents(self, at: str, shape: LatentShape) -> list[tuple[PackedLinear, ...]]:
        """Matrices of each head by which queries meet latents, and that make values of these."""
        count = self._config.num_heads
        found: list[Iterator[Tensor | QuantizedWeight]]
        if self._config.has_split_latents:
            names = (f"{at}k_b_proj.weight", f"{at}v_b_proj.weight")
            found = [self._packer.stack(name, count, is_turned=False) for name in names]
        else:
            up = self._packer.vector(f"{at}kv_b_proj.weight").view(count, -1, shape.rank)
            keys, values = torch.split(up, [shape.nope_dim, shape.value_dim], dim=1)
            found = [(head.T.contiguous() for head in keys), (head.contiguous() for head in values)]
        return [tuple(map(self._packer.ops.pack_linear, heads)) for heads in found]

    def _latent_norm(self, name: str) -> Norm:
        return Norm(self._packer.vector(f"{name}.weight"), LATENT_EPS)


def _head_order(head_dim: int, rope: RopeSpec, *, interleaved: bool) -> Tensor | None:
    """The items of a head in the kernels' order; None where it is the family's own."""
    turning = rotary_dim(rope, head_dim)
    if turning == head_dim and not interleaved:
        return None
    return head_order(head_dim, turning, interleaved=interleaved)


def _qkv_order(heads: HeadSpec, head: Tensor | None, *, has_gate: bool) -> Tensor | None:
    """The rows of Q, K, V and the gate in the kernels' order, given that of a head's items.

    In the files each head's gate lies behind its query.
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

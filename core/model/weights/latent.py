"""Latent attention (MLA, arXiv 2405.04434, section 2.1): its tensors and their packing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from ...ops.mixers.latent import LatentShape, LatentWeights
from ...ops.quantize import QuantizedWeight
from ...ops.weights import Norm, PackedLinear
from ..description.config import DecoderConfig
from ..description.fold import head_order
from ..description.tensors import LinearSpec, MatrixSpec, TensorSpec, layer_prefix, linear_of
from .packer import Mixer, Packer, optional

LATENT_EPS = 1e-6  # eps of the norms within latent attention, independent of the config


class Latent(Mixer):
    """Declared tensors of a layer's latent attention, and their packing.

    ``expand``: the matrices of each head that map latents to keys and to values. They are one
    tensor, in which each head has its rows of keys, then its rows of values; or two tensors.
    """

    def __init__(self, config: DecoderConfig, index: int, shape: LatentShape) -> None:
        at, hidden, heads = f"{layer_prefix(index)}self_attn.", config.hidden_size, config.num_heads
        self._config, self._index, self._shape = config, index, shape
        queries = _query_order(config, shape)
        first = torch.arange(shape.q_rank) if shape.q_rank else queries
        latent = torch.arange(len(first), len(first) + shape.rank)
        turned = len(first) + shape.rank + _rope_order(config, shape)
        self.down = LinearSpec(
            (
                MatrixSpec(f"{at}{'q_a' if shape.q_rank else 'q'}_proj", len(first)),
                MatrixSpec(f"{at}kv_a_proj_with_mqa", shape.key_dim),
            ),
            hidden,
            bias=config.qkv_bias,
            order=torch.cat((first, latent, turned)),
        )
        self.q_norm = self.q_up = None
        if shape.q_rank:
            self.q_norm = TensorSpec(f"{at}q_a_layernorm.weight", (shape.q_rank,))
            self.q_up = linear_of(f"{at}q_b_proj", len(queries), shape.q_rank, order=queries)
        self.kv_norm = TensorSpec(f"{at}kv_a_layernorm.weight", (shape.rank,))
        if config.has_split_latents:
            self.expand = [
                TensorSpec(f"{at}k_b_proj.weight", (heads, shape.rank, shape.nope_dim)),
                TensorSpec(f"{at}v_b_proj.weight", (heads, shape.value_dim, shape.rank)),
            ]
        else:
            rows = heads * (shape.nope_dim + shape.value_dim)
            self.expand = [TensorSpec(f"{at}kv_b_proj.weight", (rows, shape.rank))]
        width, factor = heads * shape.value_dim, config.fold.residual_scale
        self.o = linear_of(f"{at}o_proj", hidden, width, factor, bias=config.o_bias, adapts=True)

    @override
    def pack(self, packer: Packer) -> LatentWeights:
        place = packer.layout.places[self._index]
        assert place is not None, "a layer with attention must have a place in the KV pages"
        keys, values = self._heads(packer)

        def norm(weight: TensorSpec) -> Norm:
            return Norm(packer.vector(weight), LATENT_EPS)

        return LatentWeights(
            down=packer.linear(self.down),
            q_norm=optional(norm, self.q_norm),
            q_up=optional(packer.linear, self.q_up),
            kv_norm=norm(self.kv_norm),
            keys=keys,
            values=values,
            o=packer.linear(self.o),
            kv=place,
            shape=self._shape,
            tables=packer.layout.tables[self._index],
        )

    def _heads(self, packer: Packer) -> list[tuple[PackedLinear, ...]]:
        """Return the packed matrices of keys, and the packed matrices of values, one per head."""
        shape, count = self._shape, self._config.num_heads
        found: list[Iterator[Tensor | QuantizedWeight]]
        if self._config.has_split_latents:
            found = [packer.stack(each, count, is_transposed=False) for each in self.expand]
        else:
            up = packer.vector(self.expand[0]).view(count, -1, shape.rank)
            keys, values = torch.split(up, [shape.nope_dim, shape.value_dim], dim=1)
            found = [(head.T.contiguous() for head in keys), (head.contiguous() for head in values)]
        return [tuple(map(packer.ops.pack_linear, heads)) for heads in found]


def _rope_order(config: DecoderConfig, shape: LatentShape) -> Tensor:
    """Return the order, for the kernels, of the items that RoPE rotates, [rope_dim]."""
    return head_order(shape.rope_dim, shape.rope_dim, interleaved=config.fold.interleaved)


def _query_order(config: DecoderConfig, shape: LatentShape) -> Tensor:
    """Return the indices of the rows of all heads' queries in the kernels' order."""
    of_head = torch.cat((torch.arange(shape.nope_dim), shape.nope_dim + _rope_order(config, shape)))
    heads = shape.query_dim * torch.arange(config.num_heads)
    return (heads.unsqueeze(1) + of_head).flatten()

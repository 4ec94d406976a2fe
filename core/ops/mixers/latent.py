"""Attention over latents (arXiv 2405.04434, section 2.1) in the pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from ..kv_pool import KvLayer
from ..weights import FIRST_TABLE, Norm, PackedLinear, Tables
from .mixer import MixerWeights

if TYPE_CHECKING:
    from ..base import ForwardPlan, Ops


class LatentShape(NamedTuple):
    """Sizes of latent attention; ``nope_dim``: items of a head's query without RoPE."""

    q_rank: int  # width of the queries' compressed input; 0: queries are computed from the stream
    rank: int  # width of the latent, which a position keeps besides ``rope_dim`` items
    nope_dim: int
    rope_dim: int  # items of a query and of the key that RoPE rotates
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Number of items of a head's query before absorption."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Number of items kept per position."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights(MixerWeights):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1), absorbed.

    A position keeps one row for all heads: its latent, and a key after RoPE. A head's key matrix
    maps its query to the latent's dimensions, and its value matrix maps the weighted sum of latents
    to its output; keys and values of single heads are never computed.
    """

    down: PackedLinear  # rows: input of the queries, latent, key for RoPE
    q_norm: Norm | None  # None: ``down`` computes the queries themselves
    q_up: PackedLinear | None  # [num_heads * query_dim, q_rank]
    kv_norm: Norm  # norm of the latent
    keys: tuple[PackedLinear, ...]  # one per head, [rank, nope_dim]
    values: tuple[PackedLinear, ...]  # one per head, [value_dim, rank]
    o: PackedLinear
    kv: KvLayer  # location of the layer's latents in the pool
    shape: LatentShape
    tables: Tables = FIRST_TABLE

    @property
    @override
    def linears(self) -> tuple[PackedLinear, ...]:
        up = () if self.q_up is None else (self.q_up,)
        return (self.down, *up, *self.keys, *self.values, self.o)

    @property
    @override
    def kv_layer(self) -> KvLayer:
        return self.kv

    @override
    def compute(self, ops: Ops, x: Tensor, plan: ForwardPlan) -> Tensor:
        index = self.kv.layer
        q = ops.rope_write(self._rows(ops, x), index, plan, None, self.tables)
        read = ops.attention(q, index, plan, None)
        return ops.linear(_by_head(ops, read, self.values), self.o)

    @override
    def write_kv(self, ops: Ops, x: Tensor, plan: ForwardPlan) -> None:
        ops.rope_write(self._rows(ops, x), self.kv.layer, plan, None, self.tables)

    def _rows(self, ops: Ops, x: Tensor) -> Tensor:
        """Return each head's query, then the key, ``[T, (num_heads + 1) * key_dim]``, before RoPE.

        RoPE will rotate the last ``rope_dim`` items of each.
        """
        shape, num_heads = self.shape, len(self.keys)
        made = ops.linear(x, self.down)
        q, latent, key = made.tensor_split([-shape.key_dim, -shape.rope_dim], dim=1)
        if self.q_up is not None:
            assert self.q_norm is not None
            q = ops.linear(ops.norm(q.contiguous(), self.q_norm), self.q_up)
        by_head = q.view(len(q), num_heads, -1)
        nope, rotary = torch.split(by_head, [shape.nope_dim, shape.rope_dim], dim=2)
        absorbed = _by_head(ops, nope.flatten(1), self.keys).view(len(q), num_heads, -1)
        queries = torch.cat((absorbed, rotary), dim=2).flatten(1)
        return torch.cat((queries, ops.norm(latent.contiguous(), self.kv_norm), key), dim=1)


def _by_head(ops: Ops, x: Tensor, weights: Sequence[PackedLinear]) -> Tensor:
    """Multiply each head by its weight.

    ``[T, num_heads * in_features] -> [T, num_heads * out_features]``.
    """
    pairs = zip(x.chunk(len(weights), dim=1), weights, strict=True)
    return torch.cat([ops.linear(part.contiguous(), weight) for part, weight in pairs], dim=1)

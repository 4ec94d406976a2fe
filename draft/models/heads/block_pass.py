"""BlockPass: a block head by the target's own kernels, its KV read where it lies.

A block is a ragged batch of segments of one row. Each stands at the block's last position, so it
sees the context and all rows of the block, whose keys and values lie in the segment's tail; only
its rotation is that of its own position. So the kernels that know causal attention alone compute a
block in one call, as they compute a decoder's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....core.interface.plan import ScheduledRequest
from ....core.model.decoder import Decoder
from ....core.model.rope import RopeTable
from ....core.ops.base import (
    DecoderWeights,
    HeadLayout,
    HeadNorm,
    LayerWeights,
    MlpWeights,
    Norm,
    Ops,
    PackedLinear,
)
from ....core.ops.batch import NOTHING_MORE, IntArray, RaggedBatch
from ....core.ops.kv_pool import KvPlace, KVPool
from .block import BlockHead, BlockLayer
from .eagle import EagleHead
from .head_layers import Mlp, Projections, RmsNorm
from .head_proposer import Written

BLOCKS_A_PASS = 16  # requests of one pass; more draft one pass after another


def can_pass(head: BlockHead | EagleHead, target: Decoder) -> bool:
    """Whether the target's kernels compute the head: those of the CPU do, without windows.

    A row's window would end at the block's last position instead of its own.
    """
    ops, has_windows = target.ops, isinstance(head, BlockHead) and any(head.config.windows)
    is_host = target.device.type == "cpu" and ops.batch_device is None
    return is_host and ops.min_rows == 1 and not has_windows


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a request's block begins."""

    scheduled: ScheduledRequest
    first_page: int  # of those that hold head KV without a hole from there on

    @property
    def anchor(self) -> int:
        """Position of the last token."""
        return len(self.scheduled.tokens) - 1


class BlockPass:
    """The layers of a `BlockHead`, packed for the kernels of its target.

    ``project_taps``: taps ``[n, num_taps * hidden]`` to context vectors ``[n, hidden]``.
    """

    def __init__(
        self, head: BlockHead, target: Decoder, project_taps: Callable[[Tensor], Tensor]
    ) -> None:
        """The head has its dtype already, and has borrowed its embedding."""
        config, ops = head.config, target.ops
        self._ops, self._project_taps = ops, project_taps
        self._size, self._mask = config.block_size, config.mask_token_id
        self._heads = HeadLayout(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5
        )
        self._rope = RopeTable(config.rope, config.head_dim, target.device)
        layers = tuple(
            _packed_layer(layer, ops, KvPlace(0, index), has_bias=config.attention_bias)
            for index, layer in enumerate(head.decoder_layers())
        )
        self._weights = DecoderWeights(
            embedding=head.table.detach(),
            layers=layers,
            final_norm=plain_norm(head.norm),
            lm_head=target.weights.lm_head,  # logits are the head's business
        )
        compiled = ops.compile_forward(self._weights)
        assert compiled is not None
        self._compiled = compiled

    def write_context(self, pool: KVPool, taps: Tensor, rows: ContextRows) -> None:
        """Write keys and values of positions that the target has computed.

        ``taps`` [n, num_taps * hidden] of these positions.
        """
        features = self._project_taps(taps).contiguous()
        plan = self._ops.plan(rows.batch(pool.page_size), pool, self._heads, self._rope)
        for index, layer in enumerate(self._weights.layers):
            qkv = self._ops.linear(features, layer.qkv)
            self._ops.rope_write(qkv, index, plan, layer.head_norm)

    def hidden(self, pool: KVPool, first_spare_page: int, places: Sequence[BlockPlace]) -> Tensor:
        """Hidden states ``[b, block_size, hidden]``, normed, of at most `BLOCKS_A_PASS` blocks.

        Their own keys and values go to pages from ``first_spare_page`` on.
        """
        batch = self._block_batch(pool.page_size, first_spare_page, places)
        self._rope.table(int(batch.positions.max()) + 1)  # beyond `stops` where pages are left out
        plan = self._ops.plan(batch, pool, self._heads, self._rope)
        found = self._compiled(batch.token_ids, (plan,), NOTHING_MORE).hidden
        return found.view(len(places), self._size, -1)

    def _block_batch(
        self, page_size: int, first_spare_page: int, places: Sequence[BlockPlace]
    ) -> RaggedBatch:
        size, count = self._size, len(places)
        same = _frame(size, count, first_spare_page * page_size)
        anchors = np.array([each.anchor for each in places], dtype=np.int64)
        left_out = np.array([each.first_page * page_size for each in places], dtype=np.int64)
        in_pages = anchors - left_out
        page_counts = -(-in_pages // page_size)
        token_ids = np.full((count, size), self._mask, dtype=np.int64)
        token_ids[:, 0] = [each.scheduled.tokens[-1] for each in places]
        pages = list[IntArray]()
        for each, num_pages in zip(places, page_counts.tolist(), strict=True):
            page_ids = each.scheduled.page_ids[each.first_page : each.first_page + num_pages]
            pages += [np.frombuffer(page_ids, np.int64)] * size
        return RaggedBatch(
            token_ids=torch.from_numpy(token_ids.ravel()),
            positions=torch.from_numpy((anchors[:, None] + same.behind).ravel()),
            slots=same.slots,
            logit_rows=same.logit_rows,
            num_logits=0,
            page_size=page_size,
            starts=np.repeat(in_pages + (size - 1), size),
            lens=same.lens,
            first_rows=same.first_rows,
            page_counts=np.repeat(page_counts, size),
            pages=np.concatenate(pages),
            tail_lens=same.tail_lens,
            tails=same.tails,
        )


class _Frame(NamedTuple):
    """What the batches of so many blocks have in common; read only."""

    behind: IntArray  # [size] rows behind the anchor
    slots: Tensor
    logit_rows: Tensor
    lens: IntArray
    first_rows: IntArray
    tail_lens: IntArray
    tails: IntArray


@lru_cache(maxsize=4 * BLOCKS_A_PASS)
def _frame(size: int, count: int, first_slot: int) -> _Frame:
    slots = np.arange(size * count, dtype=np.int64) + first_slot
    return _Frame(
        behind=np.arange(size, dtype=np.int64),
        slots=torch.from_numpy(slots),
        logit_rows=torch.empty(0, dtype=torch.int64),
        lens=np.ones(size * count, dtype=np.int64),
        first_rows=np.arange(size * count, dtype=np.int64),
        tail_lens=np.full(size * count, size, dtype=np.int64),
        tails=np.repeat(slots.reshape(count, size), size, axis=0).ravel(),
    )


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Positions of several requests, one request's behind each other."""

    starts: IntArray  # [num_requests]
    lens: IntArray  # [num_requests]
    positions: IntArray  # [n]
    slots: IntArray  # [n]

    @classmethod
    def of(cls, written: Written, lens: IntArray, slots: IntArray) -> ContextRows:
        """Those of a step; ``lens`` [num_requests] positions of each."""
        positions = written.positions.numpy()
        return cls(positions[written.firsts], lens, positions, slots)

    def batch(self, page_size: int) -> RaggedBatch:
        """As the kernels want it that write keys and values; it names no page to be read."""
        count = len(self.starts)
        return RaggedBatch(
            token_ids=torch.empty(len(self.slots), dtype=torch.int64),
            positions=torch.from_numpy(self.positions),
            slots=torch.from_numpy(self.slots),
            logit_rows=torch.empty(0, dtype=torch.int64),
            num_logits=0,
            page_size=page_size,
            starts=self.starts,
            lens=self.lens,
            first_rows=np.cumsum(self.lens) - self.lens,
            page_counts=np.ones(count, dtype=np.int64),
            pages=np.zeros(count, dtype=np.int64),
            tail_lens=np.zeros(count, dtype=np.int64),
            tails=np.zeros(0, dtype=np.int64),
        )


def _packed_layer(layer: BlockLayer, ops: Ops, place: KvPlace, *, has_bias: bool) -> LayerWeights:
    attention = layer.self_attn
    return LayerWeights(
        attention_norm=plain_norm(layer.input_layernorm),
        qkv=pack_qkv(attention, ops, has_bias=has_bias),
        head_norm=_head_norm(attention),
        o=ops.pack_linear(attention.o_proj.weight.detach().contiguous()),
        mlp_norm=plain_norm(layer.post_attention_layernorm),
        mlp=pack_mlp(layer.mlp, ops),
        window=None,
        place=place,
    )


def pack_mlp(mlp: Mlp, ops: Ops) -> MlpWeights:
    """A gated MLP, gate and factor side by side."""
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    return MlpWeights(
        ops.pack_linear(gate_up.detach()),
        ops.pack_linear(mlp.down_proj.weight.detach().contiguous()),
    )


def pack_qkv(attention: Projections, ops: Ops, *, has_bias: bool) -> PackedLinear:
    """Queries, keys and values side by side."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    weight = torch.cat([part.weight for part in parts]).detach()
    if not has_bias:
        return ops.pack_linear(weight)
    return ops.pack_linear(weight, torch.cat([part.bias for part in parts]).detach())


def _head_norm(attention: Projections) -> HeadNorm:
    """A row for each query head, then for each key head."""
    parts = ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm))
    rows, eps = list[Tensor](), 0.0
    for linear, norm in parts:
        assert norm is not None  # layers of a block have both
        heads = linear.out_features // attention.head_dim
        rows.append(norm.weight.detach().float().expand(heads, -1))
        eps = norm.eps
    return HeadNorm(torch.cat(rows).contiguous(), eps)


def plain_norm(norm: RmsNorm) -> Norm:
    """A norm as the kernels take it."""
    return Norm(norm.weight.detach().contiguous(), norm.eps)

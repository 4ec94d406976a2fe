"""EaglePass: the layer of an EAGLE-3 head by the target's own kernels, its KV read where it lies.

Each column is a segment of one row. The columns of a draft lie where its tokens' KV would: the
first path in the slots of its positions, the others in spare slots. They are written again behind
verification, from the target's features. The page table of a segment begins with the first whole
page that the column sees; its tail lists what it sees of the page before, then its own path. Keys
keep the rotation of their positions, and a softmax does not ask for their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....core.interface.plan import ScheduledRequest
from ....core.model.decoder import Decoder
from ....core.model.rope import RopeTable
from ....core.ops.base import HeadLayout
from ....core.ops.batch import RaggedBatch
from ....core.ops.kv_pool import KVPool
from .block_pass import ContextRows, pack_mlp, pack_qkv, plain_norm
from .eagle import EagleHead


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """Where a column lies, and what it sees."""

    scheduled: ScheduledRequest
    first: int  # position from which on it sees columns
    slots: Sequence[int]  # of the draft's columns on its path, of the last token to its own

    @property
    def anchor(self) -> int:
        """Position of the last token that is known."""
        return len(self.scheduled.tokens) - 1


class EaglePass:
    """The layer of an `EagleHead`, packed for the kernels of its target."""

    def __init__(self, head: EagleHead, target: Decoder) -> None:
        """The head has its dtype already, and has borrowed its embedding."""
        config, layer, ops = head.config, head.midlayer, target.ops
        self._ops = ops
        self._heads = HeadLayout(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5
        )
        self._rope = RopeTable(config.rope, config.head_dim, target.device)
        self._embedding = head.table.detach()
        self._embedding_norm = plain_norm(layer.input_layernorm)
        self._feature_norm = plain_norm(layer.hidden_norm)
        self._mlp_norm = plain_norm(layer.post_attention_layernorm)
        self._final_norm = plain_norm(head.norm)
        self._qkv = pack_qkv(layer.self_attn, ops, has_bias=config.attention_bias)
        self._o = ops.pack_linear(layer.self_attn.o_proj.weight.detach().contiguous())
        self._mlp = pack_mlp(layer.mlp, ops)
        self._norms_residual = config.norm_before_residual

    def write_context(
        self, pool: KVPool, features: Tensor, token_ids: Tensor, rows: ContextRows
    ) -> None:
        """Write keys and values of columns.

        ``features`` [n, hidden] of the positions before ``token_ids`` [n].
        """
        plan = self._ops.plan(rows.batch(pool.page_size), pool, self._heads, self._rope)
        qkv, _ = self._projected(features, token_ids)
        self._ops.rope_write(qkv, 0, plan, None)

    def hidden(
        self,
        pool: KVPool,
        features: Tensor,
        token_ids: Sequence[int],
        columns: Sequence[ColumnPlace],
    ) -> tuple[Tensor, Tensor]:
        """Hidden states ``[n, hidden]`` of columns, behind the final norm and before it.

        ``features`` [n, hidden] of the positions before ``token_ids`` [n].
        """
        ops, batch = self._ops, self._batch(pool.page_size, token_ids, columns)
        self._rope.table(int(batch.positions.max()) + 1)  # beyond `stops`: pages are left out
        plan = ops.plan(batch, pool, self._heads, self._rope)
        qkv, normed = self._projected(features, batch.token_ids)
        attended = ops.attention(ops.rope_write(qkv, 0, plan, None), 0, plan, None)
        residual = normed if self._norms_residual else features
        x, residual = ops.add_norm(ops.linear(attended, self._o), residual, self._mlp_norm)
        x = ops.activate(ops.linear(x, self._mlp.gate_up), self._mlp.activation)
        return ops.add_norm(ops.linear(x, self._mlp.down), residual, self._final_norm)

    def _projected(self, features: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values of columns, and their normed features."""
        ops = self._ops
        embedded = ops.norm(ops.embedding(token_ids, self._embedding), self._embedding_norm)
        normed = ops.norm(features, self._feature_norm)
        return ops.linear(torch.cat((embedded, normed), dim=-1), self._qkv), normed

    def _batch(
        self, page_size: int, token_ids: Sequence[int], columns: Sequence[ColumnPlace]
    ) -> RaggedBatch:
        seen = [_seen(column, page_size) for column in columns]
        tails = [[*edge, *column.slots] for (_, _, edge), column in zip(seen, columns, strict=True)]
        num_in_pages = np.array([count for _, count, _ in seen], dtype=np.int64)
        tail_lens = np.array([len(tail) for tail in tails], dtype=np.int64)
        positions = [column.anchor + len(column.slots) - 1 for column in columns]
        num_rows = len(columns)
        return RaggedBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            slots=torch.tensor([column.slots[-1] for column in columns]),
            logit_rows=torch.empty(0, dtype=torch.int64),
            num_logits=0,
            page_size=page_size,
            starts=num_in_pages + tail_lens - 1,
            lens=np.ones(num_rows, dtype=np.int64),
            first_rows=np.arange(num_rows, dtype=np.int64),
            page_counts=np.array([len(pages) for pages, _, _ in seen], dtype=np.int64),
            pages=np.concatenate([pages for pages, _, _ in seen]),
            tail_lens=tail_lens,
            tails=np.array([slot for tail in tails for slot in tail], dtype=np.int64),
        )


def _seen(column: ColumnPlace, page_size: int) -> tuple[np.ndarray, int, list[int]]:
    """What a column sees of its context: whole pages and how many columns they have for it.

    And the slots of the columns before these. There is always a page, whatever it holds.
    """
    page_ids, anchor = column.scheduled.page_ids, column.anchor
    first_page = -(-column.first // page_size)
    stop = min(anchor, first_page * page_size)
    edge = [
        page_ids[position // page_size] * page_size + position % page_size
        for position in range(column.first, stop)
    ]
    count = max(0, anchor - first_page * page_size)
    pages = page_ids[first_page : first_page + max(1, -(-count // page_size))] or page_ids[:1]
    return np.asarray(pages, dtype=np.int64), count, edge

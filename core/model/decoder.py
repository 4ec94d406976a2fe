"""Decoder: the forward pass of every supported family over a ragged batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..batch import RaggedBatch, Segment, build_batch
from ..kv_pool import KvDtype, KVPool
from ..ops.base import HeadLayout, Ops
from ..ops.layers import run_layers
from ..ops.weights import DecoderWeights
from .config import DecoderConfig
from .rope import RopeTable


def head_layout(config: DecoderConfig) -> HeadLayout:
    """How a row of this model's packed QKV is cut into heads."""
    return HeadLayout(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
    )


class Decoder:
    """Token ids and pages in, logits out. Serves as target and as draft model alike."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, ops: Ops) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.sampler = ops.sampler
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.heads = head_layout(config)
        self._fused = ops.fuse(weights)
        self.on_pass: Callable[[], None] = lambda: None  # called before the kernels of each pass
        self._rope = RopeTable(config.rope, config.head_dim, self.device)

    def make_pool(self, num_pages: int, *, page_size: int, kv_dtype: KvDtype = "auto") -> KVPool:
        """A KV pool of this decoder's shape and device; of its dtype, too, unless told."""
        return KVPool(
            num_pages,
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
            kv_dtype=kv_dtype,
        )

    def batch(self, segments: Sequence[Segment], *, page_size: int) -> RaggedBatch:
        """Lay out segments for this decoder's backend. Raises ValueError as `build_batch` does."""
        device = self.ops.batch_device or self.device
        return build_batch(segments, page_size=page_size, device=device, min_rows=self.ops.min_rows)

    @torch.inference_mode()
    def warm_up(self, pool: KVPool, max_len: int) -> None:
        """Be ready for passes over a pool, of up to ``max_len`` positions; it is not written.

        On a GPU, captures the graphs: seconds, and memory beside the pool's.
        """
        self._rope.table(max_len)
        if self._fused is not None:
            self._fused.warm_up(pool, self.heads, self._rope)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """Compute KV of every row into the pool; logits ``[num_logits, vocab]`` float32.

        They hold until the next pass.
        """
        return self.logits(self.hidden_states(batch, pool), batch)

    @torch.inference_mode()
    def hidden_states(self, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """The final norm's output ``[num_rows, hidden]``; writes KV into the pool.

        It holds until the next pass, and so does all that the pass leaves in the batch.
        """
        plan = self.ops.plan(batch, pool, self.heads, self._rope)
        self.on_pass()
        if self._fused is not None:
            return self._fused(batch.token_ids, plan)
        return run_layers(self.ops, self.weights, batch.token_ids, plan)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        """Logits ``[num_logits, vocab]`` float32 of the batch's logit rows, until the next pass."""
        if batch.logits is not None:
            return batch.logits
        if batch.num_logits == 0:
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        is_all = batch.num_logits == len(hidden)
        wanted = hidden if is_all else hidden.index_select(0, batch.logit_rows)
        return self.ops.logits(wanted, self.weights.lm_head)[: batch.num_logits]

"""Decoder: the forward pass of every supported family over a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..ops.base import DecoderWeights, HeadLayout, LayersOutput, Ops
from ..ops.batch import (
    NOTHING_MORE,
    DeviceTokens,
    ForwardOutput,
    RaggedBatch,
    Segment,
    Taps,
    Wanted,
    build_batch,
)
from ..ops.kv_pool import KvDtype, KVPool, bytes_per_page
from ..ops.layers import run_layers
from .config import DecoderConfig
from .rope import RopeTable, layer_tables

ModelPath: TypeAlias = Literal["own", "transformers"]


def head_layout(config: DecoderConfig) -> HeadLayout:
    """How a row of this model's packed QKV is cut into heads."""
    return HeadLayout(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale or config.head_dim**-0.5,
    )


class Decoder:
    """Token ids and pages in, logits out. Serves as target and as draft model alike.

    ``path``: what computes the layers, these operations or transformers' modules. ``exact``:
    whether a row's bits are the same in any batch.
    """

    path: ModelPath = "own"

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, ops: Ops) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.sampler = ops.sampler
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.heads = head_layout(config)
        self.exact = getattr(ops, "exact", "spec") != "off"
        self._compiled = ops.compile_forward(weights)
        specs = layer_tables(config.ropes).specs
        self._ropes = tuple(RopeTable(spec, config.head_dim, self.device) for spec in specs)

    def make_pool(self, num_pages: int, *, page_size: int, kv_dtype: KvDtype = "auto") -> KVPool:
        """A KV pool of this decoder's shape and device; of its dtype unless another is given."""
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

    def bytes_per_page(self, *, page_size: int, kv_dtype: KvDtype = "auto") -> int:
        """Bytes of one page of `make_pool`'s."""
        return bytes_per_page(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            page_size=page_size,
            dtype=self.dtype,
            kv_dtype=kv_dtype,
        )

    def batch(
        self,
        segments: Sequence[Segment],
        *,
        page_size: int,
        device_tokens: DeviceTokens | None = None,
    ) -> RaggedBatch:
        """Lay out segments for this decoder's backend. Raises ValueError as `build_batch` does."""
        return build_batch(
            segments,
            page_size=page_size,
            device=self.ops.batch_device or self.device,
            min_rows=self.ops.min_rows,
            device_tokens=device_tokens,
        )

    @torch.inference_mode()
    def warm_up(self, pool: KVPool, max_len: int, taps: Taps = ()) -> None:
        """Be ready for passes over a pool, of up to ``max_len`` positions; it is not written.

        ``taps``: the boundaries that these passes will want. On a GPU, captures the graphs, which
        takes seconds and memory beside the pool's.
        """
        for rope in self._ropes:
            rope.table(max_len)
        if self._compiled is not None:
            self._compiled.warm_up(pool, self.heads, self._ropes, taps)

    @torch.inference_mode()
    def forward(
        self, batch: RaggedBatch, pool: KVPool, wanted: Wanted = NOTHING_MORE
    ) -> ForwardOutput:
        """Compute KV of every row into the pool, and what is wanted besides.

        The output holds until the next pass. Raises ValueError for taps that there are not.
        """
        self._check(wanted.taps)
        plan = self.ops.plan(batch, pool, self.heads, *self._ropes)
        if wanted.on_kernels_started is not None:
            wanted.on_kernels_started()
        if self._compiled is None:
            found = run_layers(self.ops, self.weights, batch.token_ids, plan, wanted.taps)
        else:
            found = self._compiled(batch.token_ids, plan, wanted)
        logits = self._logits(batch, found) if found.logits is None else found.logits
        return ForwardOutput(found.hidden, logits, found.tokens, found.taps)

    def _check(self, taps: Taps) -> None:
        num_layers = self.config.num_layers
        if taps and (len(set(taps)) < len(taps) or min(taps) < 0 or max(taps) > num_layers):
            raise ValueError(f"taps {taps}: each from 0 to {num_layers}, and once")

    def _logits(self, batch: RaggedBatch, found: LayersOutput) -> Tensor:
        """Those of the batch's logit rows, [num_logits, vocab] float32."""
        hidden = found.hidden
        if batch.num_logits == 0:
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        if batch.num_logits < len(hidden):
            rows = batch.logit_rows if found.logit_rows is None else found.logit_rows
            hidden = hidden.index_select(0, rows)
        weights = self.weights
        return self.ops.logits(hidden, weights.lm_head, weights.logit_cap)[: batch.num_logits]

"""Measurement of the mean queries of a model over a text, for TriAttention."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...model.decoder import OwnDecoder
from ...model.description.rope import RopeTable
from ...ops.base import ForwardPlan
from ...ops.batch import RaggedBatch, Segment
from ...ops.layers import run_layers
from ...ops.weights import FIRST_TABLE, HeadNorm, Tables
from .triattention import QueryStats, attention_ropes, model_id, pairs

PAGE_SIZE, CHUNK = 16, 512  # tokens of a page, and of a forward pass


class _Recorder:
    """Wrapper of a backend's operations that sums up the queries before RoPE.

    ``batch``: the batch of the current pass, which the caller sets.
    """

    batch: RaggedBatch

    def __init__(self, decoder: OwnDecoder, ropes: Sequence[RopeTable]) -> None:
        heads, config = decoder.part_heads(0), decoder.config
        shape = (config.num_layers, heads.num_heads, heads.head_dim // 2)
        self.mean = torch.zeros(shape, dtype=torch.complex64)
        self.mean_abs = torch.zeros(shape)
        self._ops, self._heads, self._ropes = decoder.ops, heads, ropes

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the operations have
        return getattr(self._ops, name)

    def rope_write(
        self,
        qkv: Tensor,
        layer: int,
        plan: ForwardPlan,
        norm: HeadNorm | None,
        tables: Tables = FIRST_TABLE,
    ) -> Tensor:
        """Apply RoPE and write KV as the backend does, and add up the queries without RoPE."""
        q = self._ops.rope_write(qkv, layer, plan, norm, tables)
        batch, heads = self.batch, self._heads
        num_rows = int(batch.lens.sum())  # The rows after these are padding.
        rows = pairs(q[:num_rows].float().view(num_rows, heads.num_heads, -1) / heads.scale)
        turns = self._ropes[layer].turns(batch.positions[:num_rows]).unsqueeze(1)
        still = rows * turns.conj() / turns.abs().square()
        self.mean[layer] += still.sum(dim=0)
        self.mean_abs[layer] += still.abs().sum(dim=0)
        return q


@torch.inference_mode()
def measure_queries(
    decoder: OwnDecoder,
    texts: Sequence[Sequence[int]],
    on_tokens: Callable[[int], None] = lambda _num_tokens: None,
) -> QueryStats:
    """Return the mean queries of the model over ``texts``, which are sequences of token ids.

    ``on_tokens`` is called after each pass with the number of tokens computed so far. Raises
    ValueError if a layer of the model has no attention, or if all texts are empty.
    """
    ropes = attention_ropes(decoder)
    recorder, num_tokens = _Recorder(decoder, ropes), sum(map(len, texts))
    if not num_tokens:
        raise ValueError("the calibration data contains no text")
    num_done = 0
    for text in texts:
        tokens = array("q", text)
        num_pages = -(-len(tokens) // PAGE_SIZE)
        pool = decoder.make_pool(num_pages, page_size=PAGE_SIZE)
        pages = array("q", range(num_pages))
        for start in range(0, len(tokens), CHUNK):
            segment = Segment(tokens[start : start + CHUNK], start, pages, 0)
            recorder.batch = batch = decoder.batch([segment], page_size=PAGE_SIZE)
            run_layers(recorder, decoder.weights, batch.token_ids, decoder.plans(batch, pool))
            num_done += len(segment.token_ids)
            on_tokens(num_done)
    return QueryStats(recorder.mean / num_tokens, recorder.mean_abs / num_tokens, model_id(decoder))

"""Paged attention in plain PyTorch for decode, verify and prefill rows.

The blocks of a plan are merged in order with an online softmax (arXiv 1805.02867).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import capped
from .plan import HIDDEN, Block, Group, TorchPlan

_LOWEST = -80.0  # exp of lower numbers underflows and takes ten times as long (measured)


def attend(
    q: Tensor,
    layer: int,
    plan: TorchPlan,
    window: int | None,
    *,
    cap: float | None = None,
    sinks: Tensor | None = None,
    is_mutual: bool = False,
) -> Tensor:
    """Return attention outputs ``[T, num_heads * value_dim]`` of scaled queries.

    ``q``: [T, num_heads * head_dim]. ``cap``: scores become ``cap * tanh(scores / cap)`` (Gemma 2,
    arXiv 2408.00118). ``sinks`` [num_heads]: score of one more key, without a value, that each row
    sees (gpt-oss). ``is_mutual``: rows see positions up to `RaggedBatch.reaches`.
    """
    heads = plan.heads
    packed = q.view(len(q) * heads.num_kv_heads, -1)
    pages, blocks = plan.pages(layer), plan.blocks(window, is_mutual=is_mutual)
    outs = [
        _attend_group(packed.index_select(0, group.q_rows), group, each, pages, plan, cap, sinks)
        for group, each in zip(plan.groups, blocks, strict=True)
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.index_select(0, plan.unpack).view(len(q), -1)


def _attend_group(
    q: Tensor,
    group: Group,
    blocks: list[Block],
    pages: Tensor,
    plan: TorchPlan,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return a group's outputs ``[n * num_kv_heads * num_rows, group * value_dim]``.

    ``q``: queries [n * num_kv_heads * num_rows, group * head_dim].
    """
    heads = plan.heads
    items = len(group.members) * heads.num_kv_heads
    queries = q.view(items, -1, heads.head_dim)
    state: _Softmax | None = None
    for block in blocks:
        span = slice(block.first * heads.num_kv_heads, block.last * heads.num_kv_heads)
        found = plan.read(pages, block)
        keys, values = (found, found[..., : heads.rank]) if heads.rank else found.chunk(2)
        scores = torch.bmm(queries[span], keys.transpose(1, 2)).float()
        scores = capped(scores, cap)
        if state is None and len(scores) == items:
            state = _Softmax.of(scores, values, block)
            continue
        state = state or _Softmax.empty(queries, heads.value_dim)
        state.merge(scores, values, block, span)
    assert state is not None  # every row sees itself
    if sinks is not None:
        state.add_sinks(sinks.float().view(heads.num_kv_heads, 1, -1))
    return state.result(q.dtype).view(len(q), -1)


@dataclass(slots=True, eq=False)
class _Softmax:
    """Running state of every query: highest score, sum of exp(score - max_score), weighted values.

    Merging a block that a query does not see changes none of its bits, even before the first block
    that the query sees.
    """

    max_score: Tensor  # [items, num_rows, 1]
    exp_sum: Tensor  # [items, num_rows, 1]
    acc: Tensor  # [items, num_rows, value_dim] float32

    @classmethod
    def of(cls, scores: Tensor, values: Tensor, block: Block) -> _Softmax:
        """Return the state after a first block; an empty state merged with it has the same bits."""
        max_score = _max_score(scores, block)
        weights = _weigh(scores, max_score, block)
        acc = torch.bmm(weights.to(values.dtype), values).float()
        return cls(max_score, weights.sum(dim=-1, keepdim=True), acc)

    @classmethod
    def empty(cls, queries: Tensor, value_dim: int) -> _Softmax:
        """Return the state before any block."""
        max_score = queries.new_full((*queries.shape[:2], 1), HIDDEN, dtype=torch.float32)
        acc = queries.new_zeros((*queries.shape[:2], value_dim), dtype=torch.float32)
        return cls(max_score, torch.zeros_like(max_score), acc)

    def merge(self, scores: Tensor, values: Tensor, block: Block, span: slice) -> None:
        """Merge a block of scores ``[count, num_rows, width]`` of the queries in ``span``."""
        before = self.max_score[span]
        max_score = torch.maximum(before, _max_score(scores, block))
        weights = _weigh(scores, max_score, block)
        keep = before.sub_(max_score).exp_()
        self.exp_sum[span].mul_(keep).add_(weights.sum(dim=-1, keepdim=True))
        self.acc[span].mul_(keep).add_(torch.bmm(weights.to(values.dtype), values))
        before.copy_(max_score)

    def add_sinks(self, sinks: Tensor) -> None:
        """Add scores without a value, ``[num_kv_heads, 1, group]``, to the sums of their heads."""
        num_kv_heads, _, group = sinks.shape
        shape = (-1, num_kv_heads, self.max_score.shape[1] // group, group)
        before = self.max_score.view(shape)
        max_score = torch.maximum(before, sinks)
        keep = (before - max_score).exp_()
        exp_sum = self.exp_sum.view(shape).mul(keep).add_((sinks - max_score).exp_())
        self.exp_sum = exp_sum.view_as(self.exp_sum)
        self.acc *= keep.view_as(self.exp_sum)

    def result(self, dtype: torch.dtype) -> Tensor:
        """Return the outputs, ``[items, num_rows, value_dim]``."""
        return self.acc.div_(self.exp_sum).to(dtype)


def _max_score(scores: Tensor, block: Block) -> Tensor:
    """Mask the scores in place, and return each query's highest score, ``[.., 1]``."""
    if block.mask is not None:
        # Adding takes a twentieth of masked_fill's time (measured).
        _masked(scores, block, block.mask).add_(block.mask)
    return scores.amax(dim=-1, keepdim=True)


def _weigh(scores: Tensor, max_score: Tensor, block: Block) -> Tensor:
    """Return ``exp(scores - max_score)``, computed in place; hidden keys have exactly 0."""
    weights = scores.sub_(max_score).clamp_(min=_LOWEST).exp_()
    if block.seen is not None:
        _masked(weights, block, block.seen).mul_(block.seen)
    return weights


def _masked(scores: Tensor, block: Block, mask: Tensor) -> Tensor:
    """Return a view of ``scores`` without the first sequences, which have no hidden keys.

    The view is ``[count, num_kv_heads, num_rows, group, width]``.
    """
    count = block.last - block.first
    by_row = scores.view(count, len(scores) // count, mask.shape[2], -1, block.width)
    return by_row[block.masked_from :]

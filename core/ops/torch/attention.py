"""Paged attention in plain PyTorch, for decode, verify and prefill rows alike.

The blocks of a plan are merged in order with an online softmax (arXiv 1805.02867).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import capped
from .plan import HIDDEN, Block, Group, TorchPlan

_LOWEST = -80.0  # exp of less underflows, which takes ten times as long (measured)


def attend(
    q: Tensor,
    layer: int,
    plan: TorchPlan,
    window: int | None,
    *,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``[T, num_heads * head_dim]`` scaled queries to attention outputs of that shape.

    ``cap``: scores become ``cap * tanh(scores / cap)`` (Gemma 2, arXiv 2408.00118). ``sinks``
    [num_heads]: the score of a key without a value that each row sees besides (gpt-oss).
    """
    heads = plan.heads
    packed = q.view(len(q) * heads.num_kv_heads, -1)
    pages = plan.pages(layer)
    outs = [
        _attend_group(packed.index_select(0, group.q_rows), group, blocks, pages, plan, cap, sinks)
        for group, blocks in zip(plan.groups, plan.blocks(window), strict=True)
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.index_select(0, plan.unpack).view(q.shape)


def _attend_group(
    q: Tensor,
    group: Group,
    blocks: list[Block],
    pages: Tensor,
    plan: TorchPlan,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """``[n * num_kv_heads * num_rows, group * head_dim]`` queries to outputs of that shape."""
    heads = plan.heads
    items = len(group.members) * heads.num_kv_heads
    queries = q.view(items, -1, heads.head_dim)
    state: _Softmax | None = None
    for block in blocks:
        span = slice(block.first * heads.num_kv_heads, block.last * heads.num_kv_heads)
        keys, values = plan.read(pages, block).chunk(2)
        scores = torch.bmm(queries[span], keys.transpose(1, 2)).float()
        scores = capped(scores, cap)
        if state is None and len(scores) == items:
            state = _Softmax.of(scores, values, block)
            continue
        state = state or _Softmax.empty(queries)
        state.merge(scores, values, block, span)
    assert state is not None  # every row sees itself
    if sinks is not None:
        state.add_sinks(sinks.float().view(heads.num_kv_heads, 1, -1))
    return state.result(q.dtype).view(q.shape)


@dataclass(slots=True, eq=False)
class _Softmax:
    """Running maximum, sum and weighted values of every query.

    Merging a block that a query cannot see at all changes none of its bits, before the first
    block that it does see or after.
    """

    top: Tensor  # [items, num_rows, 1]
    total: Tensor  # [items, num_rows, 1]
    out: Tensor  # [items, num_rows, head_dim] float32

    @classmethod
    def of(cls, scores: Tensor, values: Tensor, block: Block) -> _Softmax:
        """The state after a first block; the same bits as merging it into an empty state."""
        top = _top(scores, block)
        weights = _weigh(scores, top, block)
        out = torch.bmm(weights.to(values.dtype), values).float()
        return cls(top, weights.sum(dim=-1, keepdim=True), out)

    @classmethod
    def empty(cls, queries: Tensor) -> _Softmax:
        """The state before any block."""
        top = queries.new_full((*queries.shape[:2], 1), HIDDEN, dtype=torch.float32)
        return cls(top, torch.zeros_like(top), torch.zeros_like(queries, dtype=torch.float32))

    def merge(self, scores: Tensor, values: Tensor, block: Block, span: slice) -> None:
        """Add one block of scores ``[count, num_rows, width]`` of the queries in ``span``."""
        before = self.top[span]
        top = torch.maximum(before, _top(scores, block))
        weights = _weigh(scores, top, block)
        keep = before.sub_(top).exp_()
        self.total[span].mul_(keep).add_(weights.sum(dim=-1, keepdim=True))
        self.out[span].mul_(keep).add_(torch.bmm(weights.to(values.dtype), values))
        before.copy_(top)

    def add_sinks(self, sinks: Tensor) -> None:
        """Add a score without a value, ``[num_kv_heads, 1, group]``, to the sums of its heads."""
        num_kv_heads, _, group = sinks.shape
        shape = (-1, num_kv_heads, self.top.shape[1] // group, group)
        before = self.top.view(shape)
        top = torch.maximum(before, sinks)
        keep = (before - top).exp_()
        self.total = self.total.view(shape).mul(keep).add_((sinks - top).exp_()).view_as(self.total)
        self.out *= keep.view_as(self.total)

    def result(self, dtype: torch.dtype) -> Tensor:
        """The outputs, ``[items, num_rows, head_dim]``."""
        return self.out.div_(self.total).to(dtype)


def _top(scores: Tensor, block: Block) -> Tensor:
    """Mask the scores in place; the highest of each query, ``[.., 1]``."""
    if block.mask is not None:
        # Adding takes a twentieth of masked_fill's time (measured).
        _masked(scores, block, block.mask).add_(block.mask)
    return scores.amax(dim=-1, keepdim=True)


def _weigh(scores: Tensor, top: Tensor, block: Block) -> Tensor:
    """``exp(scores - top)`` in place, exactly 0 where hidden."""
    weights = scores.sub_(top).clamp_(min=_LOWEST).exp_()
    if block.seen is not None:
        _masked(weights, block, block.seen).mul_(block.seen)
    return weights


def _masked(scores: Tensor, block: Block, mask: Tensor) -> Tensor:
    """The sequences with hidden keys, ``[count, num_kv_heads, num_rows, group, width]``."""
    count = block.last - block.first
    by_row = scores.view(count, len(scores) // count, mask.shape[2], -1, block.width)
    return by_row[block.masked_from :]

"""Paged attention in plain PyTorch, for decode, verify and prefill rows alike.

Keys are taken in blocks at absolute positions and merged in order with an online softmax (arXiv
1805.02867), so a row adds up the same numbers in the same order whatever rides beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from torch import Tensor

from ..batch import IntArray, RaggedBatch
from ..kv_pool import KVPool
from .base import HeadLayout

BLOCK = 256  # positions
_SHORT_WIDTHS = (64, 128)  # of a last block; measured to leave the bits of every sum as they are
_HIDDEN = -1e30  # finite: a block that a row cannot see at all must not yield NaN
_FEW_ROWS = 8  # decode and verify rows share one group up to here
_ROW_MULTIPLE = 4  # float32 bmm rounds the odd rows of 5, 6, 7, 9 otherwise (measured)


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Positions ``[lo, lo + width)`` of the sequences ``[first, last)`` of a group."""

    first: int
    last: int
    width: int
    kv_rows: Tensor  # [2 * count * num_kv_heads * pages] into the pool's page rows of layer 0
    void_rows: Tensor | None  # V rows behind a sequence's end: stale content, NaN perhaps
    masked_from: int  # first sequence with a hidden position, counted from ``first``
    mask: Tensor | None  # [count - masked_from, 1, rows, 1, width] True where hidden


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Sequences with about the same number of rows, longest context first."""

    members: IntArray  # [n] segments
    rows: IntArray  # [n, num_rows] rows of the batch; the last is repeated as padding
    q_rows: Tensor  # [n * num_kv_heads * num_rows] into q as [T * num_kv_heads, group * head_dim]
    q_positions: Tensor  # [n, num_rows]


class TorchPlan:
    """Indices of one forward pass, for layer 0; other layers shift the pool's base instead."""

    def __init__(
        self,
        batch: RaggedBatch,
        pool: KVPool,
        heads: HeadLayout,
        cos: Tensor,
        sin: Tensor,
        *,
        pad_rows: bool,
    ) -> None:
        self.batch = batch
        self.heads = heads
        self.cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)
        self.sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1)
        self._pool = pool
        self._kv_heads = 2 * pool.num_kv_heads  # K and V of one layer and page
        self._write_rows = self._find_write_rows()
        multiple = _ROW_MULTIPLE if pad_rows and pool.dtype == torch.float32 else 1
        self.groups = [self._group(m, multiple) for m in _split(batch)]
        self.unpack = self._find_unpack()
        self._blocks: dict[int | None, list[list[_Block]]] = {}

    def write(self, kv: Tensor, layer: int) -> None:
        """Store ``[T, 2 * num_kv_heads, head_dim]``: keys, then values."""
        pool = self._pool
        rows = pool.data.view(-1, pool.head_dim)[layer * self._kv_heads * pool.page_size :]
        rows[self._write_rows] = kv

    def page_rows(self, layer: int) -> Tensor:
        """The pool as ``[.., page_size * head_dim]``, starting at a layer."""
        pool = self._pool
        width = pool.page_size * pool.head_dim
        return pool.data.view(-1, width)[layer * self._kv_heads :]

    def blocks(self, window: int | None) -> list[list[_Block]]:
        """The blocks of every group, made at the first layer that has this window."""
        if window not in self._blocks:
            self._blocks[window] = [self._group_blocks(g, window) for g in self.groups]
        return self._blocks[window]

    def _find_write_rows(self) -> Tensor:
        pool, slots = self._pool, self.batch.slots
        page, offset = slots // pool.page_size, slots % pool.page_size
        page_rows = pool.num_layers * self._kv_heads * pool.page_size
        heads = torch.arange(self._kv_heads, device=slots.device) * pool.page_size
        return (page * page_rows + offset).unsqueeze(1) + heads

    def _group(self, members: IntArray, multiple: int) -> _Group:
        batch, num_kv_heads = self.batch, self.heads.num_kv_heads
        step = multiple // gcd(multiple, self.heads.group_size)
        num_rows = -(-int(batch.lens[members].max()) // step) * step
        last = batch.lens[members] - 1
        local = np.minimum(np.arange(num_rows), last[:, None])
        rows = local + batch.first_rows[members, None]
        q_rows = rows[:, None, :] * num_kv_heads + np.arange(num_kv_heads)[:, None]
        positions = local + batch.starts[members, None]
        return _Group(members, rows, self._to(q_rows.ravel()), self._to(positions))

    def _find_unpack(self) -> Tensor:
        """Rows of the groups' outputs in the order of the batch, [T * num_kv_heads]."""
        num_kv_heads = self.heads.num_kv_heads
        unpack = np.zeros((self.batch.num_rows, num_kv_heads), dtype=np.int64)
        base = 0
        for group in self.groups:
            n, num_rows = group.rows.shape
            at = np.arange(base, base + n * num_kv_heads * num_rows)
            by_row = at.reshape(n, num_kv_heads, num_rows).transpose(0, 2, 1)
            unpack[group.rows] = by_row  # padding repeats a row: any of its copies will do
            base += at.size
        if self.batch.num_rows > self.batch.lens.sum():
            unpack[-1] = unpack[0]
        return self._to(unpack.ravel())

    def _group_blocks(self, group: _Group, window: int | None) -> list[_Block]:
        stop = int(self.batch.stops[group.members].max())
        size = self._pool.page_size * max(1, BLOCK // self._pool.page_size)
        blocks = (self._block(group, lo, size, window) for lo in range(0, stop, size))
        return [block for block in blocks if block is not None]

    def _block(self, group: _Group, lo: int, size: int, window: int | None) -> _Block | None:
        starts, stops = self.batch.starts[group.members], self.batch.stops[group.members]
        seen = stops > lo
        if window is not None:
            seen &= lo + size - 1 > starts - window
        if not seen.any():
            return None
        first, last = int(seen.argmax()), len(seen) - int(seen[::-1].argmax())
        starts, stops = starts[first:last], stops[first:last]
        width = self._width(int(stops.max()) - lo, size)
        masked = starts < lo + width - 1
        if window is not None:
            masked |= lo <= stops - 1 - window
        masked_from = int(masked.argmax()) if masked.any() else last - first
        return _Block(
            first=first,
            last=last,
            width=width,
            kv_rows=self._kv_rows(group.members[first:last], lo, width),
            void_rows=self._void_rows(stops, lo, width),
            masked_from=masked_from,
            mask=self._mask(group.q_positions[first + masked_from : last], lo, width, window),
        )

    def _width(self, length: int, size: int) -> int:
        """Positions of a block to fetch when only ``length`` of them exist."""
        page_size = self._pool.page_size
        fitting = (w for w in _SHORT_WIDTHS if length <= w < size and w % page_size == 0)
        return next(fitting, size)

    def _kv_rows(self, members: IntArray, lo: int, width: int) -> Tensor:
        pool = self._pool
        pages = np.arange(lo // pool.page_size, (lo + width) // pool.page_size)
        # Behind its end a sequence is given its first page: finite content, and masked anyhow.
        pages = np.where(pages < self.batch.page_table.shape[1], pages, 0)
        ids = self.batch.page_table[members[:, None], pages] * (pool.num_layers * self._kv_heads)
        heads = np.arange(self._kv_heads).reshape(2, 1, pool.num_kv_heads, 1)
        return self._to((ids[:, None, :] + heads).ravel())

    def _void_rows(self, stops: IntArray, lo: int, width: int) -> Tensor | None:
        page_size, num_kv_heads = self._pool.page_size, self._pool.num_kv_heads
        positions = np.arange(lo, lo + width)
        page_ends = -(-stops // page_size) * page_size
        only_page = stops < page_size  # so the first page is void behind the end, too
        reach = np.where(only_page, lo + width, page_ends)
        void = (positions >= stops[:, None]) & (positions < reach[:, None])
        sequence, column = np.nonzero(void)
        if not len(sequence):
            return None
        head = sequence[:, None] * num_kv_heads + np.arange(num_kv_heads)
        return self._to((head * width + column[:, None]).ravel())

    def _mask(self, positions: Tensor, lo: int, width: int, window: int | None) -> Tensor | None:
        if not len(positions):
            return None
        keys = torch.arange(lo, lo + width, device=positions.device)
        queries = positions[:, None, :, None, None]
        hidden = keys > queries
        return hidden if window is None else hidden | (keys <= queries - window)

    def _to(self, values: IntArray) -> Tensor:
        return torch.from_numpy(values).to(self._pool.data.device)


def _split(batch: RaggedBatch) -> list[IntArray]:
    """Segments by number of rows, few rows together and chunks by powers of two."""
    buckets = np.ceil(np.log2(np.maximum(batch.lens, _FEW_ROWS))).astype(np.int64)
    members = [np.flatnonzero(buckets == b) for b in np.unique(buckets)]
    return [m[np.argsort(-batch.stops[m], kind="stable")] for m in members]


def attend(q: Tensor, layer: int, plan: TorchPlan, window: int | None) -> Tensor:
    """``[T, num_heads * head_dim]`` scaled queries to attention outputs of that shape."""
    heads = plan.heads
    packed = q.view(len(q) * heads.num_kv_heads, -1)
    pages = plan.page_rows(layer)
    outs = [
        _attend_group(packed.index_select(0, group.q_rows), group, blocks, pages, heads)
        for group, blocks in zip(plan.groups, plan.blocks(window), strict=True)
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.index_select(0, plan.unpack).view(q.shape)


def _attend_group(
    q: Tensor, group: _Group, blocks: list[_Block], pages: Tensor, heads: HeadLayout
) -> Tensor:
    """``[n * num_kv_heads * num_rows, group * head_dim]`` queries to outputs of that shape."""
    items = len(group.members) * heads.num_kv_heads
    queries = q.view(items, -1, heads.head_dim)
    state: _Softmax | None = None
    for block in blocks:
        span = slice(block.first * heads.num_kv_heads, block.last * heads.num_kv_heads)
        keys, values = _fetch(pages, block, heads)
        scores = _scores(queries[span], keys, block, heads)
        if state is None and len(scores) == items:
            state = _Softmax.of(scores, values)
            continue
        state = state or _Softmax.empty(queries)
        state.merge(scores, values, span)
    assert state is not None  # every row sees itself
    return state.result(q.dtype).view(q.shape)


def _scores(queries: Tensor, keys: Tensor, block: _Block, heads: HeadLayout) -> Tensor:
    """``[count * num_kv_heads, num_rows * group, width]`` float32, hidden ones very low."""
    scores = torch.bmm(queries, keys.transpose(1, 2)).float()
    if block.mask is not None:
        shape = (block.last - block.first, heads.num_kv_heads, -1, heads.group_size, block.width)
        scores.view(shape)[block.masked_from :].masked_fill_(block.mask, _HIDDEN)
    return scores


def _fetch(pages: Tensor, block: _Block, heads: HeadLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of a block, each ``[count * num_kv_heads, width, head_dim]``."""
    kv = pages.index_select(0, block.kv_rows).view(2, -1, block.width, heads.head_dim)
    keys, values = kv[0], kv[1]
    if block.void_rows is not None:
        # Weight 0 times NaN would be NaN.
        values.view(-1, heads.head_dim).index_fill_(0, block.void_rows, 0.0)
    return keys, values


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
    def of(cls, scores: Tensor, values: Tensor) -> _Softmax:
        """The state after a first block; the same bits as merging it into an empty state."""
        top = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        out = torch.bmm(weights.to(values.dtype), values).float()
        return cls(top, weights.sum(dim=-1, keepdim=True), out)

    @classmethod
    def empty(cls, queries: Tensor) -> _Softmax:
        """The state before any block."""
        top = queries.new_full((*queries.shape[:2], 1), _HIDDEN, dtype=torch.float32)
        return cls(top, torch.zeros_like(top), torch.zeros_like(queries, dtype=torch.float32))

    def merge(self, scores: Tensor, values: Tensor, span: slice) -> None:
        """Add one block of scores ``[count, num_rows, width]`` of the queries in ``span``."""
        before = self.top[span]
        top = torch.maximum(before, scores.amax(dim=-1, keepdim=True))
        weights = scores.sub_(top).exp_()
        keep = before.sub_(top).exp_()
        self.total[span].mul_(keep).add_(weights.sum(dim=-1, keepdim=True))
        self.out[span].mul_(keep).add_(torch.bmm(weights.to(values.dtype), values))
        before.copy_(top)

    def result(self, dtype: torch.dtype) -> Tensor:
        """The outputs, ``[items, num_rows, head_dim]``."""
        return self.out.div_(self.total).to(dtype)

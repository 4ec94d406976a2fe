"""TorchPlan: the row indices of every gather and scatter of one forward pass.

Keys are read in blocks at absolute positions, so that a row adds up the same numbers in the same
order whatever other rows the pass has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np
import torch
from torch import Tensor

from ..batch import IntArray, RaggedBatch, pass_states
from ..kv_pool import KVPool
from ..weights import HeadLayout

BLOCK = 256  # positions

# Widths of a last block. Cutting off hidden keys changes no bit of a sum at widths up to 128 in
# steps of 32; between 128 and 256, float32 bmm splits the sum elsewhere (measured).
_SHORT_WIDTHS = (32, 64, 96, 128)
HIDDEN = -1e30  # finite, so that a block that a row does not see yields no NaN
_GROUP_COST = 6000  # scores that can be computed in the time of one more group, per block
_ROW_MULTIPLE = 4  # float32 bmm rounds the odd rows of 5, 6, 7 or 9 differently (measured)


@dataclass(frozen=True, slots=True, eq=False)
class TailRows:
    """Keys and values of a block that are in tails, not in pages."""

    rows: Tensor  # [n] indices of the block's rows
    blocks: Tensor  # [n] the pool's blocks of layer 0 with the rows
    offsets: Tensor  # [n] offsets in these blocks


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Positions ``[lo, lo + width)`` of the sequences ``[first, last)`` of a group."""

    first: int
    last: int
    width: int
    kv_rows: Tensor  # [num_blocks * count * num_kv_heads * pages] into the blocks of layer 0

    # K and V rows after the end of a sequence in its pages, whose stale content may be NaN.
    void_rows: Tensor | None
    tail: TailRows | None
    masked_from: int  # first sequence with a hidden position, counted from ``first``
    seen: Tensor | None  # [count - masked_from, 1, num_rows, 1, width] 1 where seen, 0 where hidden
    mask: Tensor | None  # the shape of ``seen``, to be added: 0 where seen, `HIDDEN` where hidden


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Sequences with about the same number of rows, longest context first."""

    members: IntArray  # [n] segments
    rows: IntArray  # [n, num_rows] rows of the batch; the last is repeated as padding
    q_rows: Tensor  # [n * num_kv_heads * num_rows] into q as [T * num_kv_heads, group * head_dim]
    q_positions: Tensor  # [n, num_rows]
    # [n, num_rows] end of the positions that a row sees; rows of one image see each other
    q_reaches: Tensor


class TorchPlan:
    """Indices of one forward pass for layer 0; other layers shift the pool's base instead."""

    def __init__(
        self,
        batch: RaggedBatch,
        pool: KVPool,
        heads: HeadLayout,
        tables: Sequence[tuple[Tensor, Tensor]],
        *,
        pad_rows: bool,
    ) -> None:
        """Compute the indices; ``tables``: cos and sin ``[T, rope_dim / 2]`` of each table.

        ``pad_rows``: pad groups so that float32 bmm rounds every row alike.
        """
        self.batch = batch
        self.heads = heads
        self.tables = [
            (
                torch.cat((cos, cos), dim=-1).unsqueeze(1),
                torch.cat((-sin, sin), dim=-1).unsqueeze(1),
            )
            for cos, sin in tables
        ]
        self._pool = pool
        self.states = pass_states(batch, pool.states)
        self._kv_heads = pool.num_blocks * pool.num_kv_heads  # blocks of one layer and page
        self._write_at = self._find_write_at()
        multiple = _ROW_MULTIPLE if pad_rows and pool.dtype == torch.float32 else 1
        self.groups = [self._group(m, multiple) for m in _split(batch)]
        self.unpack = self._find_unpack()
        self._blocks: dict[tuple[int | None, bool], list[list[Block]]] = {}

    def write(self, kv: Tensor, layer: int) -> None:
        """Store the batch's keys, then values: float32 [T, num_blocks * num_kv_heads, head_dim]."""
        self._pool.store(self.pages(layer), self._write_at, kv)

    def pages(self, layer: int) -> Tensor:
        """Return the pool's blocks from the first block of a layer."""
        return self._pool.blocks[layer * self._kv_heads :]

    def read(self, pages: Tensor, block: Block) -> Tensor:
        """Return a block's keys, then values ``[.., width, head_dim]``, ordered as ``kv_rows``."""
        pool = self._pool
        kv = pool.load_blocks(pages.index_select(0, block.kv_rows))
        if block.void_rows is not None:
            # Zeros replace stale content: NaN plus the mask, or times a weight of 0, stays NaN.
            kv.view(-1, pool.head_dim).index_fill_(0, block.void_rows, 0.0)
        if block.tail is not None:
            found = pool.load(pages, (block.tail.blocks, block.tail.offsets), pool.dtype)
            kv.view(-1, pool.head_dim).index_copy_(0, block.tail.rows, found)
        return kv.view(-1, block.width, pool.head_dim)

    def blocks(self, window: int | None, *, is_mutual: bool = False) -> list[list[Block]]:
        """Return the blocks of every group, computed at the first layer with this window.

        ``is_mutual``: rows see positions up to their reaches.
        """
        is_mutual &= self.batch.reaches is not None
        rule = (window, is_mutual)
        if rule not in self._blocks:
            self._blocks[rule] = [self._group_blocks(g, *rule) for g in self.groups]
        return self._blocks[rule]

    def _find_write_at(self) -> tuple[Tensor, Tensor]:
        """Return each row's blocks in layer 0, ``[T, num_blocks * num_kv_heads]``, and offset."""
        pool, slots = self._pool, self.batch.slots
        first = (slots // pool.page_size).mul_(pool.page_blocks).unsqueeze(1)
        heads = torch.arange(self._kv_heads, device=slots.device)
        return first + heads, (slots % pool.page_size).unsqueeze(1)

    def _group(self, members: IntArray, multiple: int) -> Group:
        batch, num_kv_heads = self.batch, self.heads.num_kv_heads
        step = multiple // gcd(multiple, self.heads.group_size)
        num_rows = -(-int(batch.lens[members].max()) // step) * step
        last = batch.lens[members] - 1
        local = np.minimum(np.arange(num_rows), last[:, None])
        rows = local + batch.first_rows[members, None]
        q_rows = rows[:, None, :] * num_kv_heads + np.arange(num_kv_heads)[:, None]
        positions = self._to(local + batch.starts[members, None])
        reaches = positions + 1 if batch.reaches is None else self._to(batch.reaches[rows])
        return Group(members, rows, self._to(q_rows.ravel()), positions, reaches)

    def _find_unpack(self) -> Tensor:
        """Return indices that put the groups' output rows into the batch's order.

        They are [T * num_kv_heads].
        """
        num_kv_heads = self.heads.num_kv_heads
        unpack = np.zeros((self.batch.num_rows, num_kv_heads), dtype=np.int64)
        base = 0
        for group in self.groups:
            n, num_rows = group.rows.shape
            at = np.arange(base, base + n * num_kv_heads * num_rows)
            by_row = at.reshape(n, num_kv_heads, num_rows).transpose(0, 2, 1)
            unpack[group.rows] = by_row  # padding repeats a row, and all copies are equal
            base += at.size
        num_tokens = self.batch.lens.sum()
        unpack[num_tokens:] = unpack[num_tokens - 1]  # the batch's copies of its last row
        return self._to(unpack.ravel())

    def _group_blocks(self, group: Group, window: int | None, is_mutual: bool) -> list[Block]:
        edges = self._edges(int(self.batch.stops[group.members].max()))
        blocks = (self._block(group, lo, hi - lo, window, is_mutual) for lo, hi in pairwise(edges))
        return [block for block in blocks if block is not None]

    def _edges(self, stop: int) -> list[int]:
        """Return the positions where blocks begin; the first block is halved for short contexts."""
        page_size = self._pool.page_size
        size = page_size * max(1, BLOCK // page_size)
        halves = [size // 2] if size // 2 % page_size == 0 else []
        return [0, *halves, *range(size, stop + size, size)]

    def _block(
        self, group: Group, lo: int, size: int, window: int | None, is_mutual: bool
    ) -> Block | None:
        starts, stops = self.batch.starts[group.members], self.batch.stops[group.members]
        seen = stops > lo
        if window is not None:
            seen &= lo + size - 1 > starts - window
        if not seen.any():
            return None
        first, last = int(seen.argmax()), len(seen) - int(seen[::-1].argmax())
        starts, stops = starts[first:last], stops[first:last]
        members = group.members[first:last]
        width = self._width(int(stops.max()) - lo, size)
        masked = starts < lo + width - 1
        if window is not None:
            masked |= lo <= stops - 1 - window
        masked_from = int(masked.argmax()) if masked.any() else last - first
        rows = slice(first + masked_from, last)
        positions = group.q_positions[rows]
        reaches = group.q_reaches[rows] if is_mutual else positions + 1
        seen_keys = self._seen(positions, reaches, lo, width, window) if masked.any() else None
        return Block(
            first=first,
            last=last,
            width=width,
            kv_rows=self._kv_rows(members, lo, width),
            void_rows=self._void_rows(self.batch.tail_from[members], lo, width),
            tail=self._tail_rows(members, lo, width) if len(self.batch.tails) else None,
            masked_from=masked_from,
            seen=seen_keys,
            mask=None if seen_keys is None else (1.0 - seen_keys).mul_(HIDDEN),
        )

    def _width(self, length: int, size: int) -> int:
        """Return the number of positions to read of a block that has only ``length`` positions."""
        page_size = self._pool.page_size
        fitting = (w for w in _SHORT_WIDTHS if length <= w < size and w % page_size == 0)
        return next(fitting, size)

    def _kv_rows(self, members: IntArray, lo: int, width: int) -> Tensor:
        pool = self._pool
        pages = np.arange(lo // pool.page_size, (lo + width) // pool.page_size)
        # Pages after its end are replaced by a sequence's first: its content is finite and masked.
        pages = np.where(pages < self.batch.page_table.shape[1], pages, 0)
        ids = self.batch.page_table[members[:, None], pages] * pool.page_blocks
        heads = np.arange(self._kv_heads).reshape(pool.num_blocks, 1, pool.num_kv_heads, 1)
        return self._to((ids[:, None, :] + heads).ravel())

    def _void_rows(self, stops: IntArray, lo: int, width: int) -> Tensor | None:
        page_size, num_kv_heads = self._pool.page_size, self._pool.num_kv_heads
        positions = np.arange(lo, lo + width)
        page_ends = -(-stops // page_size) * page_size
        only_page = stops < page_size  # positions after the only page are then void as well
        reach = np.where(only_page, lo + width, page_ends)
        void = (positions >= stops[:, None]) & (positions < reach[:, None])
        sequence, column = np.nonzero(void)
        if not len(sequence):
            return None
        head = sequence[:, None] * num_kv_heads + np.arange(num_kv_heads)
        keys = head * width + column[:, None]
        kinds = np.arange(self._pool.num_blocks)[:, None, None]
        return self._to((keys + kinds * len(stops) * num_kv_heads * width).ravel())

    def _tail_rows(self, members: IntArray, lo: int, width: int) -> TailRows | None:
        """Return where the keys and values of draft nodes beside the trunk are, for one key block.

        They are not in the page table but in slots of spare pages (`RaggedBatch.tails`). Returns
        None if the ``width`` positions from ``lo`` on have no such slot.
        """
        batch, pool = self.batch, self._pool
        positions = np.arange(lo, lo + width)
        offsets = positions - batch.tail_from[members, None]
        sequence, column = np.nonzero((offsets >= 0) & (positions < batch.stops[members, None]))
        if not len(sequence):
            return None
        slots = batch.tails[batch.first_tails[members[sequence]] + offsets[sequence, column]]
        kinds = np.arange(pool.num_blocks)[:, None, None]
        heads = np.arange(pool.num_kv_heads)
        head_rows = (kinds * len(members) + sequence[:, None]) * pool.num_kv_heads + heads
        pages = (slots // pool.page_size)[:, None] * pool.page_blocks
        return TailRows(
            rows=self._to((head_rows * width + column[:, None]).ravel()),
            blocks=self._to((pages + kinds * pool.num_kv_heads + heads).ravel()),
            offsets=self._to(
                np.tile(np.repeat(slots % pool.page_size, pool.num_kv_heads), pool.num_blocks)
            ),
        )

    def _seen(
        self, positions: Tensor, reaches: Tensor, lo: int, width: int, window: int | None
    ) -> Tensor:
        keys = torch.arange(lo, lo + width, device=positions.device)
        queries = positions[:, None, :, None, None]
        seen = keys < reaches[:, None, :, None, None]
        return (seen if window is None else seen & (keys > queries - window)).float()

    def _to(self, values: IntArray) -> Tensor:
        return torch.from_numpy(values).to(self._pool.data.device)


def _split(batch: RaggedBatch) -> list[IntArray]:
    """Divide the segments into groups of similar length; shorter segments of a group are padded.

    From the shortest on, a group is merged with the next one if the padding costs less time than a
    separate group.
    """
    lens, stops = batch.lens, batch.stops
    buckets = np.ceil(np.log2(lens)).astype(np.int64)
    groups: list[IntArray] = []
    for bucket in np.unique(buckets):
        members = np.flatnonzero(buckets == bucket)
        if groups and _padding(lens, stops, groups[-1], members) < _GROUP_COST:
            members = np.concatenate((groups.pop(), members))
        groups.append(members)
    return [m[np.argsort(-stops[m], kind="stable")] for m in groups]


def _padding(lens: IntArray, stops: IntArray, short: IntArray, long: IntArray) -> int:
    """Return how many scores per block padding adds if ``short`` is merged with ``long``."""
    blocks = 1 + int(stops[short].max()) // BLOCK
    return int(((lens[long].max() - lens[short]) * stops[short]).sum()) // blocks

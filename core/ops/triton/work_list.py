"""WorkList: which program of the attention kernel computes what, made on the host for one pass.

An item is some rows against the keys of one page table. Rows of decoding and verifying requests
are *narrow*: they are packed into tiles of 16 query heads and take one split of the positions at
a time, so that a long context is shared among many programs, and pages that several requests
share are read once for all of them. Rows of long chunks are *wide*: they fill a tile by
themselves and take all splits in turn. Splits begin at fixed absolute positions and are merged in
order, so what a row adds up does not depend on what rides beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...batch import IntArray, RaggedBatch

SPLIT = 256  # positions
NARROW_LEN = 32  # rows of a segment up to which it is narrow


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Work items of one kind of tile. All arrays are [num_items] but ``rows``.

    Item i computes ``rows[first_rows[i] : first_rows[i] + num_rows[i]]`` of the batch against the
    pages of segment ``tables[i]``, splits ``first_splits[i]`` up to ``last_splits[i]``, that one
    included.
    """

    rows: IntArray
    first_rows: IntArray
    num_rows: IntArray
    tables: IntArray
    first_splits: IntArray
    last_splits: IntArray

    def __len__(self) -> int:
        return len(self.tables)


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """Items of a pass, and where the narrow rows keep what they found in each split.

    Row r's sums of split s are in place ``bases[r] + s`` of ``num_places``; it has the splits
    ``first_splits[r]`` up to ``last_splits[r]``. ``merged_rows`` are the rows to merge.
    """

    narrow: Items
    wide: Items
    merged_rows: IntArray  # [num_narrow_rows]
    bases: IntArray  # [num_rows]
    first_splits: IntArray  # [num_rows]
    last_splits: IntArray  # [num_rows]
    num_places: int


def build_work_list(
    batch: RaggedBatch, *, narrow_rows: int, wide_rows: int, window: int | None = None
) -> WorkList:
    """The work of one attention layer. ``narrow_rows``, ``wide_rows``: rows that a tile holds."""
    rows = np.repeat(np.arange(len(batch.lens)), batch.lens)
    positions = np.arange(len(rows)) + (batch.starts - batch.first_rows)[rows]
    first_splits = np.zeros(len(rows), dtype=np.int64)
    if window is not None:
        first_splits = np.maximum(0, positions - window + 1) // SPLIT
    last_splits = positions // SPLIT
    is_narrow = batch.lens <= NARROW_LEN
    merged = np.flatnonzero(is_narrow[rows])
    counts = (last_splits - first_splits + 1)[merged]
    bases = np.zeros(len(rows), dtype=np.int64)
    bases[merged] = np.cumsum(counts) - counts - first_splits[merged]
    spans = _Spans(batch, first_splits, last_splits)
    return WorkList(
        narrow=_gather(_narrow(spans, np.flatnonzero(is_narrow), narrow_rows)),
        wide=_gather(_wide(spans, np.flatnonzero(~is_narrow), wide_rows)),
        merged_rows=merged,
        bases=bases,
        first_splits=first_splits,
        last_splits=last_splits,
        num_places=int(counts.sum()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    batch: RaggedBatch
    first_splits: IntArray  # [num_rows]
    last_splits: IntArray  # [num_rows]

    def rows(self, segment: int) -> IntArray:
        first = int(self.batch.first_rows[segment])
        return np.arange(first, first + int(self.batch.lens[segment]))


_Item = tuple[IntArray, int, int, int]  # rows, table, first split, last split


def _wide(spans: _Spans, segments: IntArray, tile_rows: int) -> Iterator[_Item]:
    for segment in segments.tolist():
        rows = spans.rows(segment)
        for at in range(0, len(rows), tile_rows):
            some = rows[at : at + tile_rows]
            first, last = spans.first_splits[some].min(), spans.last_splits[some].max()
            yield some, segment, int(first), int(last)


def _narrow(spans: _Spans, segments: IntArray, tile_rows: int) -> Iterator[_Item]:
    """Split by split, the sharers of its pages together."""
    order, shared = _by_pages(spans.batch, segments)
    if not len(order):
        return
    for split in range(int(spans.last_splits.max()) + 1):
        group: list[IntArray] = []
        leader = -1
        for segment, common in zip(order.tolist(), shared.tolist(), strict=True):
            rows = spans.rows(segment)
            sees = (spans.first_splits[rows] <= split) & (split <= spans.last_splits[rows])
            if group and common < (split + 1) * SPLIT:
                yield from _tiles(group, leader, split, tile_rows)
                group = []
            if sees.any():
                leader = segment if not group else leader
                group.append(rows[sees])
        if group:
            yield from _tiles(group, leader, split, tile_rows)


def _tiles(group: list[IntArray], leader: int, split: int, tile_rows: int) -> Iterator[_Item]:
    rows = np.concatenate(group)
    for at in range(0, len(rows), tile_rows):
        yield rows[at : at + tile_rows], leader, split, split


def _by_pages(batch: RaggedBatch, segments: IntArray) -> tuple[IntArray, IntArray]:
    """Segments so that sharers are neighbours, and how many positions each shares with the last.

    Positions that a segment computes itself are its own, whoever else has the page.
    """
    if not len(segments):
        return segments, segments
    tables = batch.page_table[segments]
    order = np.lexsort(tables.T[::-1])
    tables, starts = tables[order], batch.starts[segments[order]]
    differs = np.ones((len(order), tables.shape[1] + 1), dtype=bool)
    differs[1:, :-1] = tables[1:] != tables[:-1]
    shared = differs.argmax(axis=1) * batch.page_size
    shared[1:] = np.minimum(shared[1:], np.minimum(starts[1:], starts[:-1]))
    return segments[order], shared


def _gather(items: Iterator[_Item]) -> Items:
    made = list(items)
    counts = np.array([len(rows) for rows, *_ in made], dtype=np.int64)
    others = np.array([rest for _, *rest in made], dtype=np.int64).reshape(-1, 3)
    return Items(
        rows=np.concatenate([rows for rows, *_ in made]) if made else counts,
        first_rows=np.cumsum(counts) - counts,
        num_rows=counts,
        tables=others[:, 0],
        first_splits=others[:, 1],
        last_splits=others[:, 2],
    )

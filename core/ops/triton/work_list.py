"""WorkList: which program of the attention kernel computes what, made on the host for one pass.

An item is some rows against the keys of one page table. Rows of decoding and verifying requests
are *narrow*: they are packed into tiles of 16 query heads and take one split of the positions at
a time, so that a long context is shared among many programs, and pages that several requests
share are read once for all of them. Rows of long chunks are *wide*: they fill a tile by
themselves and take all splits in turn. Splits begin at fixed absolute positions and are merged in
order, so what a row adds up does not depend on what rides beside it.
"""

from __future__ import annotations

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
    merged = np.arange(len(rows)) if is_narrow.all() else np.flatnonzero(is_narrow[rows])
    counts = (last_splits - first_splits + 1)[merged]
    ends = np.cumsum(counts)
    bases = np.zeros(len(rows), dtype=np.int64)
    bases[merged] = ends - counts - first_splits[merged]
    spans = _Spans(batch, first_splits, last_splits)
    return WorkList(
        narrow=_narrow(spans, np.flatnonzero(is_narrow), narrow_rows),
        wide=_wide(spans, np.flatnonzero(~is_narrow), wide_rows),
        merged_rows=merged,
        bases=bases,
        first_splits=first_splits,
        last_splits=last_splits,
        num_places=int(ends[-1]) if len(ends) else 0,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    batch: RaggedBatch
    first_splits: IntArray  # [num_rows]
    last_splits: IntArray  # [num_rows]


def _wide(spans: _Spans, segments: IntArray, tile_rows: int) -> Items:
    """Tiles of neighbouring rows, the longest context first: it must not be the last to end."""
    if not len(segments):
        return _NO_ITEMS
    lens, firsts = spans.batch.lens[segments], spans.batch.first_rows[segments]
    owners, rows = _spread(firsts, lens)
    first_rows = np.flatnonzero((rows - firsts[owners]) % tile_rows == 0)
    counts = np.diff(first_rows, append=len(rows))
    lo, hi = rows[first_rows], rows[first_rows + counts - 1]  # positions grow with rows
    order = np.argsort(spans.first_splits[lo] - spans.last_splits[hi], kind="stable")
    return Items(
        rows=rows,
        first_rows=first_rows[order],
        num_rows=counts[order],
        tables=segments[owners[first_rows]][order],
        first_splits=spans.first_splits[lo][order],
        last_splits=spans.last_splits[hi][order],
    )


def _narrow(spans: _Spans, segments: IntArray, tile_rows: int) -> Items:
    """Split by split, the sharers of its pages together."""
    if not len(segments):
        return _NO_ITEMS
    batch = spans.batch
    order, shared = _by_pages(batch, segments)
    owners, rows = _spread(batch.first_rows[order], batch.lens[order])
    # Every row with each of its splits, then those of a split together, in order within it.
    firsts = spans.first_splits[rows]
    entries, splits = _spread(firsts, spans.last_splits[rows] - firsts + 1)
    by_split = np.argsort(splits.astype(np.int16), kind="stable")  # a radix sort
    entries, splits = entries[by_split], splits[by_split]
    owners, rows = owners[entries], rows[entries]
    first_rows = _tile_starts(owners, splits, shared, tile_rows)
    splits = splits[first_rows]
    return Items(
        rows=rows,
        first_rows=first_rows,
        num_rows=np.diff(first_rows, append=len(rows)),
        tables=order[owners[first_rows]],
        first_splits=splits,
        last_splits=splits,
    )


def _tile_starts(owners: IntArray, splits: IntArray, shared: IntArray, tile_rows: int) -> IntArray:
    """Where a tile begins: with a row that has not the pages of the row before it, or is too many.

    ``owners``: segments of the rows, counted in the order of ``shared``.
    """
    step, before = owners[1:] - owners[:-1], splits[1:] == splits[:-1]
    joins = (step == 0) & before
    if shared.any():
        joins |= (step == 1) & before & (shared[owners[1:]] >= (splits[1:] + 1) * SPLIT)
    if not joins.any():  # as when everybody decodes, with pages of its own
        return np.arange(len(owners))
    indices = np.arange(len(owners))
    firsts = np.concatenate((indices[:1], np.where(joins, 0, indices[1:])))
    return np.flatnonzero((indices - np.maximum.accumulate(firsts)) % tile_rows == 0)


def _spread(firsts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Each number and the ``counts - 1`` that follow it: (whose, the number)."""
    ends, indices = np.cumsum(counts), np.arange(len(counts))
    if ends[-1] == len(counts):
        return indices, firsts
    owners = np.repeat(indices, counts)
    return owners, np.arange(ends[-1]) + (firsts - ends + counts)[owners]


def _by_pages(batch: RaggedBatch, segments: IntArray) -> tuple[IntArray, IntArray]:
    """Segments so that sharers are neighbours, and how many positions each shares with the last.

    Positions that a segment computes itself are its own, whoever else has the page.
    """
    shared = np.zeros(len(segments), dtype=np.int64)
    if not _may_share(batch, segments):
        return segments, shared
    pages, size = batch.pages.tobytes(), batch.pages.itemsize
    ends = (batch.first_pages + batch.page_counts).tolist()
    lists = [pages[lo * size : hi * size] for lo, hi in zip([0, *ends], ends, strict=False)]
    order = np.array(sorted(segments.tolist(), key=lists.__getitem__))  # in any order of page ids
    tables, starts = batch.page_table[order], batch.starts[order]
    differs = np.ones((len(order) - 1, tables.shape[1] + 1), dtype=bool)
    differs[:, :-1] = tables[1:] != tables[:-1]
    common = differs.argmax(axis=1) * batch.page_size
    shared[1:] = np.minimum(common, np.minimum(starts[1:], starts[:-1]))
    return order, shared


def _may_share(batch: RaggedBatch, segments: IntArray) -> bool:
    """Whether two of them have the page in which the first split ends: most often nobody has."""
    last = (SPLIT - 1) // batch.page_size
    long = segments[batch.page_counts[segments] > last]
    pages = np.sort(batch.pages[batch.first_pages[long] + last])
    return bool((pages[1:] == pages[:-1]).any())


_NONE = np.zeros(0, dtype=np.int64)
_NO_ITEMS = Items(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)
